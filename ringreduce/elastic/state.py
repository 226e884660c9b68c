"""State and ObjectState: what a training function commits, gets back after a failure, and shares with other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ringreduce.api.broadcast import broadcast_
from ringreduce.api.objects import allgather_object, broadcast_made, broadcast_object
from ringreduce.api.process_sets import global_process_set
from ringreduce.api.world import rank
from ringreduce.elastic.commit import IMMUTABLE, Commit, PutBack, Restoration, has_state_dict, live_state
from ringreduce.elastic.kept import Kept, KeptFile
from ringreduce.errors import HostsUpdatedInterrupt, InputError
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.runtime import current, is_initialized
from ringreduce.runtime.submit import prepared
from ringreduce.settings.log import JOB

NAME = "elastic state"  # of the operations, so that they match on ranks with different numbers of unnamed operations

_GONE = 1
_PLAIN = {*IMMUTABLE}  # as types, which are compared quickly


class State:
    """What `run` passes to the training function; a subclass defines what save, restore and sync do.

    bcast_object, get_rank: kept for subclasses that were written for Horovod; by default ringreduce's.
    Source: Horovod's State.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or broadcast_object
        self._rank = get_rank or rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._updates = 0  # what has happened to hosts: 1 some are gone, 2 some have come, 3 both

    @property
    def commits(self) -> int:
        """How many commits there have been; 0: that is not known, so the state is always synchronized."""
        return 0

    @property
    def is_sharded(self) -> bool:
        """True when `save` gathers what ranks have apart, so that all must call it after the same step."""
        return False

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called, in order, when the ranks have changed, before the training function begins again.

        For what depends on `size()`, such as a learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: `reset`, then the callbacks."""
        self._updates = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have gone (1), come (2) or both (3): the next `check_host_updates` raises HostsUpdatedInterrupt."""
        self._updates |= update_res

    def commit(self) -> None:
        """Save the state to return to after a failure; call it on all ranks after the same step.

        Raises: HostsUpdatedInterrupt, see `check_host_updates`; PeerLostError in a job that reduces arrays on GPUs,
                where results may be wrong that a rank was lost in.
        """
        if error := current("commit").await_gpu():
            raise error
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt when the ranks have changed, or hosts; `run` then begins anew with them.

        Nothing is communicated; a rank that has not heard of it yet will in its next operation. Its `skip_sync` is True
        where hosts have only gone.
        """
        own = current("check_host_updates")
        if self._updates or own.membership_changed() or own.hosts_came():
            raise HostsUpdatedInterrupt(skip_sync=self._updates == _GONE)

    def save(self) -> None:
        """Copy the state to memory of this rank's own."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of one, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the ranks have changed, before the reset callbacks."""

    def resume(self) -> None:
        """The job was started again: go back to the last commit that is left of it; before the first `sync`."""


