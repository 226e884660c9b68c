"""The all-reduce of many tensors: chooses each batch's algorithm, and moves its buckets."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringreduce.collectives import compiled, fusion, shared
from ringreduce.collectives.cost_model import BUCKETS_IN_FLIGHT, is_one_shot
from ringreduce.collectives.ops import Adasum, Reduction
from ringreduce.collectives.overlap import overlapped
from ringreduce.compression import Quantized
from ringreduce.errors import InputError
from ringreduce.execution import point_to_point
from ringreduce.execution.batch import Batch, batches
from ringreduce.execution.context import Context
from ringreduce.execution.packing import buckets_of, carry, watcher
from ringreduce.execution.submission import Submission
from ringreduce.kernels import quantized
from ringreduce.settings.log import LOGGER
from ringreduce.transport.base import Steps

ADASUM = ("op", Adasum.value)


def allreduce(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Reduce the tensors of submissions with equal details; completes each as soon as it is finished."""
    recorded = submissions[0].recorder is not None or context.timeline.recording
    if submissions[0].reduced is not None:
        _finish(submissions[0], context)
        return
    first = submissions[0]
    region, (wire, short) = context.algorithms.shared_region, first.plan.way or _way(first, context)
    if short is not None and region is not None and len(submissions) == 1 and not context.timeline.recording:
        reduction = short if short.size == first.divisor else first.reduction(short.element)
        first.algorithm = "shared"
        yield from shared.one_shot(first.inputs[0].flat, first.outputs[0].flat, region, reduction)
        first.complete()
        return
    work = []
    found = [(batch, first.reduction(batch.inputs[0].element)) for batch in batches(submissions)]
    if wire is not None:
        found = [(batch, _encoded(reduction, wire, context)) for batch, reduction in found]
    of_gpu = [each for each in found if each[0].on_gpu]
    on_gpu = (yield from context.gpu.allreduces(of_gpu)) if of_gpu else []
    for batch, reduction in found:
        if batch.on_gpu:
            continue
        algorithm = context.algorithms.choose(batch.nbytes, reduction)
        if algorithm == "shared" and compiled.can(region, reduction) and not context.timeline.recording:
            algorithm = "compiled"
        reduction = context.algorithms.on_wire(algorithm, reduction)
        buckets = None if algorithm == "compiled" else _buckets(batch, reduction, algorithm, context)
        batch.expect(buckets)
        if context.debugs:
            what = f"allreduce of {len(batch.inputs)} tensors, {batch.nbytes} B of {reduction.element.name}"
            how = algorithm if wire is None else f"{algorithm}, {wire}"
            LOGGER.debug(f"{what}: {how}" + (f", in {len(buckets)} buckets" if buckets else ""))
        for submission in batch.owners if recorded else ():
            submission.algorithm = "shared" if algorithm == "compiled" else algorithm
        work.append((batch, reduction, algorithm, buckets))
    context.completions.settle(submissions)
    for each in on_gpu:
        yield from each
    for batch, reduction, algorithm, buckets in work:
        if buckets is None:
            yield from _compiled(batch, reduction, context)
        elif algorithm in ("shared", "hierarchical"):
            yield from _through_window(batch, reduction, buckets, context)
        else:
            yield from overlapped(_through_messages(batch, reduction, algorithm, buckets, context), BUCKETS_IN_FLIGHT)


class Way(NamedTuple):
    """How an all-reduce is run, as far as it alone decides; the same on all ranks, and kept in its plan."""

    wire: Quantized | None
    short: Reduction | None  # of one short array on one host, whose sum needs no buckets


def _way(submission: Submission, context: Context) -> Way:
    wire, short, region = context.algorithms.wire(submission.signature), None, context.algorithms.shared_region
    if wire is None and region is not None and len(submission.inputs) == 1 and not submission.inputs[0].on_gpu:
        nbytes = submission.inputs[0].nbytes
        if 0 < nbytes <= region.slot_bytes and is_one_shot(nbytes, region.size):
            short = submission.reduction(submission.inputs[0].element)
    way = Way(wire, short)
    if submission.plan.is_whole:
        submission.plan.way = way
    return way


