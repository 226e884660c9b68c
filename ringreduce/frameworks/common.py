"""What the module of every framework exports as it is: no function of it takes the framework's arrays."""
# ruff: noqa: F403

from ringreduce.api.control import init as init
from ringreduce.api.control import join as join
from ringreduce.api.control import start_timeline as start_timeline
from ringreduce.api.control import stop_timeline as stop_timeline
from ringreduce.api.info import info as info
from ringreduce.api.launch import run as run
from ringreduce.api.objects import *
from ringreduce.api.ordered import ordered as ordered
from ringreduce.api.process_sets import *
from ringreduce.api.sampler import DistributedSampler as DistributedSampler
from ringreduce.api.steps import mark_step as mark_step
from ringreduce.api.steps import stats as stats
from ringreduce.api.world import *
from ringreduce.checks.switch import check as check
from ringreduce.collectives.ops import *
from ringreduce.compression import Compression as Compression
from ringreduce.errors import *
from ringreduce.runtime import is_initialized as is_initialized
from ringreduce.runtime.lifecycle import shutdown as shutdown
