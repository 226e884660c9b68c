"""Operations whose results go into arrays that the caller gives, on one host and several; messages from any rank."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.view import as_buffer
from ringreduce.execution.into_outputs import INTO_OUTPUTS
from ringreduce.runtime.arguments import details_of
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

SUM = details_of(rr.Sum, 1.0, 1.0)
worlds = pytest.mark.parametrize("hosts", [None, [0, 1, 2], [0, 0, 1]], ids=["one host", "three hosts", "two hosts"])


def open_channel(members=None, name="group", operations=INTO_OUTPUTS):
    channels = runtime.current("a test").engine.channels
    number, opened = channels.open(range(rr.size()) if members is None else members, name, operations)
    opened.wait()
    return number


def begin(channel, kind, inputs=(), outputs=(), details=(), signed=(), **options):
    sources, targets = ([as_buffer(each, writable=True) for each in arrays] for arrays in (inputs, outputs))
    return runtime.current("a test").engine.submit(
        kind,
        None,
        channel,
        details=details,
        signed=[as_buffer(each) for each in signed],
        inputs=sources,
        outputs=targets,
        **options,
    )


def rows(rank, count, dtype=np.float32):
    return (np.arange(count) + 100 * rank).astype(dtype)


def all_operations():
    channel, rank, size = open_channel(), rr.rank(), rr.size()
    lengths = (5, 0, 100_003)
    inputs = [
        rows(rank, count, dtype) for count, dtype in zip(lengths, (np.int16, np.float64, np.float32), strict=True)
    ]
    outputs = [np.zeros(each.size, each.dtype) for _ in range(size) for each in inputs]
    begin(channel, "all_gather", inputs, outputs).wait()
    for source in range(size):
        for mine, found in zip(inputs, outputs[3 * source :], strict=False):
            np.testing.assert_array_equal(found, rows(source, mine.size, mine.dtype))
    whole = np.zeros((size, 7), np.float32)
    whole[rank] = rows(rank, 7)
    begin(channel, "all_gather", [whole[rank]], list(whole)).wait()
    np.testing.assert_array_equal(whole, [rows(each, 7) for each in range(size)])

    parts = [rows(rank + r, count + r, dtype) for r in range(size) for count, dtype in ((3, np.float32), (0, np.int64))]
    found = [np.zeros(3 + rank, np.float32), np.zeros(rank, np.int64)]
    begin(channel, "reduce_scatter", parts, found, SUM).wait()
    for each, count in zip(found, (3, 0), strict=True):
        expected = sum(rows(source + rank, count + rank, each.dtype) for source in range(size))
        np.testing.assert_array_equal(each, expected)

    outgoing = [rows(rank, 10 * rank + to) for to in range(size)]
    incoming = [np.zeros(10 * source + rank, np.float32) for source in range(size)]
    begin(channel, "all_to_all", outgoing, incoming, payload=True).wait()
    for source, each in enumerate(incoming):
        np.testing.assert_array_equal(each, rows(source, 10 * source + rank))
    wrong = [np.zeros(3 + (rank == 2 and to == 1), np.float32) for to in range(size)]
    match = (
        r"^rank \d, all_to_all 'group' \(.*\): rank 2 sends 4 elements to rank 1, which expects 3; splits must match"
    )
    with pytest.raises(rr.MismatchError, match=match):
        begin(channel, "all_to_all", wrong, [np.zeros(3, np.float32) for _ in range(size)], payload=True).wait()

    bits = np.array([0b1100 + rank, 7], np.uint8)
    target = np.zeros(2, np.uint8) if rank else bits
    begin(channel, "reduce", [bits], [target], (("op", "BitwiseXor"), *SUM[1:])).wait()
    if rank == 0:
        assert bits.tolist() == [0b1100 ^ 0b1101 ^ 0b1110, 7]


@worlds
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_operations(hosts, deterministic):
    run_ranks(3, all_operations, hosts=hosts, settings=Settings(deterministic=deterministic))


def messages_from_any_rank():
    """More of them than receives that wait, in another order than they are asked for."""
    channel, rank, size = open_channel(), rr.rank(), rr.size()
    count = 20
    if rank:
        sent = []
        for number in range(count):
            value = np.array([rank, number], np.int64)
            sent.append(begin(channel, "send", [value], signed=[value], payload=(0, number % 2)))
        for each in sent:
            each.wait()
        return None
    found = []
    for tag in (1, 0):
        handles = []
        for _ in range((size - 1) * count // 2):
            value = np.zeros(2, np.int64)
            came_from = lambda submission, value=value: (submission.payload[0], *value.tolist())  # noqa: E731
            handles.append(begin(channel, "recv", (), [value], signed=[value], payload=(None, tag), finish=came_from))
        found += [each.wait() for each in handles]
    return found


@worlds
def test_messages_from_any_rank_come_once_each_and_in_order(hosts):
    found = run_ranks(3, messages_from_any_rank, hosts=hosts)[0]
    assert all(source == rank for source, rank, _ in found)
    for rank in (1, 2):
        assert [number for _, source, number in found if source == rank] == [*range(1, 20, 2), *range(0, 20, 2)]
