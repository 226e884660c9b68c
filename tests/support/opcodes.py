"""A measure of work that no loaded machine changes."""

import sys
from collections.abc import Callable


def opcodes_of(work: Callable[[], object]) -> int:
    """How many of Python's instructions this takes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
