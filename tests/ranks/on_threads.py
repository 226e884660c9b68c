"""What programs that run on ranks in threads share."""

import ringreduce as rr
from ringreduce import runtime


def transport():
    """That of the rank that asks."""
    return runtime.current("test").transport


def known(ranks, number):
    """A process set that the world was formed with."""
    process_set = rr.ProcessSet(ranks)
    process_set.process_set_id = number
    return process_set
