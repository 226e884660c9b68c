"""The constants of the cost model are measured until other work has not made them slower."""

from types import SimpleNamespace

import pytest

from ringreduce.startup import measure

QUIET = [2e-4, 0.0, 0.0, 50.0, 1100.0]  # µs: a byte copied; between hosts a small message, and a large one
WIRE_GBS = 1e-3 * measure.LARGE_BYTES / 1050


def measured(monkeypatch, attempts, rank=0):
    """The constants of two ranks, one of which is busy as `attempts` say, and how many attempts were made."""
    coming = iter(attempts)

    def figures(*_):
        yield from ()
        return [each * factor for each, factor in zip(QUIET, next(coming), strict=True)]

    monkeypatch.setattr(measure, "figures", figures)
    world = SimpleNamespace(rank=rank, hosts=(0, 1), allgather_object=lambda own: [QUIET, own])
    return measure.measured(world, None), len(attempts) - len(list(coming))


def test_twice_on_a_quiet_machine(monkeypatch):
    found, attempts = measured(monkeypatch, [[1.0] * 5, [1.05] * 5, [1.0] * 5])
    assert attempts == 2
    assert (found.copy_gbs, found.wire_us, found.wire_gbs) == pytest.approx((5, 50, WIRE_GBS))


def test_a_rate_does_not_come_from_a_small_message_that_took_long(monkeypatch):
    """Taken alone the first attempt would say 1100 µs - 900 µs for the bytes: a wire five times too fast."""
    found, attempts = measured(monkeypatch, [[1, 1, 1, 18, 1], [1, 1, 1, 1, 2], [3, 1, 1, 1, 1], [1] * 5])
    assert attempts == 3
    assert (found.wire_us, found.wire_gbs) == pytest.approx((50, WIRE_GBS))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_stays_busy_is_told_of_once(monkeypatch, rank):
    lines = []
    monkeypatch.setattr(measure, "LOGGER", SimpleNamespace(info=lines.append))
    found, attempts = measured(monkeypatch, [[factor] * 5 for factor in (16, 8, 4, 2, 1)], rank)
    assert attempts == measure.ATTEMPTS == 4
    assert found.wire_us == 100
    assert len(lines) == (rank == 0)
    assert all("keeps this machine or its links busy" in line and "wire_us=200" in line for line in lines)
