"""Examples are counted where data loaders give them: to the thread that trains, by the last one, if it is certain."""

import itertools
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ringreduce.execution.steps import StepRecorder
from ringreduce.monitor import loaders


@pytest.fixture
def recorder():
    made = StepRecorder()
    made.start()
    loaders.watch(made)
    made.stepped("optimizer")
    return made


def examples(recorder):
    recorder.stepped("optimizer")
    return recorder.steps[-1].examples


def numbers(count):
    return TensorDataset(torch.arange(count), torch.zeros(count, 3))


def test_the_batches_of_a_step_are_summed(recorder):
    batches = iter(DataLoader(numbers(50), 20))
    next(batches)
    assert examples(recorder) == 20
    assert examples(recorder) is None, "a step without a batch"
    next(batches), next(batches)
    assert examples(recorder) == 20 + 10, "the last one is smaller"
    assert recorder.totals()["examples"] == 50


def test_what_the_script_says_counts_more(recorder):
    next(iter(DataLoader(numbers(50), 20)))
    recorder.stepped("mark_step", 7)
    assert recorder.steps[-1].examples == 7


def test_the_loader_of_a_test_before_the_step_does_not_count(recorder):
    for _ in range(3):
        for _ in DataLoader(numbers(90), 30):
            pass
        next(iter(DataLoader(numbers(50), 20)))
        assert examples(recorder) == 20


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_loader_of_a_test_between_batch_and_step_does_not_count(recorder, mode):
    """Without gradients, read to its end, or new beside the one that goes on."""
    batches = iter(DataLoader(numbers(90), 20))
    for most in (99, 2, 99):
        next(batches)
        with mode():
            list(itertools.islice(DataLoader(numbers(300), 100), most))
        assert examples(recorder) == 20


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_taken_without_gradients_does_not_count(recorder, mode):
    batches, test = iter(DataLoader(numbers(90), 20)), iter(DataLoader(numbers(300), 100))
    next(batches)
    with mode():
        next(test)
    assert examples(recorder) == 20


def test_several_loaders_of_a_step_are_summed_whoever_gave_the_last_batch(recorder):
    pairs = zip(DataLoader(numbers(90), 10), DataLoader(numbers(90), 7), strict=False)
    for _ in range(3):
        next(pairs), next(pairs)
        assert examples(recorder) == 2 * (10 + 7)


def test_a_step_takes_the_end_of_one_pass_and_the_beginning_of_the_next(recorder):
    batches = iter(DataLoader(numbers(30), 10))
    next(batches), next(batches)
    assert examples(recorder) == 20
    assert len(next(batches)[0]) == 10
    assert next(batches, None) is None
    next(iter(DataLoader(numbers(30), 10)))
    assert examples(recorder) == 20


def test_a_step_of_a_whole_pass_has_all_its_examples(recorder):
    list(DataLoader(numbers(50), 20))
    assert examples(recorder) == 50


def test_batches_of_other_threads_do_not_count(recorder):
    other = threading.Thread(target=lambda: next(iter(DataLoader(numbers(50), 20))))
    other.start()
    other.join()
    assert examples(recorder) is None


def as_lists(items):
    return [[each[0] for each in items], torch.zeros(3, 8)]


def sequences_first(items):
    return torch.stack([each for _, each in items], 1)


class Batches(IterableDataset):
    def __iter__(self):
        yield from [torch.zeros(28, 28)] * 3


