"""`run`: the training function begins again, in the same process, when ranks have died or come."""

from __future__ import annotations

import functools
import re
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ringreduce.elastic.state import State
from ringreduce.errors import CollectiveError, HostsUpdatedInterrupt, MismatchError
from ringreduce.monitor import launcher_link
from ringreduce.runtime import Runtime, current
from ringreduce.settings.log import JOB, LOGGER


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a `State`, so that it survives the death of ranks.

        @elastic.run
        def train(state): …

    Before `func` is called, `state.sync()` gives all ranks the same state. Under `ringrun --elastic`, when a rank dies
    `func` fails on the others with a CollectiveError; each then goes back to its last commit, the ranks that are left
    form a world (`rank()` and `size()` change), the state's reset callbacks are called, the state is synchronized from
    the rank with the most commits unless all have as many, and `func` is called again. So `func` must begin where its
    state says. HostsUpdatedInterrupt, from `state.commit()`, does the same without going back; when hosts have come,
    ringrun then starts the job again with them, and `func` begins there at the last commit.

    Whatever else `func` raises is raised: a MismatchError too, since ranks that differ would differ again, a
    CollectiveError of its own while no rank is lost, and in a job that is not elastic every CollectiveError.

    Cost:   without failures one `sync`.
    Source: Horovod's elastic.run, which takes rank 0's state, and always synchronizes.
    """

    @functools.wraps(func)
    def training(state: State, *args: Any, **kwargs: Any) -> Any:
        return _train(lambda: func(state, *args, **kwargs), state)

    return training


def _train(func: Callable[[], Any], state: State) -> Any:
    """Call `func` until it returns, each time in the world of the ranks that are left."""
    own, is_changed, needs_sync = current("elastic.run"), False, True
    state.resume()
    while True:
        try:
            if is_changed:
                state.on_reset()
            if needs_sync:
                state.sync()
                own.has_state = True
            return func()
        except HostsUpdatedInterrupt as interrupt:
            needs_sync = not interrupt.skip_sync
            if own.membership_changed():
                _keep(state, own)
                needs_sync = not _reform(state, own)
            elif own.hosts_came():
                _keep(state, own)
                _await_restart(own)
        except BaseException as error:
            if not (_is_loss(error) and own.is_elastic) or (own.is_whole() and _is_of_caller(error)):
                raise
            start_s = time.perf_counter()
            own.await_gpu(after_loss=True)  # it may write to the state's arrays
            state.restore()
            LOGGER.debug(f"elastic: the state is restored after {(time.perf_counter() - start_s) * 1e3:.1f} ms")
            needs_sync = not _reform(state, own)
        is_changed = True


def _is_loss(error: BaseException) -> bool:
    """True for an error that other ranks have caused, and that would not come again without them.

    Of what a collective raises inside a jitted function, JAX and TensorFlow leave only the text.
    """
    if isinstance(error, CollectiveError):
        return not isinstance(error, MismatchError)
    is_wrapped = type(error).__module__.partition(".")[0] in ("jax", "jaxlib", "tensorflow")
    return is_wrapped and re.search(r"\b(PeerLost|Stalled|Collective)Error: ", str(error)) is not None


def _is_of_caller(error: BaseException) -> bool:
    """True for an error that the user's code has raised, not a function of ringreduce that it calls."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = frames[-1].f_globals.get("__name__", "").partition(".")[0]
    return isinstance(error, CollectiveError) and where != "ringreduce"


def _keep(state: State, own: Runtime) -> None:
    """Commit the state, which is whole: the interrupt comes between two steps; but not what a GPU has got wrong.

    Ranks of which some are gone cannot gather a sharded one: go back to its last commit.
    """
    state.restore() if own.await_gpu() or state.is_sharded else state.save()


def _reform(state: State, own: Runtime) -> bool:
    """Form a world of the ranks that are left; True when all have the same state."""
    return own.reform(state.commits) and state.commits > 0


def _await_restart(own: Runtime) -> NoReturn:
    """This rank has committed: let the launcher start the job again, with the hosts that came; it ends this process."""
    JOB.info(f"elastic: {own.hosts_came()} joined; this attempt of the job ends, and the next one continues")
    launcher_link.report(own.settings.error_file, committed=own.hosts_came())
    while True:
        time.sleep(1.0)
