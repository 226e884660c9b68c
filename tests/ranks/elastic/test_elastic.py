"""elastic.run and states on threads that are ranks; nobody dies here: `reform` is a stand-in that keeps all ranks."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.elastic import ElasticSampler, HostsUpdatedInterrupt, ObjectState, State, loop, run
from ringreduce.errors import CollectiveError, MismatchError, PeerLostError
from ringreduce.runtime import Runtime, current
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of


class Counting(ObjectState):
    """Counts its synchronizations."""

    syncs = 0

    def sync(self):
        self.syncs += 1
        super().sync()


def new_state(kind=Counting):
    """Other values on each rank."""
    return kind(params={"w": np.arange(3.0) + rr.rank()}, step=10 * rr.rank(), done=[])


@each_rank_of(3)
def test_before_the_first_call_all_ranks_get_the_state_of_rank_0():
    function = run(lambda state, more: (state.params["w"].tolist(), state.step, state.commits, more))
    assert function(new_state(), more=5) == ([0, 1, 2], 0, 1, 5)


def test_the_function_begins_again_at_the_last_commit(elastic):
    calls = []

    def program():
        state, failures = new_state(), {2: PeerLostError("rank 9 died", [9]), 5: CollectiveError("something")}
        array = state.params["w"]
        resets = []
        state.register_reset_callbacks([lambda: resets.append(state.step), lambda: resets.append("second")])

        @run
        def train(state):
            if rr.rank() == 0:
                calls.append(state.step)
            while state.step < 6:
                state.params["w"] += rr.allreduce(np.ones(3), op=rr.Sum, name="gradient")
                state.done.append(state.step)
                state.step += 1
                if state.step in failures:
                    raise failures.pop(state.step)
                state.commit()
            return state.params["w"]

        assert train(state) is array, "restored in place"
        return array.tolist(), state.done, state.syncs, resets

    assert run_ranks(3, program) == [([18, 19, 20], [0, 1, 2, 3, 4, 5], 1, [1, "second", 4, "second"])] * 3
    assert calls == [0, 1, 4]
    assert elastic == [[2] * 3, [5] * 3]


@pytest.mark.parametrize("ahead", range(3))
def test_the_rank_with_the_most_commits_gives_its_state_to_all(elastic, ahead):
    """One had finished a step that the others had not when they heard of the failure."""

    def program():
        state, failures = new_state(), [PeerLostError("rank 9 died", [9])]

        @run
        def train(state):
            while state.step < 4:
                state.step += 1
                state.params["w"] += state.step
                if failures and state.step == 2:
                    if rr.rank() == ahead:
                        state.commit()
                    raise failures.pop()
                state.commit()
            return state.params["w"].tolist()

        return train(state), state.syncs, state.commits

    assert run_ranks(3, program) == [([10, 11, 12], 2, 1 + 2 + 1 + 2)] * 3
    assert elastic == [[3 if rank == ahead else 2 for rank in range(3)]]


def test_local_attributes_are_each_ranks_own_and_go_back_with_it(elastic):
    def program():
        state = ObjectState(step=rr.rank(), rng=np.random.default_rng(rr.rank()), drawn=[], local=("rng", "drawn"))
        failures, lost = [PeerLostError("rank 9 died", [9])], []

        @run
        def train(state):
            while state.step < 4:
                state.drawn.append(state.rng.random())
                state.step += 1
                if failures and state.step == 3:
                    lost.append(state.drawn[-1])
                    if rr.rank() == 1:  # is ahead, so that all take its state
                        state.commit()
                    raise failures.pop()
                state.commit()
            return state.drawn

        drawn = train(state)
        assert set(state._committed.tree()) == {"step"}, "nothing else is ever sent"
        return drawn, lost[0] in drawn

    for rank, (drawn, replayed) in enumerate(run_ranks(3, program)):
        assert drawn == np.random.default_rng(rank).random(4).tolist()[: len(drawn)]
        assert len(drawn) == (4 if rank == 1 else 3), "the others did not repeat the step that rank 1 had done"
        assert replayed
    assert elastic == [[3, 4, 3]]


def test_a_local_attribute_must_be_one():
    with pytest.raises(rr.InputError, match=r"ObjectState: local=\('rng',\): there is no attribute 'rng'"):
        ObjectState(step=0, local="rng")
    with pytest.raises(rr.InputError, match=r"^ObjectState: local=1; expected the names of attributes .*another name$"):
        ObjectState(step=0, local=1)


@in_a_loop("name", ["commits", "save", "sync", "register_reset_callbacks"])
def test_an_attribute_has_no_name_of_the_state_s_own(name):
    with pytest.raises(
        rr.InputError, match=f"Counting: got {name}=, a name that every state has itself; choose another"
    ):
        Counting(**{"step": 0, name: 1})


def test_an_error_in_the_first_sync_begins_with_rank_0_again(elastic):
    """Then all have as many commits, none, but not the same state."""
    failing = [True] * 2

    class Failing(Counting):
        def sync(self):
            if failing:
                failing.pop()
                raise PeerLostError("rank 9 died", [9])
            super().sync()

    assert run_ranks(2, lambda: run(lambda state: state.step)(new_state(Failing))) == [0, 0]
    assert elastic == [[0, 0]]


def test_a_failure_while_recovering_is_recovered_from(elastic):
    def program():
        state, failures = new_state(), [PeerLostError("one", [9]), PeerLostError("another", [8])]

        def during_reset():
            if len(failures) == 1:
                raise failures.pop()

        state.register_reset_callbacks([during_reset])

        @run
        def train(state):
            if len(failures) == 2:
                raise failures.pop()
            return state.step

        return train(state)

    assert run_ranks(2, program) == [0, 0]
    assert len(elastic) == 2


@each_rank_of(2)
def test_a_job_that_is_not_elastic_fails_as_ever():
    state = new_state()

    @run
    def train(state):
        state.step = 7
        raise PeerLostError("rank 9 died", [9])

    with pytest.raises(PeerLostError, match="rank 9 died"):
        train(state)
    assert (state.step, state.syncs) == (7, 1)


@each_rank_of(2)
def test_a_mismatch_goes_on_since_it_would_come_again(elastic):
    @run
    def train(state):
        rr.allreduce(np.zeros(2 + rr.rank()), name="w")

    with pytest.raises(MismatchError, match="'w'"):
        train(new_state())
    assert elastic == []


@pytest.mark.parametrize("raised", ["by all", "by one"])
def test_a_collective_error_of_the_functions_own_is_raised_where_no_rank_is_lost(monkeypatch, raised):
    """Nobody would send a list of other ranks."""
    monkeypatch.setattr(Runtime, "is_elastic", True)

    def program():
        @run
        def train(state):
            if raised == "by all" or rr.rank() == 1:
                raise rr.HorovodInternalError(f"the loss of rank {rr.rank()} is NaN")
            return state.step

        state = new_state()
        if raised == "by one" and rr.rank() == 0:
            return train(state)
        with pytest.raises(CollectiveError, match=f"^the loss of rank {rr.rank()} is NaN$"):
            train(state)
        return "raised"

    assert run_ranks(2, program) == ["raised" if raised == "by all" else 0, "raised"]


def test_an_error_that_reforming_raises_ends_the_function(elastic, monkeypatch):
    def fails(self, commits):
        raise CollectiveError("the ranks did not meet")

    monkeypatch.setattr(Runtime, "reform", fails)

    def program():
        @run
        def train(state):
            raise PeerLostError("rank 9 died", [9])

        with pytest.raises(CollectiveError, match="did not meet"):
            train(new_state())

    run_ranks(2, program)


def test_a_change_of_ranks_between_steps_goes_on_from_there(elastic, monkeypatch):
    """Some hear of it at a commit, others would in their next operation: these go back."""
    changed = [False, False]

    def program():
        state, again = new_state(), []
        monkeypatch.setattr(Runtime, "membership_changed", lambda self: changed[rr.rank()])

        @run
        def train(state):
            changed[rr.rank()] = False
            while state.step < 3:
                state.step += 1
                state.params["w"] += 1
                if not again and state.step == 2:
                    again.append(state.step)
                    changed[rr.rank()] = rr.rank() == 1
                    state.check_host_updates()
                    raise PeerLostError("rank 9 died", [9])
                state.commit()
            return state.params["w"].tolist()

        return train(state), state.syncs

    assert run_ranks(2, program) == [([3, 4, 5], 2)] * 2
    assert elastic == [[2, 3]]


@in_a_loop(
    ("updates", "skips_sync"),
    [([1], True), ([2], False), ([3], False), (None, True), ([2, 1], False), ([1, 2], False), ([1, 1], True)],
)
@each_rank_of(2)
def test_hosts_that_change_are_told_at_the_next_commit(updates, skips_sync):
    """Horovod's interface: what the script itself says, or raises."""
    state, resets = new_state(), []
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @run
    def train(state):
        state.step += 1
        if len(resets) == 0:
            if updates is None:
                raise HostsUpdatedInterrupt(skip_sync=True)
            for update in updates:
                state.on_hosts_updated(timestamp=1, update_res=update)
        state.commit()
        return state.step

    assert (train(state), resets, state.syncs) == (2, [1], 1 if skips_sync else 2)


