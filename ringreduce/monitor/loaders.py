"""Counts the examples that data loaders give a rank, while its steps are recorded: nobody has to call mark_step().

The iterators of torch's DataLoader, of a tf.data.Dataset that is read eagerly, and of Keras's fit() are watched where
these modules are imported; nothing is imported here. A batch whose length is not certain is not counted, nor is what is
taken while torch computes no gradients.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ringreduce.execution.living import Living
from ringreduce.execution.steps import StepRecorder

_SEQUENCE = 0  # torch's _DatasetKind.Map
_recorders: Living[StepRecorder] = Living()
_watched: set[Any] = set()
_asked: weakref.WeakKeyDictionary[object, collections.deque[int]] = weakref.WeakKeyDictionary()
"""Of torch's iterators: how many examples are in the batches that they have asked for, and not given yet."""
_fits: set[object] = set()  # passes of Keras's that are counted; other loaders give them what they count


def watch(recorder: StepRecorder) -> None:
    """Tell `recorder` of each batch that its thread takes, from iterators of modules that are imported by now."""
    _recorders.add(recorder)
    for (module, name, method), wrap in _ITERATORS.items():
        kind = getattr(sys.modules.get(module), name, None)
        if (kind, method) not in _watched and hasattr(kind, method):
            _watched.add((kind, method))
            setattr(kind, method, wrap(getattr(kind, method)))


def _tell(tell: Callable[..., None], iterator: object, *examples: int | None) -> None:
    """Call a method of all recorders whose thread this is."""
    for recorder in _recorders:
        if recorder.recording and recorder.thread == threading.get_ident():
            with contextlib.suppress(TypeError):  # what cannot be referred to weakly
                tell(recorder, iterator, *examples)


def _counted(own: Callable[[Any], Any], examples: Callable[[Any, Any], int | None]) -> Callable[[Any], Any]:
    """The method that returns the next batch; examples: how many are in it, by the iterator and the batch."""

    @functools.wraps(own)
    def __next__(iterator: Any) -> Any:  # noqa: N807 - the sampler knows a loader by this name
        try:
            batch = own(iterator)
        except StopIteration:
            _tell(StepRecorder.loaded_all, iterator)
            raise
        count = examples(iterator, batch)
        if not _fits and _has_gradients():
            _tell(StepRecorder.loaded, iterator, count)
        return batch

    return __next__


def _has_gradients() -> bool:
    return bool(getattr(sys.modules.get("torch"), "is_grad_enabled", lambda: True)())


def _of_keras(own: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """The method that says before each call of a compiled step which steps it is; the batches pass Python by."""

    @functools.wraps(own)
    def enumerate_iterator(epoch: Any) -> Iterator[Any]:
        steps = own(epoch)
        try:
            for each in steps:
                with contextlib.suppress(AttributeError, TypeError):
                    examples = _in_execution(epoch)
                    _fits.add(steps)
                    _tell(StepRecorder.loaded, steps, examples)
                yield each
        finally:
            _fits.discard(steps)
            _tell(StepRecorder.loaded_all, steps)

    return enumerate_iterator


def _in_execution(epoch: Any) -> int:
    """How many examples the steps of Keras's next execution have; the data may end within it, with a smaller batch."""
    adapter, steps = epoch.data_adapter, epoch.steps_per_execution
    missing = epoch._steps_seen - (adapter.num_batches or math.inf)
    if missing < 0:
        return int(adapter.batch_size * steps)
    return int(adapter.batch_size * (steps - missing - 1) + (adapter.partial_batch_size or adapter.batch_size))


def in_batch(batch: Any) -> int | None:
    """The length that all parts of a batch have in common; None if they differ, or there is none.

    >>> in_batch({"text": ["a", "b"], "label": [0, 1]}), in_batch([[1, 2, 3], 7]), in_batch("ab")
    (2, None, None)
    """
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else [batch]
    lengths = {_length(each) for each in parts}
    return lengths.pop() if len(lengths) == 1 else None


def _length(part: Any) -> int | None:
    if isinstance(part, tuple | list):
        return len(part)
    try:
        return int(part.shape[0])
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _asking(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The method that returns a batch sampler's next indices."""

    @functools.wraps(own)
    def _next_index(iterator: Any) -> Any:
        indices = own(iterator)
        if iterator._auto_collation:
            _asked.setdefault(iterator, collections.deque()).append(len(indices))
        return indices

    return _next_index


def _in_torchs(iterator: Any, batch: Any) -> int | None:
    """As many as the batch sampler asked for; a data set that is no sequence may give fewer.

    None where the data set itself makes batches: their first dimension may be anything.
    """
    if not iterator._auto_collation:
        return None
    asked, found = _asked.get(iterator), in_batch(batch)
    most = asked.popleft() if asked else None  # None: of before it was watched
    if most is None or (found is not None and found < most and iterator._dataset_kind != _SEQUENCE):
        return found
    return most


_ITERATORS: dict[tuple[str, str, str], Callable[[Any], Any]] = {
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__"): lambda own: _counted(own, _in_torchs),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "_next_index"): _asking,
    ("tensorflow.python.data.ops.iterator_ops", "OwnedIterator", "__next__"): lambda own: _counted(
        own, lambda _, batch: in_batch(batch)
    ),
    ("keras.src.trainers.epoch_iterator", "EpochIterator", "_enumerate_iterator"): _of_keras,
}
"""Module, class and method, private ones too: where a release renames one, its batches are not counted."""
