"""The parameter server: in step it equals the ring, else it learns; what is wrong is said on all ranks."""

import time

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.engine import channels
from ringreduce.ps import worker as ps_worker
from ringreduce.runtime import Runtime
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of

RATE = 0.5


def pictures():
    """Images of ten kinds, with as much noise as leaves something to learn, and their labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=1797)
    return np.clip(rng.uniform(size=(10, 64))[labels] + 0.6 * rng.normal(size=(1797, 64)), 0, 1), labels


IMAGES, LABELS = pictures()


@pytest.fixture
def last_messages_soon(monkeypatch):
    """Who waits for one that has left looks for no more of its messages for a second."""
    monkeypatch.setattr(channels, "LAST_MESSAGES_S", 0.1)


def sgd(parameters, gradients):
    for name, gradient in gradients.items():
        parameters[name] -= RATE * gradient


def first():
    return {"out": {"w": np.zeros((64, 10)), "b": np.zeros(10)}}


def gradients(parameters, batch):
    """Of softmax regression."""
    images, labels = IMAGES[batch], LABELS[batch]
    scores = images @ parameters["out"]["w"] + parameters["out"]["b"]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    wrong = scores / scores.sum(1, keepdims=True) - np.eye(10)[labels]
    return {"out": {"w": images.T @ wrong / len(batch), "b": wrong.mean(0)}}


def accuracy(parameters):
    return (np.argmax(IMAGES @ parameters["out"]["w"] + parameters["out"]["b"], 1) == LABELS).mean()


def batches(index, count, steps):
    sampler = rr.DistributedSampler(len(IMAGES), num_replicas=count, rank=index, drop_last=True)
    for step in range(steps):
        if step % (len(IMAGES) // count // 32) == 0:
            drawn = iter(sampler.batches(32))
        yield next(drawn)


def training(steps, servers, serve, wire=rr.Compression.none, slow=()):
    """What each rank runs; a slow worker sleeps between steps."""

    def program():
        if rr.ps.is_server(servers):
            return serve().serve()
        with rr.ps.Worker(first(), servers=servers, compression=wire) as worker:
            for batch in batches(worker.index, worker.count, steps):
                worker.push(gradients(worker.pull(), batch))
                if worker.index in slow:
                    time.sleep(0.002)
            return worker.pull()

    return program


def by_ring(steps):
    def program():
        parameters = first()
        for batch in batches(rr.rank(), rr.size(), steps):
            reduced = gradients(parameters, batch)["out"]
            sgd(parameters["out"], {name: rr.allreduce(reduced[name], name=name) for name in ("w", "b")})
        return parameters

    return program


@pytest.mark.parametrize(("servers", "hosts"), [(1, None), (2, [0, 1, 2, 0, 1])], ids=["one host", "three hosts"])
def test_in_step_it_equals_the_ring(servers, hosts):
    size = 3 + servers
    found = run_ranks(
        size, training(20, servers, lambda: rr.ps.Server(sgd, servers=servers)), hosts=hosts and hosts[:size]
    )
    expected = run_ranks(3, by_ring(20))[0]
    for worker in range(3):
        for name in ("w", "b"):
            np.testing.assert_allclose(found[worker]["out"][name], expected["out"][name], rtol=0, atol=1e-12)
    assert [served.pushes for served in found[3:]] == [20] * servers


@pytest.mark.parametrize(
    ("mode", "staleness", "wire"),
    [
        ("ssp", 2, "none"),
        ("async", None, "bf16"),
        ("async", None, "int8"),
        pytest.param("async", None, "none", marks=pytest.mark.extended),
        pytest.param("ssp", 0, "fp16", marks=pytest.mark.extended),
    ],
)
def test_out_of_step_it_learns_and_nobody_is_too_far_ahead(mode, staleness, wire):
    compression = getattr(rr.Compression, wire)

    def serve():
        return rr.ps.Server(sgd, mode, staleness, servers=2, compression=compression)

    hosts = [0, 0, 0, 1, 1]  # or nothing is encoded
    found = run_ranks(5, training(60, 2, serve, compression, slow=[1]), hosts=hosts)
    for worker in range(3):
        assert accuracy(found[worker]) > 0.9
    for served in found[3:]:
        assert served.pushes == 3 * 60
        if staleness is not None:
            assert served.most_stale <= staleness
    elements = sum(array.size for array in first()["out"].values())
    nbytes = {"none": 8 * elements, "int8": 5 * 258}.get(wire, 2 * elements)
    most = 60 * 3 * (nbytes + 600) + elements * 8
    assert sum(served.nbytes_received for served in found[3:]) < most


@pytest.mark.parametrize("wire", [rr.Compression.int4, rr.Compression.int4.stochastic.everywhere], ids=str)
def test_4_bits_are_for_gradients_that_come_from_other_hosts(wire):
    """Worker 0 is on another host than the server; each worker changes an array of its own."""
    start, gradient = np.random.default_rng(7).normal(size=(2, 300))

    def program():
        if rr.ps.is_server(1):
            return rr.ps.Server(sgd, "async", servers=1, compression=wire).serve().parameters
        with rr.ps.Worker({"0": start, "1": start}, servers=1, compression=wire) as worker:
            if worker.index == 0:
                np.testing.assert_array_equal(worker.pull()["0"], start)
            worker.push({str(k): gradient * (k == worker.index) for k in range(2)})
        return None

    *_, parameters = run_ranks(3, program, hosts=[0, 1, 1])
    errors = [np.abs(parameters[str(k)] - (start - RATE * gradient)).max() for k in range(2)]
    assert 0.01 * RATE < errors[0] < 0.6 * RATE
    assert (errors[1] > 0.01 * RATE) == wire.is_everywhere


@each_rank_of(3)
def test_bfloat16_of_torch_is_held_as_float32():
    torch = pytest.importorskip("torch")
    if rr.ps.is_server(1):
        assert rr.ps.Server(sgd, servers=1).serve().parameters["w"].dtype == np.float32
        return
    with rr.ps.Worker({"w": torch.ones(3, dtype=torch.bfloat16)}, servers=1) as own:
        own.push({"w": torch.full((3,), -6.0, dtype=torch.bfloat16)})
        torch.testing.assert_close(own.pull()["w"], torch.full((3,), 4.0, dtype=torch.bfloat16))


def test_torch_s_optimizers_and_tensors():
    torch = pytest.importorskip("torch")
    from ringreduce.torch import ps_rule

    def program():
        if rr.ps.is_server(1):
            return rr.ps.Server(ps_rule(lambda tensors: torch.optim.Adam(tensors, lr=0.1)), servers=1).serve()
        with rr.ps.Worker([torch.arange(6.0).reshape(2, 3), np.float32(4)], servers=1) as worker:
            for step in range(4):
                weight, _ = worker.pull()
                worker.push([weight * (1 + worker.index), np.float32(step)])
            return worker.pull()

    weight, bias = torch.arange(6.0).reshape(2, 3), torch.tensor(4.0)
    alone = torch.optim.Adam([weight, bias], lr=0.1)
    for step in range(4):
        weight.grad, bias.grad = weight * 1.5, torch.tensor(float(step))
        alone.step()
    for found in run_ranks(3, program)[:2]:
        torch.testing.assert_close(found[0], weight, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found[1], bias, atol=1e-6)


@pytest.mark.usefixtures("last_messages_soon")
def test_a_rule_that_raises_is_raised_by_serve_and_the_workers_do_not_wait():
    def rule(parameters, gradients):
        raise ZeroDivisionError("in the rule")

    with pytest.raises(ZeroDivisionError, match="in the rule"):
        run_ranks(3, training(5, 1, lambda: rr.ps.Server(rule, servers=1)))


@each_rank_of(3)
def test_a_worker_that_fails_is_named():
    if rr.ps.is_server(1):
        with pytest.raises(rr.PeerLostError, match=r"recv 'ordered' \(thread:ps-worker-1\): rank 1 has left"):
            rr.ps.Server(sgd, "async", servers=1).serve()
        return
    worker = rr.ps.Worker(first(), servers=1)
    worker.push(worker.pull())
    if worker.index == 0:
        with pytest.raises(rr.PeerLostError, match="rank 1 has left"):
            worker.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: rr.ps.is_server(), r"0 servers of 3 ranks; expected 1 to 2, .* ringrun --servers 1"),
        (lambda: rr.ps.is_server(3), r"3 servers of 3 ranks"),
        (lambda: rr.ps.is_server("1"), "ps: servers='1'; expected a whole number of 0 or more"),
        (lambda: rr.ps.Server(sgd, "ssp", 1.5), "ps.Server: staleness=1.5; expected a whole number of 0 or more"),
        (lambda: rr.ps.Worker({}, servers=1), "no parameters; expected arrays"),
        (lambda: rr.ps.Server(sgd, "fast"), "mode='fast'; expected sync, async or ssp"),
        (lambda: rr.ps.Server(sgd, "ssp"), "mode='ssp', staleness=None; expected 0 or more, and only for ssp"),
        (lambda: rr.ps.Server(sgd, "async", 3), "mode='async', staleness=3; expected 0 or more, and only for ssp"),
    ],
)
def test_a_wrong_argument_is_said(program, message):
    with pytest.raises(rr.InputError, match=message):
        run_ranks(3, program)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("parameters", r"ps: parameter 'w': rank 0 has float64\[1\], but rank 1 float64\[2\]"),
        ("names", r"ps: parameter 'v': rank 0 has float64\[1\], but rank 1 none"),
        (
            "compression",
            "number of servers and compression: rank 0 has 1, NoneCompressor, but rank 1 1, FP16Compressor",
        ),
        ("role", r"rank 1 is a worker; expected ps\.Worker"),
    ],
)
def test_ranks_that_do_not_agree_are_told(differs, message):
    def program():
        rank = rr.rank()
        if rank == 2 or (differs == "role" and rank == 1):
            return rr.ps.Server(sgd, servers=1)
        shape = 1 + rank * (differs == "parameters")
        fp16 = differs == "compression" and rank == 1
        wire = rr.Compression.fp16 if fp16 else rr.Compression.none
        more = {f"b{at}": np.zeros(3) for at in range(100)} | (
            {"v": np.zeros(1)} if differs == "names" and not rank else {}
        )
        return rr.ps.Worker({**more, "w": np.zeros(shape)}, servers=1, compression=wire)

    with pytest.raises(rr.InputError, match=message):
        run_ranks(3, program)


@pytest.mark.parametrize(
    ("pushed", "message"),
    [
        ({"out": {"w": np.zeros((64, 10))}}, r"gradient 'out\.b': got nothing, expected shape \(10,\)"),
        (
            {"out": {"w": np.zeros((10, 64)), "b": np.zeros(10)}},
            r"'out\.w': got shape \(10, 64\), expected shape \(64,",
        ),
        ({"out": {**first()["out"], "c": np.zeros(1)}}, r"gradient 'out\.c' belongs to no parameter"),
    ],
)
@each_rank_of(3)
def test_gradients_of_another_form_are_refused_and_training_goes_on(pushed, message):
    if rr.ps.is_server(1):
        assert rr.ps.Server(sgd, servers=1).serve().pushes == 1
        return
    with rr.ps.Worker(first(), servers=1) as worker:
        with pytest.raises(rr.InputError, match=message):
            worker.push(pushed)
        worker.push(first())


@each_rank_of(2)
def test_a_closed_worker_neither_pulls_nor_pushes():
    if rr.ps.is_server(1):
        assert rr.ps.Server(sgd, servers=1).serve().pushes == 1
        return
    with rr.ps.Worker(first(), servers=1) as worker:
        worker.push(first())
    for use in worker.pull, lambda: worker.push(first()):
        with pytest.raises(rr.InputError, match=r"ps\.Worker: it is closed; push and pull before close\(\)"):
            use()
    worker.close()


@pytest.mark.parametrize(
    ("mode", "kept_bytes", "most"), [("sync", 1 << 20, 16), ("async", 1 << 20, 16), ("async", 1, 1)]
)
def test_pushes_without_pulls_are_not_all_kept_for_a_loss(monkeypatch, mode, kept_bytes, most):
    monkeypatch.setattr(Runtime, "is_elastic", True)
    monkeypatch.setattr(ps_worker, "UNANSWERED_BYTES", kept_bytes)
    kept = []

    def program():
        if rr.ps.is_server(1):
            return rr.ps.Server(sgd, mode, servers=1).serve()
        with rr.ps.Worker({"w": np.zeros(3)}, servers=1) as own:
            for _ in range(3 * ps_worker.MOST_UNANSWERED + 5):
                own.push({"w": -np.ones(3)})
                kept.append(len(own._unanswered))
            return own.pull()["w"]

    first, second, _ = run_ranks(3, program)
    assert max(kept) < most
    assert min(first.min(), second.min()) > 0


def frozen(array):
    """As an array of a library whose arrays cannot be changed."""
    array = np.array(array)
    array.flags.writeable = False
    return array


def new_ones(parameters, gradients):
    return {name: each - RATE * gradients[name] for name, each in parameters.items()}


def rebinds(parameters, gradients):
    for name, gradient in gradients.items():
        parameters[name] = parameters[name] - RATE * np.float64(gradient)


def same_ones(parameters, gradients):
    sgd(parameters, gradients)
    return parameters


def of_torch(parameters, gradients):
    """Gets NumPy's arrays each time."""
    tensors, grads = ({name: torch.from_numpy(each) for name, each in of.items()} for of in (parameters, gradients))
    return new_ones(tensors, grads)