@each_rank_of(2)
def test_a_spare_has_its_state_when_it_is_synchronized():
    own = current("a test")
    own.has_state = False
    assert run(lambda state: own.has_state)(new_state())


def of_library(module, text):
    """An error that a library raises with this text."""
    return type("XlaRuntimeError", (RuntimeError,), {"__module__": module})(text)


@in_a_loop(
    ("error", "is_loss"),
    [
        (PeerLostError("rank 2 died", [2]), True),
        (MismatchError("shapes differ"), False),
        *(
            (of_library(name, "INTERNAL: PeerLostError: rank 2"), True)
            for name in ("jax.errors", "jaxlib._jax", "tensorflow")
        ),
        (
            of_library("jax.errors", "CpuCallback error:\n  File ...\nringreduce.errors.PeerLostError: rank 9 died"),
            True,
        ),
        (of_library("jax.errors", "INTERNAL: ValueError: broken"), False),
        (of_library("jaxlib._jax", "CpuCallback error: StalledError: 'w' waits"), True),
        (of_library("jaxlib._jax", "INTERNAL: MismatchError: shapes differ"), False),
        (of_library("jaxlib._jax", "UNKNOWN: MyPeerLostError: of the user's own"), False),
        (of_library("train", "PeerLostError: of the user's own"), False),
    ],
)
def test_a_loss_is_told_by_its_kind_or_in_jitted_functions_by_its_text(error, is_loss):
    assert loop._is_loss(error) is is_loss


