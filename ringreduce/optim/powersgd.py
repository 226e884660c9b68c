"""PowerSGD: of a gradient that is a matrix two thin factors are reduced, and what they miss is added to the next one.

    M = gradient + residual      (n, m), each rank's own; further dimensions count to m
    P = M Q                      (n, rank), reduced; then its columns are made orthonormal
    Q = M^T P                    (m, rank), reduced; the next step's P begins with it
    gradient = P Q^T,  residual = M - P Q^T

Both factors are kept transposed: a BLAS takes a multiple of the time for M^T P where P is (n, rank) in memory. Rows are
added up and multiplied block by block, in the core's cache: nothing as large as M is allocated, and a gradient stays as
it was until all has arrived, so a bucket that ranks must split begins anew.

The first all-reduce takes along whatever is not factored. The second is submitted by the thread that polls, when the
first ends, and not by the caller's: that may wait for another gradient first than the caller's of another rank, and
each would wait for the other's second. M^T P keeps the thread about as long as to sum two such matrices would (768 x
3072: 0.7 ms); the rest is the caller's, in `finish`.

All ranks get the same bits, since each makes them of the same reduced factors in the same order: the columns by sums of
NumPy's, which no number of threads divides, and P Q^T by sums of `rank` products. So ranks need the same NumPy, and
CPUs of one kind, as they do wherever each computes the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ringreduce.api.objects import allgather_object, broadcast_object
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import grouped_allreduce
from ringreduce.arrays.buffer import Buffer, numpy_buffer
from ringreduce.arrays.dtypes import element_type
from ringreduce.arrays.view import as_buffer
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.runtime.submit import whole_number

BLOCK = 1 << 17  # elements of M at a time
DEPENDENT = 1e-12  # what is left of a column, of its length, that is a sum of others but for float64's rounding


class Shared(NamedTuple):
    """What all ranks have alike of one gradient."""

    steps: int  # how often it was reduced
    rows: int
    q: Any  # (rank, m), transposed


class PowerSGD:
    """The `compression=` of a `DistributedOptimizer` that sends, instead of each matrix, two factors of it.

    rank:       the columns of each factor. 4 is 1 % of the bytes of a matrix of 768 x 768; 8 loses less.
    start_step: so many times each gradient is reduced in full precision first.

    Make one for each optimizer, of torch or of arrays such as NumPy's, in host memory; op Average or Sum. A gradient of
    shape (n, ...) counts as a matrix of n rows. Those whose factors would not be smaller, integers and complex numbers
    travel as they are; 16-bit ones are factored in float32. What factors have missed on a rank, the residual, is added
    to its next gradient of that name. Where a gradient is not finite on a rank, the reduced one is not on any, and the
    residual stays. An elastic state commits each rank's residuals with the optimizer; a new rank begins with none.

    Cost:   rank * (n + m) elements instead of n * m, in two all-reduces; memory: a residual, of n * m.
    Raises: InputError for wrong arguments, at the first step for arrays on a GPU, and see `load_state_dict`;
            MismatchError when ranks differ in `rank` or `start_step`.
    Source: Vogels, Karimireddy & Jaggi, "PowerSGD", 2019.
    """

    def __init__(self, rank: int = 4, start_step: int = 100) -> None:
        self.rank = whole_number("PowerSGD: rank", rank, 1)
        self.start_step = whole_number("PowerSGD: start_step", start_step, 0)
        self.shared: dict[str, Shared] = {}
        self.residuals: dict[str, Any] = {}  # each (n, m); none yet counts as zeros
        self._is_complete = False  # `shared` was loaded, and must have all gradients
        self._kind = Buffer

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, start_step={self.start_step})"

    @staticmethod
    def compress(*_: Any) -> NoReturn:
        """Raise InputError: this is no `Compressor`."""
        raise InputError(
            "compression=PowerSGD(...) keeps what it has not sent for the next step, so it is for DistributedOptimizer "
            "only, of torch or of NumPy arrays; pass Compression.fp16 here"
        )

    decompress = compress

    def state_dict(self, process_set: ProcessSet = global_process_set) -> dict[str, Any]:
        """A copy of its state, for a checkpoint: the same on all ranks, to load on any number of them.

        Every rank of `process_set`, the optimizer's, must call it, between two steps.

        Returns: `rank`, and by gradient `steps`, `q` (a factor) and `residuals`, their mean over ranks; arrays of the
                 gradients' library.
        Cost:    as an all-reduce of the gradients in full precision.
        """
        names = sorted(self.shared)
        own = [self._residual(name) for name in names]
        means = grouped_allreduce(own, name="PowerSGD", names=names, process_set=process_set) if names else []
        return {
            "rank": self.rank,
            "steps": {name: self.shared[name].steps for name in names},
            "q": {name: self._as_gradients(self.shared[name].q.copy()) for name in names},
            "residuals": {name: self._as_gradients(mean) for name, mean in zip(names, means, strict=True)},
        }

    def _as_gradients(self, array: Any) -> Any:
        """An array of the library whose gradients there are, in the same memory."""
        return self._kind(array.ravel(), element_type(array.dtype), array.shape, "cpu", array.dtype).array()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from what `state_dict` returned, on as many ranks as there are now; each loads the same.

        strict: every gradient that is to be factored must be in it; False: others begin with a residual of zeros.
        Raises: InputError when it is of another `rank`; at the next step when a gradient is not in it, or of another
                shape: it is that of another model.
        """
        if state["rank"] != self.rank:
            raise InputError(
                f"PowerSGD: the loaded state has rank={state['rank']}; expected {self.rank}: pass the same rank="
            )
        self.residuals = {name: _copied(each) for name, each in state["residuals"].items()}
        self.shared = {
            name: Shared(state["steps"][name], len(each), _copied(state["q"][name]))
            for name, each in self.residuals.items()
        }
        self._is_complete = strict and bool(self.shared)

    def elastic_parts(self, own: bool) -> dict[str, Any]:
        """What an elastic state commits: what all ranks have alike, or what is each rank's own."""
        return {"residuals": self.residuals} if own else {"shared": self.shared}

    def forget(self, names: Iterable[str]) -> None:
        """Have no state of these gradients: there are none of these names any more, or they are other ones."""
        for name in names:
            self.shared.pop(name, None)
            self.residuals.pop(name, None)

    def agree(self, process_set: ProcessSet) -> None:
        """Have alike on all ranks again what they share, after a `join` in which some have taken part by zeros only."""
        steps = allgather_object(sum(each.steps for each in self.shared.values()), "PowerSGD", process_set)
        first = steps.index(max(steps))
        root = first if process_set.ranks is None else process_set.ranks[first]
        self.shared = broadcast_object(self.shared, root, "PowerSGD", process_set)

    def begin(
        self,
        submit: Callable[..., Handle],
        name: str | None,
        names: Sequence[str],
        buffers: Sequence[Buffer],
        divisor: int,
    ) -> Handle[None]:
        """Begin to reduce buffers in place; the handle is done when the first all-reduce is, and waits for both.

        submit: begins an all-reduce of a name (or None), the tensors' names, their buffers, and what is called then.
        name, names: of the group and of its members.  divisor: makes the mean over ranks of what is reduced.
        """
        first = dict(zip(names, buffers, strict=True))
        seen = [each for each, buffer in first.items() if self._is_factored(each, buffer)]
        matrices = {}
        for each in seen:
            if self.shared[each].steps >= self.start_step:
                residual = self.residuals.setdefault(each, self._residual(each))
                matrices[each] = matrix = Matrix(first[each], residual, self.shared[each].q)
                first[each] = numpy_buffer(matrix.p, writable=True)
        second: list[Handle | Exception] = []

        def then(error: BaseException | None) -> None:
            if error is None:
                try:
                    factors = [numpy_buffer(each.project_back(), writable=True) for each in matrices.values()]
                    second.append(submit(f"{name or names[0]}.Q", list(matrices), factors))
                except Exception as exc:  # which the caller's thread raises
                    second.append(exc)

        def finish(_: Any) -> None:
            for begun in second:
                if isinstance(begun, Exception):
                    raise begun
                begun.wait()
            for each in seen:
                q = matrices[each].finish(divisor) if each in matrices else self.shared[each].q
                self.shared[each] = self.shared[each]._replace(steps=self.shared[each].steps + 1, q=q)

        return submit(name, names, list(first.values()), then if matrices else None).mapped(finish)

    def _is_factored(self, name: str, buffer: Buffer) -> bool:
        """True for a gradient that is, from some step on; raises InputError for one that cannot be."""
        if buffer.element.kind != "f" or len(buffer.shape) < 2:
            return False
        rows, columns = buffer.shape[0], math.prod(buffer.shape[1:])
        if self.rank * (rows + columns) >= rows * columns:
            return False
        if buffer.on_gpu:
            raise InputError(
                f"PowerSGD: gradient {name!r} is on {buffer.device}, but PowerSGD works in host memory; on GPUs use "
                "DDP over the backend 'ring' and torch's powerSGD_hook, or Compression.fp16"
            )
        if name not in self.shared:
            if self._is_complete:
                raise InputError(
                    f"PowerSGD: gradient {name!r} is not in the loaded state, which has {min(self.shared)!r} and "
                    f"{len(self.shared) - 1} more; load this model's, or pass strict=False if parameters are new"
                )
            rng = np.random.default_rng(zlib.crc32(name.encode()))  # the same on all ranks
            q = rng.standard_normal((self.rank, columns)).astype(buffer.element.sum_type)
            self.shared[name] = Shared(0, rows, q)
        self._kind = type(buffer)
        _, known_rows, q = self.shared[name]
        if (known_rows, q.shape[1]) != (rows, columns):
            raise InputError(
                f"PowerSGD: gradient {name!r} has {rows} x {columns} elements, but its state {known_rows} x "
                f"{q.shape[1]}: that is another model's; load this model's, or make a new PowerSGD for each optimizer"
            )
        return True

    def _residual(self, name: str) -> Any:
        _, rows, q = self.shared[name]
        found = self.residuals.get(name)
        return np.zeros((rows, q.shape[1]), q.dtype) if found is None else found


