"""Ranks that run a function, which needs a module beside this script, until they are ended."""

import os
import time
from pathlib import Path

import helper

import ringreduce as rr


def function(folder):
    (Path(folder) / f"{helper.NAME}{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(100)


rr.run(function, (os.getcwd(),), np=2)