RULES = {
    "in place": sgd,
    "new ones": new_ones,
    "rebinds": rebinds,
    "the same ones": same_ones,
    "another library's": of_torch,
}


FIRST = {"w": np.arange(10, dtype="f4").reshape(5, 2), "scalar": np.array(3.0), "half": np.ones(1, np.float16)}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_returns_is_used(rule, mode):
    """Two workers, and two servers that hold rows each; gradients of a wider type, and whole numbers."""

    def program():
        if rr.ps.is_server(2):
            return rr.ps.Server(RULES[rule], mode, servers=2, place=frozen if rule == "new ones" else None).serve()
        with rr.ps.Worker(FIRST, servers=2) as worker:
            for step in range(3):
                pushed = {name: each.astype(np.float64) * (1 + worker.index) + step for name, each in FIRST.items()}
                worker.push(pushed if step else {name: each.astype(int) for name, each in pushed.items()})
                types = [each.dtype for each in worker.pull().values()]
        return types

    *types, one, other = run_ranks(4, program)
    assert types == [[each.dtype for each in FIRST.values()]] * 2
    parts = one.parameters | other.parameters
    parts["w"] = np.concatenate([parts.pop("w[0:2]"), parts.pop("w[2:5]")])
    for name, each in FIRST.items():  # workers pushed each * (1 + index) + step
        expected = each - RATE * (each * 9.0 + 6) / (2 if mode == "sync" else 1)
        np.testing.assert_array_equal(parts[name], expected.astype(each.dtype), strict=True)