class Matrix:
    """One gradient's way through a step; `p` and `q` are transposed."""

    def __init__(self, buffer: Buffer, residual: Any, q: Any) -> None:
        self._buffer, self._residual, self._old_q = buffer, residual, q
        flat = buffer.element.widen(buffer.flat) if buffer.element.is_half else buffer.flat
        self._gradient = flat.reshape(residual.shape)
        self.p = np.empty((len(q), len(residual)), residual.dtype)
        with np.errstate(all="ignore"):
            for rows, block in self._blocks():
                np.matmul(q, block.T, out=self.p[:, rows])

    def _blocks(self) -> Iterator[tuple[slice, Any]]:
        """Some rows at a time of M, which the next ones overwrite."""
        rows, columns = self._residual.shape
        step = max(1, BLOCK // columns)
        memory = np.empty((min(step, rows), columns), self._residual.dtype)
        for low in range(0, rows, step):
            here = slice(low, min(low + step, rows))
            yield here, np.add(self._gradient[here], self._residual[here], out=memory[: here.stop - low])

    def project_back(self) -> Any:
        """Q, to be reduced, of the reduced P."""
        self.q = np.zeros_like(self._old_q)
        with np.errstate(all="ignore"):
            orthonormalise(self.p)
            for rows, block in self._blocks():
                self.q += self.p[:, rows] @ block
        return self.q

    def finish(self, divisor: int) -> Any:
        """Put the reduced gradient into its place, and what it lacks into the residual; returns the next step's Q.

        Where it is not finite, which all ranks see alike, the residual and Q stay.
        """
        is_finite = bool(np.isfinite(self.q).all())
        with np.errstate(all="ignore"):
            for rows, block in self._blocks():
                reduced = self.p[:, rows].T @ self.q
                if is_finite:
                    np.subtract(block, reduced if divisor == 1 else reduced / divisor, out=self._residual[rows])
                self._gradient[rows] = reduced
        if self._buffer.element.is_half:
            self._buffer.flat[...] = self._buffer.element.narrow(self._gradient.reshape(-1))
        # a column of zeros would stay one
        return np.where(self.q.any(axis=1, keepdims=True), self.q, self._old_q) if is_finite else self._old_q


def _copied(array: Any) -> Any:
    """As NumPy's."""
    buffer = as_buffer(array)
    return buffer.flat.reshape(buffer.shape).copy()


def orthonormalise(rows: Any) -> None:
    """Make rows orthogonal and of length 1, in place; one that the ones before make up but for rounding becomes zeros.

    Shape:  (rank, n). Computed in float64; what is not finite stays so.
    Source: the modified Gram-Schmidt process.
    """
    wide = rows.astype(np.float64)
    for number, row in enumerate(wide):
        before = np.sqrt(np.sum(row * row))
        for other in wide[:number]:
            row -= np.sum(other * row) * other
        length = np.sqrt(np.sum(row * row))
        row *= 0.0 if length <= DEPENDENT * before else 1 / length
    rows[...] = wide
