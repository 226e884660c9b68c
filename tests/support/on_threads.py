"""What programs that run on ranks in threads share."""

import functools

import numpy as np

import ringreduce as rr
from ringreduce import runtime
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete


def each_rank_of(size, **options):
    """The test is what each of so many ranks does; what they return is equal.

    size: a number, or the parameter of the test that has it. Options are run_ranks'.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            results = run_ranks(fixtures.get(size, size), lambda: test(**fixtures), **options)
            for result in results:
                np.testing.assert_array_equal(result, results[0], err_msg="bit-identical", strict=True)

        return run

    return decorate


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