@pytest.mark.parametrize(
    ("loader", "count"),
    [
        (DataLoader(numbers(50), 20, collate_fn=as_lists), 20),
        (DataLoader(numbers(50), batch_sampler=[[1, 2, 3], [4]]), 3),
        (DataLoader(Batches(), batch_size=None), None),
        (DataLoader(numbers(50), batch_sampler=[[1, 2, 3]], collate_fn=lambda items: {"a": len(items)}), 3),
        (DataLoader(numbers(50), 20, collate_fn=lambda items: torch.zeros(7, len(items))), 20),
        (DataLoader(Batches(), batch_size=20), 3),
        (DataLoader(Batches(), batch_size=20, collate_fn=lambda items: torch.zeros(33, len(items))), 20),
    ],
    ids=[
        *("parts differ: the size that was asked for", "batch_sampler", "the data set makes batches", "no length"),
        *("sequences first", "a data set of unknown length ends", "its sequences first"),
    ],
)
def test_batches_of_many_kinds(recorder, loader, count):
    next(iter(loader))
    assert examples(recorder) == count


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_has_the_examples_that_its_sampler_asked_for(recorder, workers):
    """Workers are asked ahead; sequences of 3 come first."""
    sampler = [[1, 2, 3, 4], [5, 6, 7, 8, 9], [10]]
    loader = DataLoader(numbers(50), batch_sampler=sampler, num_workers=workers, collate_fn=sequences_first)
    assert [(len(batch), examples(recorder)) for batch in loader] == [(3, 4), (3, 5), (3, 1)]


def test_a_batch_whose_length_is_not_known_leaves_the_step_without(recorder):
    loader = iter(DataLoader(Batches(), batch_size=None))
    next(loader)
    next(loader)
    assert examples(recorder) is None


def test_in_batch():
    arrays = np.zeros((4, 2)), np.zeros(4)
    assert loaders.in_batch(arrays) == 4
    assert loaders.in_batch(dict(enumerate(arrays))) == 4
    assert loaders.in_batch(arrays[0]) == 4
    assert loaders.in_batch((arrays[0], np.zeros(()))) is None, "an example with its label"
    assert loaders.in_batch((arrays[0], np.zeros(3))) is None
    assert loaders.in_batch(()) is None


class EpochIterator:
    """As Keras's, of five batches, the last one of 3: compiled code takes them, two at a time."""

    steps_per_execution = 2

    def __init__(self, batch_size, batches=5):
        self.data_adapter = types.SimpleNamespace(batch_size=batch_size, partial_batch_size=3, num_batches=batches)

    def _enumerate_iterator(self):
        for self._steps_seen in (2, 4, 6):
            yield self._steps_seen


@pytest.fixture
def keras(recorder, monkeypatch):
    module = types.SimpleNamespace(EpochIterator=EpochIterator)
    monkeypatch.setitem(sys.modules, "keras.src.trainers.epoch_iterator", module)
    own = EpochIterator._enumerate_iterator
    for _ in range(2):
        loaders.watch(recorder)  # again does nothing
    yield
    EpochIterator._enumerate_iterator = own
    loaders._watched.discard((EpochIterator, "_enumerate_iterator"))


def test_keras_says_which_steps_come(recorder, keras):
    def told(epoch):
        return [examples(recorder) for _ in epoch._enumerate_iterator()]

    assert told(EpochIterator(16)) == [32, 32, 3], "the data end in the last execution"
    assert told(EpochIterator(16, 6)) == [32, 32, 16 + 3]
    assert told(EpochIterator(16, None)) == [32, 32, 32]
    assert told(EpochIterator(None)) == [None, None, None]


def test_what_loaders_give_within_keras_is_not_counted_twice(recorder, keras):
    for _ in EpochIterator(16, 6)._enumerate_iterator():
        next(iter(DataLoader(numbers(50), 16)))
        assert examples(recorder) in (32, 16 + 3)
    for _ in EpochIterator(None)._enumerate_iterator():
        next(iter(DataLoader(numbers(50), 16)))
    assert examples(recorder) == 3 * 16
    next(iter(DataLoader(numbers(50), 20)))
    assert examples(recorder) == 20, "nor is it lost when Keras is done"


def test_the_test_at_the_end_of_an_epoch_of_keras_does_not_count(recorder, keras):
    for _ in range(2):
        for _ in EpochIterator(16, 6)._enumerate_iterator():
            assert examples(recorder) in (32, 19)
        list(EpochIterator(500)._enumerate_iterator())


def test_nothing_is_counted_where_nothing_is_recorded():
    recorder = StepRecorder()
    loaders.watch(recorder)
    next(iter(DataLoader(numbers(50), 20)))
    recorder.start()
    assert examples(recorder) is None


def test_an_iterator_that_cannot_be_referred_to_is_not_counted(recorder):
    loaders._tell(StepRecorder.loaded, (), 3)
    assert examples(recorder) is None