def _encoded(reduction: Reduction, wire: Quantized, context: Context) -> Reduction:
    if wire.is_stochastic and context.settings.deterministic:
        raise InputError(
            f"{wire} with RINGREDUCE_DETERMINISTIC=1: its random numbers depend on how tensors are fused; pass "
            "Compression.int4, or unset the variable"
        )
    return reduction._replace(wire=wire, seed=(next(context.draws),) if wire.is_stochastic else ())


def _finish(submission: Submission, context: Context) -> None:
    with context.timeline.phase([submission], "ALLREDUCE"):
        submission.outputs[0].flat[...] = submission.reduced
    submission.complete()


def is_by_elements(submission: Submission) -> bool:
    """True for an all-reduce that works element by element; Adasum compares whole tensors."""
    return submission.signature.kind == "allreduce" and ADASUM not in submission.signature.details


def travelling(submission: Submission, most_bytes: int) -> Reduction | None:
    """The reduction, where the elements travel with what the hosts agree on, into `reduced`; else None.

    What is encoded never does, or its bits would depend on who was late.
    """
    plan = submission.plan
    if plan.travels is not None:
        return plan.travels[0]
    reduction = _travelling(submission, most_bytes)
    if plan.is_whole:
        plan.travels = (reduction,)
    return reduction


def _travelling(submission: Submission, most_bytes: int) -> Reduction | None:
    if not is_by_elements(submission) or len(submission.inputs) != 1 or submission.inputs[0].on_gpu:
        return None
    if submission.signature.detail("compression") is not None:
        return None
    reduction = submission.reduction(submission.inputs[0].element).on_wire()
    return reduction if submission.inputs[0].count * reduction.sum_type.itemsize <= most_bytes else None


def _buckets(batch: Batch, reduction: Reduction, algorithm: str, context: Context) -> Sequence[fusion.Bucket]:
    itemsize = reduction.element.itemsize
    region = context.algorithms.region
    if algorithm == "hierarchical":
        return fusion.plan(batch.counts, context.algorithms.unit_bytes // itemsize)
    if algorithm == "shared" and region is not None:
        return fusion.plan(batch.counts, region.piece_bytes(batch.nbytes) // itemsize)
    if point_to_point.is_wide(algorithm, reduction):
        itemsize += reduction.sum_type.itemsize  # the finished elements follow the sums
    return buckets_of(batch, context, itemsize, 1 if reduction.wire is None else quantized.BLOCK)


def _compiled(batch: Batch, reduction: Reduction, context: Context) -> Steps[None]:
    region, ends, number = context.algorithms.region, list(itertools.accumulate(batch.counts)), 0

    def progress(finished: int) -> None:
        nonlocal number
        end = bisect.bisect_right(ends, finished, number)
        context.completions.settle(batch.owners[number:end])
        number = end

    inputs, outputs = [each.flat for each in batch.inputs], [each.flat for each in batch.outputs]
    yield from compiled.allreduce(inputs, outputs, region, reduction, progress)  # type: ignore[arg-type]


def _through_window(
    batch: Batch, reduction: Reduction, buckets: Sequence[fusion.Bucket], context: Context
) -> Steps[None]:
    inputs = [each.flat for each in batch.inputs]
    outputs = [each.flat for each in batch.outputs]
    parts = [
        [shared.BufferPair(inputs[number][low:high], outputs[number][low:high]) for number, low, high in bucket.pieces]
        for bucket in buckets
    ]
    yield from context.algorithms.through_window(parts, reduction, watcher(batch, buckets, context))


def _through_messages(
    batch: Batch, reduction: Reduction, algorithm: str, buckets: Sequence[fusion.Bucket], context: Context
) -> Iterator[Steps[None]]:
    """The steps of each bucket, in order; `overlapped` begins the next when a channel is free."""
    wide = reduction if point_to_point.is_wide(algorithm, reduction) else None
    for number, bucket in enumerate(buckets):
        channel = number % BUCKETS_IN_FLIGHT
        own = reduction.of_bucket(number)
        collective = functools.partial(point_to_point.allreduce, algorithm, own, channel, context)
        yield carry(batch, bucket, collective, "ALLREDUCE", context, wide)
