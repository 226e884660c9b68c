"""Who began with NaN is named, by rank, tensor and step, and all ranks act alike; clean steps raise no alarm."""

import contextlib
import re
import sys
import time
import types

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.view import as_buffers
from ringreduce.checks import nan
from ringreduce.execution.program import Program
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support import fake_torch
from tests.support.loops import in_a_loop
from tests.support.patience import wait_until
from tests.support.tiers import extended
from tests.support.world import on_every_world_with_torch

STEP, BAD = 7, 1  # where one rank's gradients go bad


@contextlib.contextmanager
def checked(text):
    """A pool's ranks go on after a test."""
    rr.check(text)
    try:
        yield runtime.current("test").watch
    finally:
        rr.check("")


def gradients(step, value=np.nan):
    """Of a rank; those of the bad one have one bad element, in one step."""
    made = {"a": np.full(3000, rr.rank() + step, np.float32), "e": np.ones(0, np.float32)}
    made["b"] = np.full((3, 4), rr.rank() - step, np.float32)
    if step == STEP and rr.rank() == BAD:
        made["b"][1, 2] = value
    return made | {"n": np.arange(3)}


def by_numpy(step, value):
    return rr.allreduce(gradients(step, value), op=rr.Sum)["b"]


def by_name(step, value):
    handles = [rr.allreduce_async(each, name=name, op=rr.Sum) for name, each in gradients(step, value).items()]
    order = handles if rr.rank() else handles[::-1]  # ranks may wait in any
    done = {id(handle): handle.wait() for handle in order if handle is not handles[2]}
    assert len(done) == 3
    return handles[2].wait()


class Torch:
    """A model of a DistributedOptimizer, whose gradients are those of `gradients`."""

    def __init__(self, wrap=None, fused=False, **options):
        import torch

        import ringreduce.torch as hvd

        named = [(name, torch.nn.Parameter(torch.zeros(each.shape))) for name, each in gradients(0).items()][:3]
        self.parameters, self.torch = dict(named), torch
        sgd = torch.optim.SGD(self.parameters.values(), lr=1.0, fused=fused)
        self.optimizer = (wrap or hvd.DistributedOptimizer)(sgd, named, op=hvd.Sum, **options)

    def backward(self, step, value=np.nan, scale=lambda loss: loss):
        made = gradients(step, value)
        self.optimizer.zero_grad()
        scale(sum((p * self.torch.tensor(made[name])).sum() for name, p in self.parameters.items())).backward()

    def __call__(self, step, value):
        self.backward(step, value)
        before = self.parameters["b"].detach().clone()
        self.optimizer.step()
        return (before - self.parameters["b"].detach()).numpy()


def sharded():
    import ringreduce.torch as hvd

    return Torch(hvd.ShardedOptimizer)


def powered():
    return Torch(compression=rr.PowerSGD(1, start_step=0))


def in_8_bits():
    return Torch(compression=rr.Compression.int8)


def in_16_bits():
    return Torch(compression=rr.Compression.fp16)


MADE = [lambda: by_numpy, lambda: by_name, Torch, in_16_bits, in_8_bits, sharded, powered]
NAMES = ["numpy", "names", "torch", "16 bits", "8 bits", "sharded", "PowerSGD"]
programs = pytest.mark.parametrize("make", MADE, ids=NAMES)


@programs
@on_every_world_with_torch
def test_all_ranks_raise_in_the_step_and_name_the_one_with_the_nan(world, size, make):
    def program():
        with checked("nan:raise"):
            take = make()
            for step in range(STEP + 3):
                try:
                    take(step, np.nan)
                except rr.NanError as error:
                    assert step == STEP
                    found = str(error)
            return found

    texts = set(world(size).run(program))
    assert len(texts) == 1, texts
    where = rf"^rank 1 of \d, (allreduce|reduce_shards) 'b' \(test_nan.py:\d+\), step {STEP}: NaN "
    assert re.match(where + r"in its own values, before the sum \(float(32|16)\)$", texts.pop())


@programs
@on_every_world_with_torch
def test_the_step_is_zeroed_on_all_ranks_and_training_goes_on(world, size, make):
    def program():
        with checked("nan:zero"):
            take = make()
            return [np.array(take(step, -np.inf)) for step in range(STEP + 3)]

    for results in world(size).run(program):
        for step, result in enumerate(results):
            expected = 0 if step == STEP else sum(rank - step for rank in range(size))
            assert np.ravel(result) == pytest.approx(expected, abs=0.5)