def test_a_sync_in_mid_epoch_divides_what_is_left_on_the_root_too():
    def program():
        state = ObjectState(sampler=ElasticSampler(16, shuffle=False))
        state.sync()
        state.sampler.record_batch(0, 2)
        state.sync()
        return list(state.sampler)

    shares = run_ranks(2, program)
    assert sorted(shares[0] + shares[1]) == list(range(4, 16))


@each_rank_of(2)
def test_a_state_of_the_users_own_is_always_synchronized(elastic):
    class Own(State):
        syncs = saved = value = 0

        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

        def sync(self):
            self.syncs += 1
            self.value = rr.broadcast_object(self.value, 0)
            self.save()

    state, failures = Own(rr.broadcast_object, rr.rank), [PeerLostError("rank 9 died", [9])]
    state.value = 5 + rr.rank()

    @run
    def train(state):
        state.value += 1
        if failures:
            raise failures.pop()
        return state.value, state.syncs

    assert train(state) == (6, 2)


def test_a_commit_that_is_interrupted_leaves_the_one_before_whole():
    class Refusing:
        def __reduce__(self):
            raise KeyboardInterrupt

    state = ObjectState(a=np.arange(3), b=1)
    state.a += 1
    state.save()
    state.a += 1
    state.b = Refusing()
    with pytest.raises(KeyboardInterrupt):
        state.save()
    state.restore()
    assert (state.a.tolist(), state.b, state.commits) == ([1, 2, 3], 1, 1)


def test_arrays_that_have_become_one_since_the_commit_are_two_again():
    state = ObjectState(a=np.zeros(2), b=np.ones(2))
    state.b = state.a
    state.restore()
    assert (state.a.tolist(), state.b.tolist()) == ([0, 0], [1, 1])


