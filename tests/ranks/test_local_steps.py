"""LocalSGD and DiLoCo, against one process that does the same: NumPy and torch."""

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.testing import run_ranks
from tests.support.local_models import MODELS, trained
from tests.support.local_steps import SHAPES, assert_close, simulated
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


def refused(pattern, error=rr.InputError, wrap=rr.DiLoCo, optimizer=print, parameters=None, **options):
    parameters = [np.zeros(3), np.zeros(2)] if parameters is None else parameters

    def stepped():
        made = wrap(optimizer, parameters, **{"sync_every": 12, **options})
        made([])

    with pytest.raises(error, match=pattern):
        stepped()


def without(optimizer, parameters, **options):
    return rr.DiLoCo(optimizer, **options)


@each_rank_of(2)
def test_what_cannot_be_done_is_refused():
    mine = rr.rank()
    refused(r"DiLoCo: sync_every=0; expected a whole number of 1 or more", sync_every=0)
    refused(r"LocalSGD: sync_every=0.5; expected a whole number", wrap=rr.LocalSGD, sync_every=0.5)
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