@programs
def test_it_is_reported_once_and_counted(make, capfd):
    """By the rank that has it; the others' next gradients may well be NaN because of it."""

    def program():
        with checked("nan"):
            take = make()
            for step in [0, 1, STEP, 3, *[STEP] * 9]:
                take(step, np.nan)

    run_ranks(3, program)
    first, tenth = [line for line in capfd.readouterr().err.splitlines() if "check:" in line]
    assert re.match(r"ringreduce: check: rank 1 of 3, .* 'b' .*, step 2: NaN in .*; 1 so far$", first)
    assert re.search(r"; 10 so far; the first was of rank 1 of 3, .* 'b' \(.*\), step 2$", tenth)


def test_a_gradient_that_overflows_in_16_bits_is_named_too(monkeypatch):
    told = []
    monkeypatch.setattr(nan.launcher_link, "report", lambda _, finding="", **__: finding and told.append(finding))

    def program():
        rr.check("nan:raise")
        take = in_16_bits()
        take(1, 0)
        take.backward(1, scale=lambda loss: loss * 3e4)
        with pytest.raises(rr.NanError, match=r"'a' .*, step 1: infinity in the sum of finite values \(float16"):
            take.optimizer.step()
        take(1, 0)

    run_ranks(2, program)
    (text,) = told
    assert "'a'" in text, "ringrun knows it, though an error says it, too"


def test_what_is_submitted_again_before_the_first_is_waited_for_is_checked_in_turn():
    """A name is free once its handle is done, also while ranks still agree on what they have found."""

    def program():
        found = []
        for step in range(100):
            handles = []
            for number in range(3):
                value = np.nan if (number, rr.rank()) == (step % 3, step % 2) else number
                handles.append(rr.allreduce_async(np.full(3, float(value)), name="w", op=rr.Sum))
                while not handles[-1].poll():
                    time.sleep(0)
            for number, handle in list(enumerate(handles))[:: 1 - 2 * (step % 5 == 4)]:
                try:
                    found.append((step, number, float(handle.wait()[0])))
                except rr.NanError as error:
                    found.append((step, number, error.rank))
        return found

    expected = [
        (step, number, step % 2 if number == step % 3 else 2.0 * number)
        for step in range(100)
        for number in ([2, 1, 0] if step % 5 == 4 else [0, 1, 2])
    ]
    assert run_ranks(2, program, settings=Settings(check="nan:raise"), timeout_s=60) == [expected] * 2


def test_a_rank_that_has_joined_does_not_stop_the_others():
    def program():
        rr.check("nan:zero")
        take = Torch()
        for step in [4, *[2, STEP, 3] * rr.rank()]:
            result = take(step, np.nan)
            assert (result == 0).all() if step == STEP else result.all()
        assert rr.join() == 1

    run_ranks(2, program)


def test_a_report_does_not_wait_for_a_rank_that_skips_a_step(capfd, monkeypatch):
    monkeypatch.setattr(nan, "REPORT_S", 0.05)

    def program():
        rr.check("nan")
        take = Torch()
        for step in [0, 1, STEP, *range(20, 40)]:  # the last ones: a late report comes with a later step
            take.backward(step)
            take.optimizer.synchronize()
            if step != 1 or rr.rank() == BAD:
                with take.optimizer.skip_synchronize():
                    take.optimizer.step()

    run_ranks(2, program)
    assert len(re.findall("rank 1 of 2, .* 'b' .* step 2: NaN in", capfd.readouterr().err)) == 1


def test_a_report_does_not_fail_a_step_whose_other_ranks_have_left(monkeypatch):
    monkeypatch.setattr(nan, "REPORT_S", 0.05)

    def program():
        rr.check("nan")
        take = Torch()
        take(0, 0.0)
        take.backward(1)
        take.optimizer.synchronize()
        if rr.rank() == BAD:
            wait_until(lambda: runtime.current("test").engine.states[0].closed)
        with take.optimizer.skip_synchronize():
            take.optimizer.step()
        return take.parameters["b"].detach().numpy()

    first, second = run_ranks(2, program)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("action", ["report", "raise", "zero"])
def test_an_agreement_that_a_lost_rank_has_ended_is_not_waited_for_again(monkeypatch, action):
    failures = [rr.PeerLostError("rank 1 has left", [1])]

    class Agreed:
        def __init__(self, *_):
            self.error = failures.pop() if failures else None

        def wait(self, _):
            if self.error is not None:
                raise self.error

    def steps():
        watch._sets[0] = None
        watch.before_step(set())  # as good an optimizer as any

    monkeypatch.setattr(nan, "Agreement", Agreed)
    watch = nan.Nan(types.SimpleNamespace(engine=None), action)
    with contextlib.nullcontext() if action == "report" else pytest.raises(rr.PeerLostError):
        steps()
    assert watch._late is None
    steps()  # in another world, or process group


