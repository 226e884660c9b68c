"""Run pytest with another build of the compiled module: python -m tests.support.instead MODULE [argument ...]."""

import importlib.util
import sys

import pytest

NAME = "ringreduce.kernels._native"
spec = importlib.util.spec_from_file_location(NAME, sys.argv[1])
sys.modules[NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[NAME])
sys.exit(pytest.main(sys.argv[2:]))
