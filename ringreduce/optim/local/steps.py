"""LocalSteps: counts a rank's own steps, and averages parameters over all ranks when it is time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ringreduce import runtime
from ringreduce.api.process_sets import global_process_set
from ringreduce.arrays import libraries
from ringreduce.checks import divergence
from ringreduce.errors import CollectiveError, InputError, MismatchError
from ringreduce.execution.submission import Ended, Handle
from ringreduce.monitor import excepthook
from ringreduce.optim.exchange import CHANGE, Exchange
from ringreduce.optim.local.options import Options, Outer, fragments_of, mean
from ringreduce.runtime.submit import submit_and_wait
from ringreduce.settings.log import JOB

Parameters = dict[str, Any]
_SHAPE = operator.attrgetter("shape")


class Sent(NamedTuple):
    """A fragment on its way."""

    names: Sequence[str]
    values: list[Any]  # of its parameters, when it was sent
    handle: Handle[list[Any]]  # its result: the pseudo-gradients, averaged
    outer: Outer
    due: int  # the step after which it is applied


class LocalSteps:
    """The part of local steps that is the same in every framework; see the package.

    parameters: returns all, by name, the same names on all ranks.
    state:      returns a dict that is saved and restored; empty at first. It has the number of `steps`, and by name
                `anchors` and `outer`, the outer optimizer's states: all of it is the same on all ranks.

    Memory: the anchors, with 32 bits or more, one copy of a fragment while it is on its way; what `outer` has.
    """

    def __init__(
        self,
        options: Options,
        parameters: Callable[[], Parameters],
        state: Callable[[], dict[str, Any]],
    ) -> None:
        self.options = options
        self.parameters = parameters
        self._state = state
        self._exchange = Exchange(compression=options.compression)
        self._plain = Exchange()
        self._fragments: list[list[str]] = []
        self._sent: Sent | None = None
        self._agreed: Any = None  # the world whose ranks have the same options and anchors
        self._shapes: list[Any] = []
        self._known: Parameters = {}  # at the last step; none before the first one

    def begin(self) -> None:
        """Before a step: remember what parameters that are new begin with; in a new world compare with all ranks.

        Raises: MismatchError on all ranks where one has other options, steps or parameters.
        """
        state = self._state()
        if not state:
            state.update(steps=0, anchors={}, outer={})
        anchors, found = state["anchors"], self.parameters()
        if list(found) != list(self._known) or list(map(_SHAPE, found.values())) != self._shapes:
            self._follow(found)
            self._shapes = list(map(_SHAPE, found.values()))
        self._known = found
        # by name: ranks may have them in another order
        trained = {name: found[name] for name in sorted(found) if name in anchors or libraries.trains(found[name])}
        anchors.update({name: libraries.read(each) for name, each in trained.items() if name not in anchors})
        if len(trained) != sum(map(len, self._fragments)):
            sizes = [anchors[name].nbytes for name in trained]
            numbers = fragments_of(sizes, self.options.fragments, self.options.function)
            self._fragments = [[list(trained)[each] for each in members] for members in numbers]
        current = runtime.current(self.options.function)
        if self._agreed is not current.world:
            self._agree(state)
            self._agreed = current.world
            if current.checks.divergence and current.world.rank == 0:
                JOB.warning(
                    f"check=divergence: parameters of a {self.options.function} differ between two averages, as they "
                    "should; the averages are compared"
                )

    def _follow(self, found: Parameters) -> None:
        """The parameters may be other ones: have the mean of all ranks' in those that are new, and those that are gone.

        Raises: MismatchError on all ranks unless the same have come and gone.
        """
        state, anchors = self._state(), self._state()["anchors"]
        older = self._known | anchors if self._known else found
        gone = [name for name, each in anchors.items() if name not in found or found[name].shape != each.shape]
        new = [name for name in found if name in gone or name not in older]
        if not (gone or new):
            return
        lines = [f"{name!r}, {list(found[name].shape)}, is new" for name in new]
        lines += [f"{name!r}, {list(anchors[name].shape)}, is gone" for name in gone]
        if self._fragments:
            self._give_up(gone)
            first = self._fragments[self._next_fragment(state["steps"])][0]
            self._exchange.say(self._name_of(first), CHANGE, "; ".join(sorted(lines)))
        for name in gone:
            del anchors[name]
            state["outer"].pop(name, None)
        averaged = {name: found[name] for name in new if libraries.trains(found[name])}
        averaged |= {name: self._known[name] for name in gone if name in self._known and name not in found}
        self._average(dict(sorted(averaged.items())))
        self._fragments = []

    def _average(self, parameters: Parameters) -> None:
        if parameters:
            values, names = [libraries.read(each) for each in parameters.values()], list(parameters)
            means = self._plain.begin(f"{self._name_of(names[0])}, new", values, names).wait()
            for parameter, value in zip(parameters.values(), means, strict=True):
                libraries.write(parameter, value)

    def _next_fragment(self, steps: int) -> int:
        """The one that is sent next, also in the warm-up, where all are."""
        if steps < self.options.warmup_steps:
            return 0
        later = (self.options.fragment(step) for step in itertools.count(steps + 1))
        return next(each for each in later if each is not None)

    def _give_up(self, gone: Sequence[str]) -> None:
        """Wait for what is on its way, of which these are not applied."""
        if self._sent is None:
            return
        sent, gradients = self._sent, self._sent.handle.wait()
        staying = [number for number, name in enumerate(sent.names) if name not in gone]
        names, values, kept = ([each[number] for number in staying] for each in (sent.names, sent.values, gradients))
        self._sent = sent._replace(names=names, values=values, handle=Ended(kept))
        _unfinished[id(self)] = self._sent.handle

    def _agree(self, state: dict[str, Any]) -> None:
        checksum = 0
        for _, anchor in sorted(state["anchors"].items()):
            checksum = zlib.crc32(libraries.to_numpy(anchor).tobytes(), checksum)
        details = *self.options.details(), ("steps", state["steps"]), ("the parameters' checksum", f"{checksum:08x}")
        try:
            submit_and_wait("barrier", "options of local steps", details=details)
        except MismatchError as error:
            if "checksum" not in str(error):
                raise
            raise MismatchError(
                f"{error}; training begins with the same parameters everywhere: call broadcast_parameters first"
            ) from error

    def end(self) -> None:
        """After a step, taken or skipped: apply what has come, send what is to go.

        Cost:   nothing, or one all-reduce of a fragment, of all parameters in the warm-up.
        Raises: MismatchError, PeerLostError; then what was on its way is given up, and parameters stay the rank's own.
        """
        state, options = self._state(), self.options
        state["steps"] += 1
        steps, fragment = state["steps"], options.fragment(state["steps"])
        self._apply(steps)
        if steps <= options.warmup_steps:
            self._send([name for each in self._fragments for name in each], mean, steps)
        elif fragment is not None:
            self._send(self._fragments[fragment], options.outer or mean, steps + options.delay)
        self._apply(steps)
        runtime.stepped(id(self))

    def _send(self, names: Sequence[str], outer: Outer, due: int) -> None:
        found = self.parameters()
        values = [libraries.read(found[name]) for name in names]
        self._sent = Sent(names, values, self._begin("", self._exchange, names, values), outer, due)
        _settle_at_exit()
        _unfinished[id(self)] = self._sent.handle

    def _begin(self, what: str, exchange: Exchange, names: Sequence[str], values: Sequence[Any]) -> Handle[list[Any]]:
        """Begin to average how far the values are from the anchors; what: tells it from others with these names."""
        anchors = self._state()["anchors"]
        gradients = [anchors[name] - value for name, value in zip(names, values, strict=True)]
        return exchange.begin(self._name_of(names[0], what), gradients, names)

    def _name_of(self, first: str, what: str = "") -> str:
        """Of an average, by which ranks match it."""
        return f"{self.options.function}{what}.{first}"

    def _apply(self, steps: int) -> None:
        """Wait for what is due, and have it applied."""
        if self._sent is None or steps < self._sent.due:
            return
        sent, self._sent = self._sent, None
        del _unfinished[id(self)]
        state, found = self._state(), self.parameters()
        new = {}  # all are read before one is written: two may have the same memory
        for name, value, gradient in zip(sent.names, sent.values, sent.handle.wait(), strict=True):
            anchor, of_outer = self._stepped(sent.outer, name, gradient)
            state["anchors"][name] = anchor
            if of_outer is not None:
                state["outer"][name] = of_outer
            new[name] = anchor + (libraries.read(found[name]) - value)
        for name, values in new.items():
            libraries.write(found[name], values)
        divergence.compare(
            self,
            global_process_set,
            lambda: {**state["anchors"], "of the outer optimizer": state["outer"]},
            self.options.interval,
        )

    def _stepped(self, outer: Outer, name: str, gradient: Any) -> tuple[Any, Any]:
        """The new anchor and state; raises InputError where an outer optimizer returns anything else."""
        state = self._state()
        anchor = state["anchors"][name]
        returned = outer(anchor, gradient, state["outer"].get(name))
        shape = getattr(returned[0], "shape", None) if isinstance(returned, tuple) and len(returned) == 2 else None
        if shape != anchor.shape:
            kind = type(returned).__qualname__
            raise InputError(
                f"{self.options.function}: outer returned a {kind} for {name!r}; expected a tuple of the new "
                f"anchor, of shape {tuple(anchor.shape)}, and the new state"
            )
        return returned

    def begin_from_anchors(self) -> None:
        """Give up what is on its way and what this rank has learned since the last average.

        Raises: InputError where the state is that of other parameters.
        """
        self._sent, self._known, found = None, {}, self.parameters()
        for name, anchor in self._state().get("anchors", {}).items():
            if name not in found or found[name].shape != anchor.shape:
                has = f"has {list(found[name].shape)}" if name in found else "is not a parameter here"
                what = f"{self.options.function}: a state of another model"
                raise InputError(f"{what}: {name!r} is {list(anchor.shape)} in it, and {has}")
            libraries.write(found[name], anchor)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the mean of all ranks', to evaluate and save; afterwards again this rank's own.

        All ranks must call it.  Cost: one all-reduce of all parameters, and a copy.
        """
        self.begin()
        found, names = self.parameters(), [name for each in self._fragments for name in each]
        own = [libraries.read(found[name]) for name in names]
        anchors, gradients = self._state()["anchors"], self._begin(" averaged", self._plain, names, own).wait()
        for name, gradient in zip(names, gradients, strict=True):
            libraries.write(found[name], anchors[name] - gradient)
        try:
            yield
        finally:
            for name, value in zip(names, own, strict=True):
                libraries.write(found[name], value)


_unfinished: dict[int, Handle] = {}
"""Of each fragment that is on its way."""


@functools.cache
def _settle_at_exit() -> None:
    """Have this process wait for what is on its way before it leaves: another rank that is slower would fail."""
    atexit.register(_settle)  # before shutdown(), which init() has registered


def _settle() -> None:
    for handle in () if excepthook.exit_code() else _unfinished.values():
        with contextlib.suppress(CollectiveError):
            handle.wait()


class HasLocalSteps:
    """An optimizer with local steps, of any framework."""

    _local: LocalSteps

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the parameters are the mean of all ranks', to evaluate and save; afterwards this rank's own again.

        All ranks must call it.  Cost: one all-reduce of all parameters, and a copy.
        """
        return self._local.averaged()

    def begin_from_anchors(self) -> None:
        """The ranks have changed: give up what is on its way, and what this rank has learned since the last average."""
        self._local.begin_from_anchors()

    elastic_begin = begin_from_anchors
