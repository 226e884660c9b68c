"""What programs that run on ranks in threads share."""

import ringreduce as rr
from ringreduce import runtime
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete


def transport():
    """That of the rank that asks."""
    return runtime.current("test").transport


def known(ranks, number):
    """A process set that the world was formed with."""
    process_set = rr.ProcessSet(ranks)
    process_set.process_set_id = number
    return process_set


def reduced_over_messages(module, arrays, reduction, *options, messages=None, buffered=False):
    """The results of all ranks, each of whom gives one of `arrays` to module.allreduce.

    A rank's memory is its own again as soon as it has the result: it writes nonsense there.
    """

    def program():
        flat = arrays[transport().rank].copy().view(reduction.element.storage)
        complete(module.allreduce(flat, transport(), reduction, *options))
        result = flat.copy()
        flat.view("uint8")[...] = 0x55
        return result.view(arrays[0].dtype)

    return run_ranks(len(arrays), program, messages=messages, buffered=buffered)