@pytest.mark.parametrize("fused", [False, True])
def test_infinities_that_a_grad_scaler_skips_are_only_counted(fused):
    import torch

    def program():
        with checked("nan:raise") as watch:
            take = Torch(fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in [*range(3), STEP, *range(4, 7)]:
                take.backward(step, np.inf, scaler.scale)
                scaler.step(take.optimizer)
                scaler.update()
            assert scaler.get_scale() == 4
            assert watch._skipped == (fused or rr.rank() == BAD)
            with pytest.raises(rr.NanError, match="step 6: NaN" if not fused else "step 7: NaN"):
                take(STEP, np.nan)

    run_ranks(2, program)


def arrays(value, dtype="float32", rank=None):
    """Of `value` on this rank, or all."""
    return np.full(5, value if rank in (None, rr.rank()) else 0).astype(dtype)


LARGEST = np.finfo(np.float32).max
FINE = {
    "the largest number": lambda: rr.allreduce(arrays(LARGEST, rank=0)),
    "sums of large numbers": lambda: rr.allreduce(arrays(LARGEST / 2), op=rr.Sum),
    "averages of large halves": lambda: rr.allreduce(arrays(3e4, "float16", 1)),
    "small ones": lambda: rr.allreduce(arrays(-1e-45)),
    "integers": lambda: rr.allreduce(arrays(2**31 - 1, "int32"), op=rr.Max),
    "NaN's bits": lambda: rr.allreduce(arrays(-1, "int32"), op=rr.Sum),
    "nothing": lambda: rr.allreduce(np.empty(0, np.float32)),
    "a number": lambda: rr.allreduce(3),
    "a minimum": lambda: rr.allreduce(arrays(np.inf), op=rr.Min),
    "rows": lambda: rr.reducescatter(arrays(1.5)),
    "what is gathered": lambda: rr.allgather(arrays(np.nan)),
}


def late(values):
    """Of a rank each; rank 1 is late."""
    time.sleep(0.02 * rr.rank())
    return rr.allreduce(arrays(values[rr.rank()], "float16"), op=rr.Sum)


WRONG = {
    "halves overflow": (lambda: rr.allreduce(arrays(4e4, "float16"), op=rr.Sum), "infinity in the sum .*float16"),
    "floats overflow": (lambda: rr.allreduce(arrays(-LARGEST), op=rr.Sum), "infinity in the sum of finite values"),
    "an infinity that comes later": (lambda: late([4e4, -np.inf]), "rank 1 of 2, .*: infinity in its own"),
    "the first of a group": (
        lambda: rr.grouped_allreduce([arrays(4e4, "float16"), arrays(1, "float16")], op=rr.Sum),
        "infinity in the sum",
    ),
    "beside integers": (
        lambda: rr.grouped_allreduce([arrays(7, "int32"), arrays(-4e4, "float16")], op=rr.Sum),
        "infinity in the sum",
    ),
    "complex": (lambda: rr.allreduce(arrays(complex(1, np.nan), "complex64", 1)), "rank 1 of 2, .*NaN .*complex64"),
    "a number": (lambda: rr.allreduce([1.0, -np.inf][rr.rank()]), "rank 1 of 2, .* infinity in its .*float64"),
    "rows": (lambda: rr.reducescatter(arrays(np.nan, rank=0)), "rank 0 of 2, reducescatter of an unnamed .*NaN in its"),
    "hosts": (lambda: rr.allreduce(arrays(4e4, "float16"), op=rr.Sum, name="w"), "rank [01] of 2, allreduce 'w'"),
}


@in_a_loop("case", FINE)
def test_what_is_finite_or_no_sum_raises_no_alarm(case):
    def program():
        rr.check("nan:raise")
        for _ in range(3):
            FINE[case]()

    run_ranks(2, program)


@in_a_loop("case", WRONG)
def test_what_is_not_finite_is_named_each_time(case):
    make, message = WRONG[case]

    def program():
        rr.check("nan:raise")
        for step in range(3):
            with pytest.raises(rr.NanError, match=rf"{message}.*") as caught:
                make()
            assert f"step {step}: " in str(caught.value)
        rr.check("")
        make()
        return str(caught.value)

    assert len(set(run_ranks(2, program, hosts=(0, 1) if case == "hosts" else None))) == 1


@extended
def test_ten_thousand_clean_steps_raise_no_alarm():
    def program():
        random = np.random.default_rng(rr.rank())
        rr.check("nan:raise")
        for _ in range(10_000):
            scales = 10.0 ** random.uniform([-45, -8], [37, 4])
            grads = [random.standard_normal(64) * scale for scale in scales]
            rr.grouped_allreduce([each.astype(kind) for each, kind in zip(grads, ("f4", "f2"), strict=True)])

    run_ranks(2, program, timeout_s=600)


def test_a_program_in_order_is_checked_by_each_rank_alone(capfd):
    def program():
        channel = rr.ordered()
        rr.check("nan:raise")
        for step in range(4):
            bad = step == 3 and rr.rank() == BAD
            with pytest.raises(rr.NanError, match="rank 1 of 2") if bad else contextlib.nullcontext():
                channel.allreduce(arrays(np.nan if bad else 1.0))

    run_ranks(2, program)


def test_nothing_takes_the_fast_lane_unseen():
    def program():
        lane, x = rr.ordered()._lane, np.ones(3)
        of = Submission(Signature("allreduce", "ordered.0"), -1, [], [], id, None, "", True)
        known = Program(of, lambda *_: 0, None)
        wait_until(lambda: lane.run(known, x, x))  # not while the engine's thread polls
        rr.check("nan")
        assert not any(lane.run(known, x, x) for _ in range(10))

    run_ranks(2, program)


def test_the_check_goes_on_in_the_next_world_of_an_elastic_job():
    def program():
        rr.check("nan:raise")
        own = runtime.current("test")
        host = own.engine.host
        own.engine.leave("it is lost")
        own.enter(runtime.Setup(own.world, own.transport, host))
        own.start_checks()
        with pytest.raises(rr.NanError, match=r"rank 0 of 1, .*, step 0: NaN"):
            rr.allreduce(np.nan)

    run_ranks(1, program)


def of_library(request, gpu, monkeypatch):
    """(array): a copy on the GPU, which is there late; (result): on the host."""
    if request == "cupy":
        return gpu.array, gpu.asnumpy
    monkeypatch.setitem(sys.modules, "torch", fake_torch)
    return fake_torch.tensor, fake_torch.Tensor.cpu


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("action", ["raise", "zero"])
def test_arrays_on_a_gpu(gpu, monkeypatch, action, library, in_place):
    """They are looked at where they are, before they are overwritten, and ranks may wait in any order."""
    put, get = of_library(library, gpu, monkeypatch)
    begin = rr.allreduce_async_ if in_place else rr.allreduce_async

    def program():
        rr.check(f"nan:{action}")
        for step in range(3):
            names = [name for name, each in gradients(STEP).items() if each.size and each.dtype == np.float32]
            values = gradients(STEP if step == 1 else step, -np.inf)
            handles = [begin(put(values[name]), name=name, op=rr.Sum) for name in names]
            for name, handle in list(zip(names, handles, strict=True))[:: 1 - 2 * rr.rank()]:
                is_bad = (step, name) == (1, "b")
                message = r"rank 1 of 2, allreduce 'b' .*, step 1: infinity in its own values"
                with (
                    pytest.raises(rr.NanError, match=message)
                    if is_bad and action == "raise"
                    else contextlib.nullcontext()
                ):
                    result = get(handle.wait())
                    sums = {"a": 2 * (STEP if step == 1 else step) + 1, "b": 1 - 2 * step}
                    np.testing.assert_array_equal(result, 0 if is_bad else sums[name])

    run_ranks(2, program, settings=Settings(cuda_slot_bytes=4096, cuda_nccl=False))


def test_cupy_s_current_stream_stays_that_of_the_caller(gpu, monkeypatch):
    put, _ = of_library("torch", gpu, monkeypatch)

    def program():
        rr.check("nan:zero")
        arrays_there, mine = [put(arrays(value)) for value in (1.0, np.nan)], gpu.cuda.Stream(non_blocking=True)
        mine.use()
        for each in arrays_there:
            rr.allreduce_(each)
            assert gpu.cuda.get_current_stream() == mine

    run_ranks(2, program, settings=Settings(cuda_slot_bytes=4096, cuda_nccl=False))


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_sum_on_a_gpu_that_overflows(gpu, monkeypatch, library, hosts):
    put, _ = of_library(library, gpu, monkeypatch)

    def program():
        rr.check("nan:raise")
        for step in range(3):
            made = put(arrays(4e4, "float16")), put(arrays(2**30, "int32")), put(arrays(1, "float16"))
            with pytest.raises(rr.NanError, match=rf"step {step}: infinity in the sum of finite values \(float16"):
                rr.grouped_allreduce(made, op=rr.Sum)

    run_ranks(2, program, hosts=hosts, settings=Settings(cuda_slot_bytes=4096, cuda_nccl=False))


@pytest.mark.parametrize(
    ("prescale", "postscale", "is_large"),
    [(1.0, 1.0, False), (0.01, 1.0, False), (100.0, 1.0, True), (1.0, -100.0, True)],
)
def test_what_the_scales_make_of_a_sum_may_overflow_too(prescale, postscale, is_large):
    """Only then the result is looked at."""
    checks = nan.Nan(types.SimpleNamespace(world=types.SimpleNamespace(size=2)), "report")
    details = (("op", rr.Sum.value), ("prescale_factor", prescale), ("postscale_factor", postscale))
    assert checks.look(0, None, None, details, as_buffers([np.array([1e37], np.float32)])).is_large is is_large