class ObjectState(State):
    """A state of attributes: numbers, any object that can be pickled, arrays, and dicts, lists and tuples of them.

        state = ObjectState(params=params, velocity=velocity, epoch=0)
        state.epoch += 1

    Arrays of NumPy, CuPy and torch, dicts and lists are restored in place, so that whoever refers to them sees it;
    other attributes are replaced: read them from the state. An object with state_dict() and load_state_dict(), such as
    an ElasticSampler, is restored by these; one of your own needs them if it holds arrays that others hold, too, as an
    optimizer holds the parameters. One in a DistributedOptimizer needs nothing: its attributes are restored in place.
    The residuals of its PowerSGD are each rank's own, as with `local`.

    local:  a name or names of attributes that are each rank's own, such as the state of a random generator: committed
            and restored here, never sent. A rank that comes new, and every rank after a restart, has what its script
            gave.
    Memory: two copies of all of it, in host memory. A commit that is interrupted leaves the one before it whole. Under
            `ringrun --elastic --restarts N` one rank of each host has them in /dev/shm, from where a restart goes on.
    Source: Horovod's ObjectState, whose attributes are references.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        *,
        local: Iterable[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        if not isinstance(local, Iterable):
            raise InputError(
                f"{type(self).__name__}: local={local!r}; expected the names of attributes that are each rank's own, "
                "such as local=('rng',); a value of yours needs another name"
            )
        self._names, self._local = tuple(attributes), (local,) if isinstance(local, str) else tuple(local)
        if unknown := [name for name in self._local if name not in attributes]:
            raise InputError(f"{type(self).__name__}: local={self._local}: there is no attribute {unknown[0]!r}")
        if own := [name for name in attributes if hasattr(ObjectState, name)]:
            raise InputError(
                f"{type(self).__name__}: got {own[0]}=, a name that every state has itself; choose another"
            )
        for name, value in attributes.items():
            setattr(self, name, value)
        for name, value in self._objects():
            if getattr(value, "shares_parameters", False):
                raise InputError(
                    f"{type(self).__name__}: {name} has shared_parameters=True, which elastic jobs do not support"
                )
            if getattr(value, "is_sharded", False) and name not in attributes:
                raise InputError(
                    f"{type(self).__name__}: {name} is a ShardedOptimizer inside of another attribute, where its state "
                    "is not gathered from the ranks; pass it as an attribute of its own"
                )
        self._committed, self._spare = Commit(), Commit()
        self._own, self._spare_own = Commit(), Commit()  # of the local attributes
        self._committed.take(self._tree(), number=0)
        self._own.take(self._tree(own=True), number=0)
        self._number = next(self._numbers)  # of the states of this process: the same after a restart
        self._kept: Kept | None = None
        self._has_resumed = False

    @property
    def commits(self) -> int:
        """How many commits there have been, on this rank or on those that it took its state from."""
        return self._committed.number

    @property
    def is_sharded(self) -> bool:
        """True with a ShardedOptimizer: a commit has its whole state, on every rank."""
        return any(getattr(getattr(self, name), "is_sharded", False) for name in self._names)

    def save(self) -> None:
        """Copy all attributes.  Cost: one copy of all arrays, into memory that is there from the second time on."""
        self._commit()

    def restore(self) -> None:
        """Give all attributes their committed values."""
        parts = self._parts(own=False) | self._parts(own=True)
        put_back = Restoration().put_back
        for commit in (self._committed, self._own):
            for name, saved in commit.tree().items():
                if name in parts:
                    put_back(parts[name], saved)
                else:
                    setattr(self, name, self._put_back(getattr(self, name, None), saved, put_back))
        self._ask("elastic_begin")

    def resume(self) -> None:
        """Take the newest commit that is kept on this host, if there is one: once, later ones are this attempt's."""
        own = current("resume")
        again, self._has_resumed = self._has_resumed, True
        if not own.was_restarted() or own.root is not None:
            return
        if not again and own.settings.state_dir and (found := Kept(own.settings.state_dir, self._number).newest()):
            self._committed.read(found)
            self.restore()

    def sync(self) -> None:
        """Give all ranks the attributes of rank 0, or of the one with the most commits at the last loss; commit them.

        Local attributes stay as they are, and are committed.

        Cost:   a broadcast of the arrays and one of the rest; after a restart an allgather of a number before.
        Raises: PeerLostError, or MismatchError where the attributes of that rank cannot be pickled, or another one has
                no memory for them; then this rank's attributes and its last commit are as before.
        """
        root, objects, arrays = self._root(), f"{NAME}, its objects", f"{NAME}, its arrays"
        is_root = rank() == root
        if self.is_sharded:
            self._commit()

        def committed() -> tuple[Any, ...]:
            if not self.is_sharded:
                self._commit()
            return self._committed.number, self._committed.infos, self._committed.pickled

        number, infos, pickled = broadcast_made(committed, root, objects, global_process_set)

        def room() -> Any:
            if is_root:
                return self._committed.memory
            self._spare.file = self._next_file()
            self._spare.begin(infos)
            return self._spare.memory

        broadcast_(prepared("broadcast", arrays, GLOBAL, room), root, arrays)
        if not is_root:
            self._spare.finish(number, pickled)
            self._spare_own.take(self._tree(own=True), number)
            self._use_spare()
        if not is_root or self.is_sharded:  # parts that all ranks have from one are whole until the next step, on all
            self.restore()
        self.reset()

    def reset(self) -> None:
        """Divide what is left of datasets among the ranks that there are; all begin with a whole step."""
        self._ask("elastic_begin")

    def _root(self) -> int:
        """The rank whose state all are to have."""
        own = current("sync")
        if own.root is not None or not own.was_restarted():
            return own.root or 0
        commits = allgather_object(self.commits, f"{NAME}, its number")
        if rank() == 0:
            most = max(commits)
            JOB.info(f"elastic: this attempt continues from commit {most}" if most else "elastic: no commit is left")
        return commits.index(max(commits))

    def _commit(self, refers: bool = False) -> None:
        self._take(self._tree(), self._tree(own=True), refers)

    def _commit_only(self, names: Collection[str]) -> None:
        """Commit these attributes as they are now; the others stay as they were committed.

        Before the first sync it does not count, so that it takes the place of none from which a restart goes on.
        """

        def mixed(commit: Commit, own: bool) -> dict[str, Any]:
            before, now = commit.tree(), self._tree(own)
            kept = {key: value for key, value in before.items() if key.partition(".")[0] not in names}
            return kept | {key: value for key, value in now.items() if key.partition(".")[0] in names}

        self._take(mixed(self._committed, own=False), mixed(self._own, own=True), counts=self.commits > 0)

    def _take(self, tree: dict[str, Any], own: dict[str, Any], refers: bool = False, counts: bool = True) -> None:
        number, self._spare.file = self.commits + counts, self._next_file() if counts else None
        self._spare.take(tree, number, refers and self._spare.file is None)
        self._spare_own.take(own, number, refers)
        self._use_spare()

    def _next_file(self) -> KeptFile | None:
        """Where the next commit is kept for a restart, if this rank is to do that."""
        own = current("save") if is_initialized() else None
        if own is None or not (own.is_elastic and own.settings.state_dir) or own.world.local_rank:
            return None
        self._kept = self._kept or Kept(own.settings.state_dir, self._number)
        return self._kept.next(after=self._committed.file)

    def _use_spare(self) -> None:
        self._committed, self._spare = self._spare, self._committed
        self._own, self._spare_own = self._spare_own, self._own

    def _tree(self, own: bool = False) -> dict[str, Any]:
        """What is committed: of what all ranks have alike, or of what is each rank's own."""
        names = [name for name in self._names if (name in self._local) == own]
        return {name: self._taken(getattr(self, name)) for name in names} | self._parts(own)

    def _parts(self, own: bool) -> dict[str, Any]:
        found = self._ask("elastic_parts", own).items()
        return {f"{name}.{key}": part for name, parts in found for key, part in parts.items()}

    def _ask(self, method: str, *args: Any) -> dict[str, Any]:
        """What the attributes return that have such a method, and what is in dicts, lists and tuples among them.

        elastic_parts(own): what is committed beside its state_dict(): dicts by name, restored in place, of what all
            ranks have alike, or of what is each rank's own.
        elastic_begin(): the ranks have changed, or the state was restored: begin anew.
        """
        found = {name: getattr(value, method, None) for name, value in self._objects()}
        return {name: call(*args) for name, call in found.items() if callable(call)}

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """The attributes, and what is inside of them, see below."""
        return itertools.chain.from_iterable(_objects(name, getattr(self, name, None)) for name in self._names)

    def _taken(self, value: Any) -> Any:
        """What is saved of an attribute."""
        return value.state_dict() if has_state_dict(value) else value

    def _put_back(self, value: Any, saved: Any, put_back: PutBack) -> Any:
        """The attribute, restored. `saved` lies in a commit's memory, so it is copied."""
        if not has_state_dict(value):
            return put_back(value, saved)
        value.load_state_dict(put_back(live_state(value), saved))
        return value


def _objects(name: str, value: Any, within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """A value, and what is in the dicts, lists and tuples in it, by names; but for plain values, which may be many."""
    yield name, value
    is_list = isinstance(value, list | tuple)
    inside = dict(enumerate(value)) if is_list else value if isinstance(value, dict) else {}
    if id(value) not in within and not _PLAIN.issuperset(map(type, inside.values())):
        for key, each in inside.items():
            yield from _objects(f"{name}.{key}", each, (*within, id(value)))