def test_a_state_can_be_restored_before_it_is_synchronized():
    state = ObjectState(rr.broadcast_object, rr.rank, a=np.arange(3), b=[1])
    state.a += 1
    state.b.append(2)
    state.restore()
    assert (state.a.tolist(), state.b) == ([0, 1, 2], [1])


@each_rank_of(2)
def test_a_sampler_goes_back_with_the_state_and_is_divided_anew(elastic):
    sampler = ElasticSampler(16, shuffle=False)
    state = ObjectState(sampler=sampler)
    state.sync()
    for batch in range(2):
        sampler.record_batch(batch, 2)
        if batch == 0:
            state.save()
    state.restore()
    assert state.sampler is sampler
    sampler.num_replicas, sampler.rank = 3, 2  # as if there had been more
    state.on_reset()
    assert (sampler.processed_num, list(sampler)) == (4, list(range(4 + rr.rank(), 16, 2)))


def test_what_is_in_dicts_lists_and_tuples_begins_anew_too(elastic):
    def program():
        params = {"w": np.zeros(1)}
        optimizer = rr.DistributedOptimizer(Momentum(params), backward_passes_per_step=2)
        state = ObjectState(data={"train": (ElasticSampler(16, shuffle=False), None)}, optimizers=[optimizer], w=params)
        state.sync()
        state.data["train"][0].record_batch(0, 2)
        state.save()
        state.restore()
        sampler = state.data["train"][0]
        sampler.num_replicas, sampler.rank = 3, 2  # as if there had been more
        optimizer([np.ones(1)])
        state.on_reset()
        for _ in range(2):
            optimizer([np.full(1, 5.0)])
        return list(sampler), params["w"].tolist()

    assert run_ranks(2, program) == [(list(range(4 + rank, 16, 2)), [-10.0]) for rank in range(2)]


@each_rank_of(3)
def test_ranks_whose_states_differ_in_form_get_the_roots():
    state = ObjectState(tree={"a": np.arange(2 + rr.rank())} if rr.rank() else {"b": [np.ones(3), 4]}, none=None)
    state.sync()
    assert {key: [value[0].tolist(), value[1]] for key, value in state.tree.items()} == {"b": [[1, 1, 1], 4]}
    assert state.none is None


class Momentum:
    """An optimizer of one's own: it holds the parameters, and makes an array for each when that is due."""

    def __init__(self, params):
        self.params, self.velocity = list(params.values()), {}

    def __call__(self, grads):
        self.momentum = 0.5
        for number, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            self.velocity[number] = self.momentum * self.velocity.get(number, np.zeros_like(grad)) + grad
            param -= self.velocity[number]


def grow(state):
    """One more parameter, and another shape of one that there is."""
    state.params["w"] = np.append(state.params["w"], 7.0)
    state.params["new"] = np.ones(2)
    optimizer = state.optimizer._optimizer
    optimizer.params[:] = state.params.values()
    optimizer.velocity[0] = np.append(optimizer.velocity[0], 0.0)


def stepped(state, steps=2):
    for _ in range(steps):
        state.optimizer([np.full(each.shape, rr.rank() + 1.0) for each in state.params.values()])
    return [each.tolist() for each in state.params.values()]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_that_has_grown_goes_back_to_its_committed_form(steps):
    """And what the optimizer holds are the parameters again."""

    def program():
        params = {"w": np.arange(3.0), "b": np.zeros(2)}
        optimizer = rr.DistributedOptimizer(Momentum(params))
        state = ObjectState(params=params, optimizer=optimizer)
        stepped(state, steps)
        state.save()
        expected = stepped(state)
        grow(state)
        stepped(state)
        state.restore()
        assert hasattr(state.optimizer._optimizer, "momentum") == bool(steps)
        assert stepped(state) == expected

    run_ranks(2, program)


def test_ranks_that_come_take_the_form_of_the_root():
    def program():
        params = {"w": np.arange(3.0), "b": np.zeros(2)}
        state = ObjectState(params=params, optimizer=rr.DistributedOptimizer(Momentum(params)))
        stepped(state)
        if rr.rank() == 0:
            grow(state)
        state.sync()
        return stepped(state)

    first, *others = run_ranks(3, program)
    assert len(first) == 3
    assert others == [first, first]
