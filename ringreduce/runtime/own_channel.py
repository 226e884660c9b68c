"""A channel that its members alone open, and operations on it whose results go into arrays that the caller gives.

What a framework's own communication needs, as torch.distributed does, in terms of buffers; see execution/channel.py.
Where an operation has arrays for each rank, those of rank r are r * k to (r + 1) * k - 1, of k together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.view import check_apart
from ringreduce.collectives.ops import ReduceOp, Reduction
from ringreduce.compression import Quantized
from ringreduce.errors import CollectiveError, InputError
from ringreduce.execution.into_outputs import INTO_OUTPUTS
from ringreduce.execution.send_receive import tag_of
from ringreduce.execution.signature import calling_line
from ringreduce.execution.submission import Ended, Handle
from ringreduce.runtime.arguments import Details, check_encoded, details_of

Arrays = Sequence[Buffer]
IN_PLACE = "allreduce", "broadcast"


class OwnChannel:
    """Each method begins an operation, in the order of the program; roots and peers are ranks in the channel.

    members: ranks of the world, by rank in the channel.
    anew:    how the caller's users make another one, in a message.
    options: then, waits, finish, payload and timeout_s, as of the engine's submit().
    Raises:  InputError for arrays that do not fit each other; CollectiveError when it was shut. Handles raise
             MismatchError on all members when these differ, PeerLostError when one has left.
    """

    def __init__(self, members: Sequence[int], name: str, timeout_s: float, anew: str) -> None:
        current = runtime.current(name)
        self.engine, self.members, self.timeout_s, self._anew = current.engine, list(members), timeout_s, anew
        self.size, self.rank, self.name = len(members), self.members.index(current.world.rank), name
        self._number: int | None
        self._number, opened = self.engine.channels.open(members, name, INTO_OUTPUTS)
        try:
            opened.wait(timeout_s)
        except BaseException:
            self.shut()
            raise
        self._lane = self.engine.lane(self._number)

    def begin(
        self,
        kind: str,
        inputs: Arrays = (),
        outputs: Arrays = (),
        details: Details = (),
        signed: Arrays | None = None,
        counted: bool = False,
        lane: tuple[Buffer, Buffer] | None = None,
        **options: Any,
    ) -> Handle:
        """Submit an operation.

        signed: the arrays whose types and shapes, or (counted) numbers of elements, must be equal on all ranks; by
                default the inputs.
        lane:   the one source and the one target of what the lane (execution/lane.py) may do at once.
        """
        if self._number is None:
            raise CollectiveError(f"{kind}: this process group was destroyed")
        if self.engine is not runtime.current(kind).engine:
            raise InputError(
                f"{kind}: this process group belongs to a world that has ended; destroy it and create it again: "
                + self._anew
            )
        if lane is None and kind in IN_PLACE and len(inputs) == 1:
            lane = inputs[0], inputs[0]
        call = program = None
        if self._lane and (lane or kind == "barrier") and options.get("waits") and not options.get("payload"):
            source, target = lane or (None, None)
            call = kind, details, source and (source.element, source.shape, source.device)
            program = self._lane.programs.find(call)
            if program and self._lane.run(program, source and source.flat, target and target.flat):
                return _ended(options)
        arrays = inputs if signed is None else signed
        signed = [each.part(0, each.count) for each in arrays] if counted else arrays
        options = {"timeout_s": self.timeout_s, "of_step": True, **options}
        handle = self.engine.submit(
            kind, None, self._number, details=details, signed=signed, inputs=inputs, outputs=outputs, **options
        )
        if call and not program and self._lane:
            self._lane.programs.learn(call, handle)
        return handle

    def refused(self, kind: str, error: InputError, tells: bool) -> InputError:
        """The error for a call with the place that it has here; tells: the other members, which wait in theirs."""
        line = calling_line()
        made = type(error)(f"{kind} {self.name!r} ({line}): {error}")
        if tells and self._number is not None and runtime.is_initialized():
            self.engine.submitting.refuse(kind, None, self._number, str(error), line)
        return made

    def shut(self) -> None:
        """End it on this rank: what is not complete fails."""
        if runtime.is_initialized() and self._number is not None:
            self.engine.channels.shut(self._number)
        self._number = None

    def allreduce(
        self, arrays: Arrays, op: ReduceOp, factor: float = 1.0, wire: Quantized | None = None, **options: Any
    ) -> Handle:
        """Reduce each array in place, times a factor.  wire: for floating-point arrays, and Average or Sum."""
        if len(arrays) > 1:
            options["together"] = check_apart
        return self.begin("allreduce", arrays, arrays, self._reduction(arrays, op, factor, wire), **options)

    def reduce(self, arrays: Arrays, root: int, op: ReduceOp, factor: float = 1.0, **options: Any) -> Handle:
        """As `allreduce`, on the root only."""
        outputs = arrays if self.rank == root else [each.empty(each.shape) for each in arrays]
        details = self._reduction(arrays, op, factor) + self._root(root)
        return self.begin("reduce", arrays, outputs, details, **options)

    def broadcast(self, arrays: Arrays, root: int, **options: Any) -> Handle:
        """Copy the root's arrays into the others'."""
        return self.begin("broadcast", arrays, arrays, self._root(root), **options)

    def all_gather(self, inputs: Arrays, outputs: Arrays, **options: Any) -> Handle:
        """Copy the inputs of every rank into the outputs for it, on all."""
        _check_count("outputs", len(outputs), self.size * len(inputs))
        for number, each in enumerate(inputs):
            _check_equal(each, outputs[number :: len(inputs)])
        return self.begin("all_gather", inputs, outputs, **options)

    def reduce_scatter(self, inputs: Arrays, outputs: Arrays, op: ReduceOp, factor: float, **options: Any) -> Handle:
        """Reduce the inputs for each rank into the outputs of that one; they may differ in size by rank."""
        _check_count("inputs", len(inputs), self.size * len(outputs))
        for number, each in enumerate(outputs):
            _check_equal(inputs[self.rank * len(outputs) + number], [each])
        details = self._reduction(inputs, op, factor)
        return self.begin("reduce_scatter", inputs, outputs, details, counted=True, **options)

    def all_gather_single(self, mine: Buffer, whole: Buffer, **options: Any) -> Handle:
        """As `all_gather`, one after the other into one array."""
        return self.all_gather([mine], self.equal_parts(whole), lane=(mine, whole), **options)

    def reduce_scatter_single(self, whole: Buffer, mine: Buffer, op: ReduceOp, factor: float, **options: Any) -> Handle:
        """As `reduce_scatter`, of equal parts of one array."""
        parts = self.equal_parts(whole)
        return self.reduce_scatter(parts, [mine], op, factor, lane=(whole, mine), **options)

    def all_to_all(self, inputs: Arrays, outputs: Arrays, **options: Any) -> Handle:
        """Input r goes to rank r, from which output r comes."""
        _check_count("inputs", len(inputs), self.size)
        _check_count("outputs", len(outputs), self.size)
        if len(elements := {each.element.name for each in (*inputs, *outputs)}) > 1:
            raise InputError(f"arrays of {' and '.join(sorted(elements))}; expected one type")
        return self.begin("all_to_all", inputs, outputs, signed=inputs[0].cut([0]), payload=True, **options)

    def gather(self, mine: Buffer, of_root: Arrays, root: int, **options: Any) -> Handle:
        """Copy each rank's array into one of the root's, which alone has some."""
        pair = self._with_root("gather", mine, of_root, root)
        return self.begin("gather", *pair, self._root(root), [mine], **options)

    def scatter(self, mine: Buffer, of_root: Arrays, root: int, **options: Any) -> Handle:
        """Copy one of the root's arrays into each rank's."""
        outputs, inputs = self._with_root("scatter", mine, of_root, root)
        return self.begin("scatter", inputs, outputs, self._root(root), [mine], **options)

    def send(self, arrays: Arrays, destination: int, tag: int, **options: Any) -> Handle:
        """Send an array."""
        return self.begin("send", arrays, counted=True, payload=(self._member(destination), tag_of(tag)), **options)

    def recv(self, arrays: Arrays, source: int | None, tag: int, **options: Any) -> Handle:
        """Receive an array of as many elements of this type as was sent with this tag; None: from any rank.

        The handle returns whose it was.
        """
        peer = None if source is None else self._member(source)
        options |= {"payload": (peer, tag_of(tag)), "finish": lambda done: self.members.index(done.payload[0])}
        return self.begin("recv", (), arrays, signed=arrays, counted=True, **options)

    def equal_parts(self, array: Buffer) -> list[Buffer]:
        """An array cut into one part for each rank."""
        if array.count % self.size:
            raise InputError(f"{array.count} elements cannot be split equally among {self.size} ranks")
        return array.cut([array.count // self.size] * self.size)

    def parts_of_rows(self, array: Buffer, rows: Iterable[int]) -> list[Buffer]:
        """An array cut into parts of so many rows, one for each rank; equal parts where these are not given.

        rows: numbers of any library, in what can be iterated; of NumPy's own integers, products overflow.
        """
        rows = [*map(operator.index, rows)]
        if not rows:
            return self.equal_parts(array)
        whole = array.shape[0] if array.shape else 0
        if len(rows) != self.size or sum(rows) != whole or min(rows) < 0:
            raise InputError(f"splits {rows} of {whole} rows; expected {self.size} that add up to that")
        length = array.count // max(whole, 1)
        return array.cut([each * length for each in rows])

    def _reduction(self, arrays: Arrays, op: ReduceOp, factor: float, wire: Quantized | None = None) -> Details:
        for element in {each.element for each in arrays}:
            Reduction(op, element, self.size, factor).check()
            check_encoded(element, wire)
        return details_of(op, factor, 1.0, wire)

    def _root(self, root: int) -> Details:
        return (("root_rank", self._member(root)),)

    def _member(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise InputError(f"rank {rank} of the group; expected one from 0 to {self.size - 1}")
        return self.members[rank]

    def _with_root(self, kind: str, mine: Buffer, of_root: Arrays, root: int) -> tuple[Arrays, Arrays]:
        """This rank's array for the root, and nothing for others; the root's arrays, and nothing of others."""
        nothing = mine.empty((0,))
        if self.rank == root:
            _check_count(f"arrays to {kind}", len(of_root), self.size)
            _check_equal(mine, of_root)
        else:
            of_root = [nothing] * self.size
        return [mine if rank == root else nothing for rank in range(self.size)], of_root


def _ended(options: Mapping[str, Any]) -> Handle:
    """Of what the lane has done."""
    if then := options.get("then"):
        then(None)
    return Ended(None)


def _check_count(what: str, count: int, expected: int) -> None:
    if count != expected:
        raise InputError(f"{count} {what}; expected {expected}, as many for each rank")


def _check_equal(mine: Buffer, others: Arrays) -> None:
    for each in others:
        if (each.element, each.count) != (mine.element, mine.count):
            raise InputError(
                f"{each.element.name} of {each.count} elements beside {mine.element.name} of {mine.count}; "
                "expected equal types and sizes"
            )