RETURNED = {
    "a list": (
        lambda parameters, gradients: list(gradients.values()),
        "the rule returned a list; expected None, where",
    ),
    "with its state": (
        lambda parameters, gradients: (new_ones(parameters, gradients), 1),
        "the rule returned a tuple; expected None",
    ),
    "one of two": (lambda p, g: {"b": p["b"]}, r"parameter 'w' after the rule: got nothing, expected \(2, 3\)"),
    "one more": (lambda p, g: {**p, "v": p["b"]}, r"parameter 'v' after the rule: got \(3,\), expected nothing"),
    "broadcast": (
        lambda p, g: {**p, "b": p["b"] - g["w"]},
        r"parameter 'b' after the rule: got \(2, 3\), expected \(3,\)",
    ),
    "complex": (lambda p, g: {**p, "b": p["b"] * 1j}, "parameter 'b' after the rule: got complex128, expected float64"),
    "taken away": (lambda p, g: p.__delitem__("b"), "parameter 'b' after the rule: got nothing"),
    "put in its place": (
        lambda p, g: p.update(b=p["b"].sum()),
        r"parameter 'b' after the rule: got \(\), expected \(3,\)",
    ),
}


@pytest.mark.usefixtures("last_messages_soon")
@pytest.mark.parametrize(("rule", "message"), RETURNED.values(), ids=RETURNED)
def test_what_is_no_set_of_new_parameters_is_refused(rule, message):
    first = {"w": np.ones((2, 3)), "b": np.zeros(3)}

    def program():
        if rr.ps.is_server(1):
            return rr.ps.Server(rule, servers=1).serve()
        with rr.ps.Worker(first, servers=1) as worker:
            worker.push(first)
            return worker.pull()

    with pytest.raises(rr.InputError, match=f"ps.Server: {message}"):
        run_ranks(2, program)


