"""LocalSGD and DiLoCo, against one process that does the same: NumPy and torch; and what of them is saved."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.local_models import MODELS, trained
from tests.support.local_steps import FRAGMENTS, SHAPES, Simulated, assert_close, gradient, simulated, start
from tests.support.on_threads import each_rank_of

WAYS = {
    "LocalSGD": (3, {"sync_every": 4}),
    "every step": (3, {"sync_every": 1}),
    "one rank": (1, {"sync_every": 4}),
    "warm-up": (2, {"sync_every": 4, "warmup_steps": 3}),
    "Nesterov": (3, {"sync_every": 4, "momentum": 0.9, "lr": 0.7}),
    "fragments": (3, {"sync_every": 6, "fragments": 3}),
    "delay": (2, {"sync_every": 6, "fragments": 2, "delay": 2}),
    "as long a delay as can be": (3, {"sync_every": 6, "fragments": 3, "delay": 2, "warmup_steps": 1, "momentum": 0.5}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_those_of_one_process_that_does_the_same(way, model):
    size, options = WAYS[way]

    def program():
        made = trained(model, 15, **options)
        own = made.values()
        with made.optimizer.averaged():
            averaged = made.values()
        np.testing.assert_equal(made.values(), own)
        return own, averaged, getattr(made, "frozen", torch.arange(3.0) + rr.rank())

    expected, _ = simulated(size, 15, **options)
    for rank, (own, averaged, frozen) in enumerate(run_ranks(size, program)):
        assert_close(own, expected[rank])
        assert_close(averaged, {name: np.mean([each[name] for each in expected.values()], axis=0) for name in SHAPES})
        assert frozen.tolist() == [rank, rank + 1, rank + 2], "it does not travel"


@pytest.mark.parametrize("model", MODELS)
def test_inside_a_host_gradients_are_averaged_at_every_step(model):
    hosts = [0, 0, 1]
    results = run_ranks(3, lambda: trained(model, 7, sync_every=4, hierarchical=True).values(), hosts=hosts)
    for own, expected in zip(results, simulated(3, 7, 4, hosts=hosts)[0].values(), strict=True):
        assert_close(own, expected)


LESS = {"none": 1.0, "fp16": 0.5, "int8": 258 / 1024, "int4": 130 / 1024}


@pytest.mark.parametrize("compression", LESS)
def test_a_fragment_travels_every_few_steps_and_nothing_else(compression):
    """Between two hosts: each of two ranks sends half of what is reduced, and half of the sum."""
    lengths, kind = [], getattr(rr.Compression, compression)
    for steps in (1, 27):
        messages = []

        def program(steps=steps):
            params = np.arange(4096, dtype=np.float32), np.ones(4096, np.float32)
            optimizer = rr.DiLoCo(lambda grads: None, params, sync_every=8, fragments=2, delay=3, compression=kind)
            for _ in range(steps):
                optimizer([])

        run_ranks(2, program, hosts=[0, 1], messages=messages)
        lengths.append(sum(each.nbytes for each in messages if each.nbytes > 500))
    assert lengths == [0, 6 * 4096 * 4 * LESS[compression] * 2]


@each_rank_of(2)
def test_nobody_waits_for_what_is_not_due():
    """Rank 1 sends its fragment only when rank 0 has taken two steps more."""
    optimizer = rr.DiLoCo(lambda grads: None, [np.zeros(4) + 0.0], sync_every=4, delay=2)
    for step in range(1, 6):
        if step == 4 and rr.rank() == 1:
            rr.allreduce(np.ones(1), name="rank 0 is there")
        optimizer([])
        if step == 5 and rr.rank() == 0:
            rr.allreduce(np.ones(1), name="rank 0 is there")
    rr.barrier()  # a rank that leaves before ends what the other one still sends


def refused(pattern, error=rr.InputError, wrap=rr.DiLoCo, optimizer=print, parameters=None, **options):
    parameters = [np.zeros(3), np.zeros(2)] if parameters is None else parameters

    def stepped():
        made = wrap(optimizer, parameters, **{"sync_every": 12, **options})
        made([])

    with pytest.raises(error, match=pattern):
        stepped()


def without(optimizer, parameters, **options):
    return rr.DiLoCo(optimizer, **options)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.complex64], ids=str)
@each_rank_of(2)
def test_parameters_of_numpy_s_types_are_averaged(dtype):
    weight = np.ones(4, dtype)
    optimizer = rr.LocalSGD(lambda grads: weight.__isub__(grads), weight, sync_every=2)
    for _ in range(2):
        optimizer(np.full(4, rr.rank(), dtype))
    assert weight.tolist() == [0] * 4
    return weight.astype(np.complex64)


@each_rank_of(2)
def test_what_cannot_be_done_is_refused():
    mine = rr.rank()
    refused(r"DiLoCo: sync_every=0; expected a whole number of 1 or more", sync_every=0)
    refused(r"LocalSGD: sync_every=0.5; expected a whole number", wrap=rr.LocalSGD, sync_every=0.5)
    refused(r"sync_every=4 with fragments=3: one is", sync_every=np.int64(4), fragments=np.uint8(3))
    refused(r"warmup_steps=-1; expected a whole number of 0 or more", warmup_steps=-1)
    refused(r"sync_every=12 with fragments=5: one is averaged every .* expected a divisor", fragments=5)
    refused(r"fragments=3, but there are 2 parameters; expected no more than that", fragments=3)
    refused(r"fragments=2 and delay=7: .* expected a delay of 6 or less", fragments=2, delay=7)
    refused(r"outer='sgd'; expected None, ringreduce.Nesterov\(lr, momentum\), or a function", outer="sgd")
    refused(r"compression=8; expected Compression.none", compression=8)
    refused(r"which arrays are averaged\? Pass them: DiLoCo\(optimizer, params", wrap=without)
    refused(r"parameter '0' is int64; expected arrays of floating-point numbers", parameters=[np.arange(3)])
    refused(r"there are no parameters", parameters={})
    refused(r"DiLoCo: got a int; expected an optimizer", TypeError, optimizer=5)
    refused(r"sync_every=[48], but rank 0 has sync_every=4", rr.MismatchError, sync_every=4 + 4 * mine)
    refused(r"fragments=2, but rank 0 has fragments=1", rr.MismatchError, fragments=1 + mine)
    refused(r"delay=1, but rank 0 has delay=0", rr.MismatchError, delay=mine)
    refused(r"outer=Nesterov\(lr=0.7, momentum=0.9\), but", rr.MismatchError, outer=rr.Nesterov() if mine else None)
    other = rr.Compression.fp16 if mine else rr.Compression.none
    refused(r"compression=FP16Compressor, but rank 0 has compression=NoneC", rr.MismatchError, compression=other)
    refused(
        r"the parameters' checksum.*call broadcast_parameters first", rr.MismatchError, parameters=[np.zeros(2) + mine]
    )
    refused(r"function=LocalSGD, but", rr.MismatchError, wrap=(rr.DiLoCo, rr.LocalSGD)[mine])


class Ascent:
    """Adds gradients in place."""

    def __init__(self, params):
        self.params = params

    def step(self, grads):
        for name, grad in grads.items():
            self.params[name] += grad


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("options", [{}, {"delay": 1}], ids=str)
@pytest.mark.parametrize("ends", [[(0, 6), (0, 6)], [(0, 4), (2, 6)]], ids=["tied", "tied in part"])
def test_memory_that_stands_under_two_names_is_averaged_once(ends, options, framework):
    """Against the same addition to arrays of one name."""

    def added(names):
        flat = np.zeros(6)
        params = {name: flat[slice(*each)] for name, each in names.items()}
        if framework == "numpy":
            optimizer = rr.DiLoCo(Ascent(params), params, sync_every=2, **options)
        else:
            params = {name: torch.nn.Parameter(torch.from_numpy(each)) for name, each in params.items()}
            optimizer = torch.optim.SGD(params.values(), lr=1.0, maximize=True)
            optimizer = rr.DiLoCo(optimizer, params.items(), sync_every=2, **options)
        for step in range(5):
            whole = (np.arange(6.0) + step) * (1 + rr.rank())  # of what every name has a part, added for each
            counts = [sum(low <= at < high for low, high in ends) for at in range(6)]
            grads = {name: (whole if len(names) > 1 else whole * counts)[slice(*each)] for name, each in names.items()}
            if framework == "numpy":
                optimizer.step(grads)
            else:
                for name, each in grads.items():
                    params[name].grad = torch.from_numpy(each.copy())
                optimizer.step()
        own = flat.copy()
        with optimizer.averaged():
            return {"own": own, "averaged": flat.copy()}

    def program():
        assert_close(added(dict(zip("ab", ends, strict=True))), added({"all": (0, 6)}))

    run_ranks(2, program)


OUTERS = {
    "only the anchor": (lambda anchor, gradient, state: anchor - gradient, "returned a ndarray for 'a'"),
    "in place": (lambda anchor, gradient, state: None, "returned a NoneType for 'a'"),
    "another shape": (lambda anchor, gradient, state: (gradient.sum(), state), "returned a tuple for 'a'"),
}


@pytest.mark.parametrize(("outer", "message"), OUTERS.values(), ids=OUTERS)
@each_rank_of(2)
def test_an_outer_optimizer_returns_an_anchor_and_a_state(outer, message):
    params = {"a": np.ones(2)}
    optimizer = rr.DiLoCo(Ascent(params), params, sync_every=1, outer=outer)
    with pytest.raises(rr.InputError, match=f"DiLoCo: outer {message}; expected a tuple of the new anchor, of shape"):
        optimizer.step({"a": np.ones(2)})


# Its state

WAY = {"sync_every": 4, "momentum": 0.9, "lr": 0.7}


def states_of(model, made):
    """The elastic state of a model."""
    if model == "torch":
        return hvd.elastic.TorchState(optimizer=made.optimizer, params=made.params, step=0)
    return rr.elastic.ObjectState(optimizer=made.optimizer, params=made.params, step=0)


@pytest.mark.parametrize("model", MODELS)
@each_rank_of(2)
def test_a_state_dict_leads_to_the_anchors_and_goes_on_as_it_went_on_from_there(model):
    """After step 6 rank 0 saves its own; all load it, as a job does that begins anew."""
    made = trained(model, 6, **WAY)
    saved = rr.broadcast_object(copy.deepcopy(made.optimizer.state_dict()))
    results = []
    for other in (made, trained(model, 3, **WAY)):
        other.optimizer.load_state_dict(copy.deepcopy(saved))
        assert_close(other.values(), simulated(2, 6, **WAY)[1])
        for step in range(7, 14):
            other.step(step)
        results.append(other.values())
    assert_close(*results)
    with other.optimizer.averaged():
        return np.concatenate([each.reshape(-1) for each in other.values().values()])


@pytest.mark.parametrize("model", MODELS)
def test_after_a_loss_all_ranks_begin_from_the_anchors_of_the_last_commit(elastic, model):
    """A fragment that was on its way is given up. Then it is as if training had begun there."""

    def program():
        made = MODELS[model](lambda *both: rr.DiLoCo(*both, sync_every=6, fragments=2, delay=2))
        state, failures, seen = states_of(model, made), [7], []

        @rr.elastic.run
        def train(state):
            seen.append(made.values())
            while state.step < 11:
                state.step += 1
                made.step(state.step)
                if state.step == 7:
                    state.commit()  # one fragment is on its way
                if state.step in failures:
                    failures.remove(state.step)
                    raise rr.PeerLostError("rank 9 died", [9])
            return made.values()

        return train(state), seen

    expected = Simulated(range(2), start(), gradient, FRAGMENTS[2], sync_every=6, delay=2)
    for _ in range(7):
        expected.step()
    expected.begin(range(2))
    anchors = expected.anchors.copy()
    for _ in range(4):
        expected.step()
    for rank, (own, (_, *begun)) in enumerate(run_ranks(2, program)):
        for each in begun:
            assert_close(each, anchors)
        assert_close(own, expected.own[rank])
    assert elastic == [[2, 2]]


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_that_comes_begins_from_the_anchors_and_so_do_the_others(model):
    """One had trained alone for six steps."""
    [before] = run_ranks(1, lambda: trained(model, 6, **WAY))

    def program():
        made = before if rr.rank() == 0 else trained(model, 0, **WAY)
        states_of(model, made).sync()
        came = made.values()
        for step in range(7, 12):
            made.step(step)
        with made.optimizer.averaged():
            return came, made.values()

    (one, averaged), (other, same) = run_ranks(2, program)
    for each in (one, other):
        assert_close(each, simulated(1, 6, **WAY)[1])
    np.testing.assert_equal(averaged, same)


@each_rank_of(2)
def test_a_step_that_grad_scaler_skips_on_one_rank_counts():
    """The others would wait for it. Closures, and gradients that are missing here, too."""
    weight, unused = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 5.0))
    optimizer = hvd.LocalSGD(torch.optim.SGD([weight, unused], lr=0.5), sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    is_skipped = rr.rank() == 1
    for infinite in (False, is_skipped):
        optimizer.zero_grad()
        loss = weight.sum() * (float("inf") if infinite else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 100.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert weight.tolist() == [0.25, 0.25], "the mean of 0.0 and 0.5"
    assert scaler.get_scale() == (4.0 if is_skipped else 8.0)
    for _ in range(2):
        optimizer.zero_grad()
        assert optimizer.step(lambda: (weight * 2).sum().backward() or 7.0) == 7.0
    assert weight.tolist() == [0.25 - 2.0, 0.25 - 2.0]
    assert unused.tolist() == [5.0, 5.0]


@each_rank_of(2)
def test_parameters_that_are_added_or_begin_to_train_travel_from_then_on():
    first, late, added = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    late.requires_grad_(False)
    optimizer = hvd.DiLoCo(torch.optim.SGD([first, late], lr=1.0), sync_every=2)
    seen = []
    for step in range(1, 7):
        if step == 4:
            late.requires_grad_(True)
            optimizer.add_param_group({"params": [added]})
        for each in (first, late, added):
            each.grad = torch.full((3,), -1.0 - rr.rank()) if each.requires_grad else None
        optimizer.step()
        seen.append([each[0].item() for each in (first, late, added)])
    assert seen[1::2] == [[3.0, 0.0, 0.0], [6.0, 1.5, 1.5], [9.0, 4.5, 4.5]]


@each_rank_of(2)
def test_what_is_no_state_of_these_parameters_is_refused_and_a_copy_is_the_user_s_optimizer():
    optimizer = trained("torch", 4, **WAY).optimizer
    saved = optimizer.state_dict()
    saved["state"]["local steps"]["anchors"]["a"] = torch.zeros(7)
    with pytest.raises(rr.InputError, match=r"a state of another model: 'a' is \[7\] in it, and has \[3, 4\]"):
        optimizer.load_state_dict(saved)
    saved["state"]["local steps"]["anchors"] = {"x": torch.zeros(7)}
    with pytest.raises(
        rr.InputError, match=r"a state of another model: 'x' is \[7\] in it, and is not a parameter here"
    ):
        optimizer.load_state_dict(saved)
    sharded = hvd.ShardedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1))
    with pytest.raises(
        rr.InputError, match=r"DiLoCo: each rank has only its part of a ShardedOptimizer, .* the original one"
    ):
        rr.DiLoCo(sharded, sync_every=4)
    of_numpy = trained("numpy", 5, **WAY)
    for each in (optimizer, of_numpy.optimizer):
        with pytest.raises(rr.InputError, match="LocalSGD: the optimizer already takes local steps"):
            rr.LocalSGD(each, sync_every=4)
        with pytest.raises(rr.InputError, match="DistributedOptimizer: the optimizer is already wrapped"):
            rr.DistributedOptimizer(each)
    copied, before = copy.deepcopy(of_numpy), of_numpy.values()
    copied.optimizer.begin_from_anchors()
    assert_close(of_numpy.values(), before)
    assert_close(copied.values(), simulated(2, 5, **WAY)[1])
    if rr.rank() == 0:  # warnings are caught for all threads
        with pytest.warns(UserWarning, match="this SGD is a copy"):
            copied = copy.deepcopy(optimizer)
        assert type(copied) is torch.optim.SGD


@each_rank_of(3)
def test_parameters_in_16_bits_have_anchors_in_32():
    """The mean of 1, 1 and 1 + 2^-7 is rounded once, where it is written."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = hvd.LocalSGD(torch.optim.SGD([weight], lr=1.0), sync_every=1)
    weight.grad = torch.full_like(weight, -(2.0**-7) if rr.rank() == 2 else 0.0)
    optimizer.step()
    [anchor] = optimizer.state_dict()["state"]["local steps"]["anchors"].values()
    torch.testing.assert_close(anchor, torch.full((4,), 1 + 2.0**-7 / 3))
    assert weight.tolist() == [1.0] * 4
    with optimizer.averaged():
        assert weight.tolist() == [1.0] * 4
