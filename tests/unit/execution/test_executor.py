"""The executors that have anything to do are found in one dict, whatever a user's thread does meanwhile."""

from types import SimpleNamespace

from ringreduce.execution.context import Completions
from ringreduce.execution.executor import Executor


class Busy(dict):
    """In which a user's thread enqueues just before the executor is taken out."""

    def __init__(self):
        super().__init__()
        self.meanwhile = []

    def pop(self, key, default=None):
        for action in self.meanwhile:
            action()
        self.meanwhile.clear()
        return super().pop(key, default)


def steps(ran, number):
    ran.append(number)
    yield from ()


def test_what_is_enqueued_while_the_last_operation_ends_is_run():
    busy, ran = Busy(), []
    executor = Executor(SimpleNamespace(busy=busy, completions=Completions(), gpu=None))
    executor.enqueue(steps(ran, 1))
    assert list(busy) == [executor]
    busy.meanwhile.append(lambda: executor.enqueue(steps(ran, 2)))
    assert executor.advance(False)
    assert (ran, list(busy)) == ([1], [executor])
    assert executor.advance(False)
    assert (ran, list(busy)) == ([1, 2], [])


def test_one_that_was_abandoned_is_not_busy():
    executor = Executor(
        SimpleNamespace(busy={}, completions=Completions(), gpu=SimpleNamespace(abandon=lambda _: None))
    )
    executor.enqueue(steps([], 1))
    executor.abandon()
    assert not executor.context.busy
    assert not executor.busy