class Unreadable:
    def __array__(self, *_, **__):
        raise RuntimeError("gone")


HELD = {"w": np.ones(3, np.float32), "count": np.arange(2)}
WRONG_TYPES = {
    "complex": ({"w": np.ones(3, complex)}, r"push on rank 1: gradient 'w': got complex128, expected float32"),
    "fractions of whole numbers": ({"count": np.ones(2)}, "'count': got float64, expected int64, the parameter's type"),
    "texts": ({"w": np.array(["a", "b", "c"])}, "'w' is a ndarray of <U1; expected numbers"),
    "objects": ({"w": np.ones(3, object)}, "'w' is a ndarray of object; expected numbers"),
    "masked": ({"w": np.ma.masked_array([1.0, 2, 3], [0, 1, 0])}, "'w': a masked array would lose its mask"),
    "unreadable": ({"w": Unreadable()}, "'w': gone"),
    "no such array": ({"W": np.ones(3)}, "gradient 'W' belongs to no parameter"),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("pushed", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES)
@each_rank_of(3)
def test_types_that_cannot_become_the_parameters_fail_on_the_worker(pushed, message, mode):
    def rule(parameters, gradients):
        assert [gradients[name].dtype for name in HELD] == [np.float32, np.float64 if mode == "sync" else np.int64]
        parameters["w"] -= gradients["w"]

    if rr.ps.is_server(1):
        return rr.ps.Server(rule, mode, servers=1).serve().parameters["w"]
    with rr.ps.Worker(HELD, servers=1) as worker:
        if worker.index == 1:
            with pytest.raises(rr.InputError, match=message):
                worker.push({**HELD, **pushed})
        worker.push({"w": np.array([True, False, True]), "count": np.array([1, 3], np.uint8)})
    return np.array([0, 1, 0], np.float32) if mode == "sync" else np.array([-1, 1, -1], np.float32)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"w": np.array(["a"])}, "ps.Worker: parameter 'w' is a ndarray of <U1; expected numbers"),
        ({"w": {"v": object()}}, "ps.Worker: parameter 'w.v' is a object of object; expected numbers"),
        ({"w": np.array(["2026-01-01"], "M8[D]")}, r"ps.Worker: parameter 'w' is a ndarray of datetime64\[D\]"),
    ],
)
@each_rank_of(1)
def test_parameters_that_are_no_numbers_are_refused(held, message):
    with pytest.raises(rr.InputError, match=message):
        rr.ps.Worker(held)


def test_tied_parameters_are_told_of(capsys):
    def program(params):
        if rr.ps.is_server(1):
            return rr.ps.Server(sgd, servers=1).serve()
        rr.ps.Worker(params, servers=1).close()
        return None

    flat = np.arange(6.0)
    run_ranks(3, lambda: program({"a": flat[:3], "b": flat[3:], "c": flat[2:2], "d": np.zeros((2, 4))[:, 1:3]}))
    assert "ps.Worker" not in capsys.readouterr().err
    run_ranks(3, lambda: program({"embed": flat, "out": flat.reshape(2, 3).T}))
    [said] = [each for each in capsys.readouterr().err.splitlines() if "ps.Worker" in each]
    assert "parameters 'embed' and 'out' have the same memory, but servers hold an array for each" in said
