"""SyncBatchNorm on threads: forward, gradients and running statistics are those of one process with all rows."""

import copy
import itertools
import pickle

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of, known
from tests.support.tiers import adapters, parted
from tests.support.training import make_model, share, trained, trains_as_one_process

SHAPES = {"2-D": (), "3-D": (3,), "4-D": (3, 2), "5-D": (2, 1, 3), "6-D": (2, 1, 2, 1)}
CHANNELS = 4
ROWS = {1: [5], 2: [1, 4], 3: [2, 0, 3], 4: [1, 1, 2, 1]}


def batch(rows, rank, tail, seed=0, dtype=torch.float64):
    """Channels far from zero and of very different size: a variance taken as mean of squares would be wrong."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    values = torch.randn(rows, CHANNELS, *tail, generator=generator, dtype=torch.float64)
    like = [1, -1] + [1] * len(tail)
    offsets, sizes = torch.tensor([0.0, 1e3, -5.0, 7.0]).view(like), torch.tensor([1.0, 1e-2, 3.0, 1e2]).view(like)
    return (values * sizes + offsets + rank * sizes).to(dtype)


def set_up(layer, dtype=torch.float64, without=""):
    """Weights that differ by channel; float64."""
    layer.to(dtype)
    if without:
        setattr(layer, without, None)
    with torch.no_grad():
        for parameter, values in ((layer.weight, [0.5, -1.0, 2.0, 1.5]), (layer.bias, [0.1, 0.2, -0.3, 0.0])):
            if parameter is not None:
                parameter.copy_(torch.tensor(values))
    return layer


def loss_of(y, rank, tail):
    """Not linear, since the gradient of a plain sum is zero; every element's own."""
    weights = batch(len(y), rank, tail, seed=50).to(y.dtype) / 100
    return (y.pow(3) * weights + y * weights.flip(0)).sum()


def plain(tail, **options):
    """Torch's own layer, on all rows."""
    kind = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d][min(3, len(tail))]
    layer = kind(CHANNELS, **options)
    layer._check_input_dim = lambda input: None
    return layer


OPTIONS = {
    "as it is": {},
    "affine=False": {"affine": False},
    "no weight": {"without": "weight"},
    "no bias": {"without": "bias"},
    "track_running_stats=False": {"track_running_stats": False},
    "momentum=None": {"momentum": None},
    "momentum and eps": {"momentum": 0.7, "eps": 0.5},
}


@pytest.mark.parametrize(
    ("options", "shape"),
    parted(
        itertools.product(OPTIONS, SHAPES),
        lambda options, shape: options == "as it is" or shape == next(iter(SHAPES)),
        adapters,
    ),
)
@pytest.mark.parametrize("size", parted([1, 2, 3, 4], lambda size: size == 3))
def test_it_equals_one_process_with_all_rows(size, options, shape):
    """In three steps of training, and one of evaluation."""
    options, tail, rows = dict(OPTIONS[options]), SHAPES[shape], ROWS[size]
    without = options.pop("without", "")

    def program():
        layer = set_up(hvd.SyncBatchNorm(CHANNELS, **options), without=without)
        told = []
        for step in range(4):
            layer.train(step < 3)
            layer.zero_grad()
            x = batch(rows[hvd.rank()], hvd.rank(), tail, step).requires_grad_()
            y = layer(x)
            loss_of(y, hvd.rank(), tail).backward()
            gradients = [parameter.grad.clone() for parameter in layer.parameters()]
            told.append((y.detach(), x.grad, gradients, copy.deepcopy(layer.state_dict())))
        return told

    results = run_ranks(size, program)
    layer = set_up(plain(tail, **options), without=without)
    for step in range(4):
        layer.train(step < 3)
        layer.zero_grad()
        shares = [batch(n, rank, tail, step).requires_grad_() for rank, n in enumerate(rows)]
        ys = layer(torch.cat(shares)).split(rows)
        sum(loss_of(y, rank, tail) for rank, y in enumerate(ys)).backward()
        for rank in range(size):
            y, of_input, _, state = results[rank][step]
            assert_close(y, ys[rank].detach())
            assert_close(of_input, shares[rank].grad)
            assert state.keys() == layer.state_dict().keys()
            for key, value in layer.state_dict().items():
                assert_close(state[key], value)
        for number, parameter in enumerate(layer.parameters()):
            assert_close(sum(results[rank][step][2][number] for rank in range(size)), parameter.grad)


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


@each_rank_of(2)
def test_gradcheck():
    """All ranks have equal rows, and change the same element at the same time."""
    layer = set_up(hvd.SyncBatchNorm(CHANNELS))
    x = torch.randn(3, CHANNELS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def normalised(x, weight, bias):
        with torch.no_grad():
            layer.running_mean.zero_()
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    inputs = [x, layer.weight.detach().clone(), layer.bias.detach().clone()]
    assert torch.autograd.gradcheck(normalised, [each.requires_grad_() for each in inputs])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("all_16_bits", [False, True])
def test_other_types(dtype, all_16_bits):
    """16-bit inputs of a float32 layer, as under autocast, or of a 16-bit layer; statistics are made in float32."""

    def program():
        layer = set_up(hvd.SyncBatchNorm(CHANNELS), dtype if all_16_bits else torch.float32)
        x = mild(hvd.rank(), dtype).requires_grad_()
        y = layer(x)
        loss_of(y, hvd.rank(), (3,)).backward()
        assert y.dtype is x.grad.dtype is dtype
        assert layer.weight.grad.dtype is layer.weight.dtype
        return y.detach().double(), x.grad.double(), layer.weight.grad.double()

    layer = set_up(plain((3,)))
    shares = [mild(rank, dtype).double().requires_grad_() for rank in range(2)]
    ys = layer(torch.cat(shares)).chunk(2)
    sum(loss_of(y, rank, (3,)) for rank, y in enumerate(ys)).backward()
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    of_weight = 0
    for rank, (y, gradient, own) in enumerate(run_ranks(2, program)):
        torch.testing.assert_close(y, ys[rank].detach(), **tolerance)
        torch.testing.assert_close(gradient / shares[rank].grad.abs().max(), norm(shares[rank].grad), **tolerance)
        of_weight = of_weight + own
    torch.testing.assert_close(norm(of_weight), norm(layer.weight.grad), **tolerance)


def mild(rank, dtype):
    """Channels whose mean is no more than a few deviations, as far as 16 bits go."""
    return (torch.randn(8, CHANNELS, 3, generator=torch.Generator().manual_seed(rank)) * 3 + rank).to(dtype)


def norm(tensor):
    return tensor / tensor.abs().max()


def test_training_with_it_equals_training_alone():
    def program(data, wrapped):
        model = make_model()
        model.insert(1, (hvd.SyncBatchNorm if data is share else torch.nn.BatchNorm1d)(16).double())
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        trained(model, optimizer, 5, lambda model, step: model(data(step)).square().mean().backward())
        return torch.cat([value.reshape(-1).double() for value in model.state_dict().values()])

    trains_as_one_process(3, program)


@each_rank_of(3, process_sets=[[0, 2], [1]])
def test_in_a_process_set():
    """The rank between goes on with its own rows only."""
    ranks, number = ([1], 2) if hvd.rank() == 1 else ([0, 2], 1)
    layer, expected = set_up(hvd.SyncBatchNorm(CHANNELS, process_set=known(ranks, number))), set_up(plain(()))
    x = batch(3, hvd.rank(), ()).requires_grad_()
    loss_of(layer(x), hvd.rank(), ()).backward()
    shares = [batch(3, rank, ()).requires_grad_() for rank in ranks]
    ys = expected(torch.cat(shares)).split(3)
    sum(loss_of(y, rank, ()) for rank, y in zip(ranks, ys, strict=True)).backward()
    assert_close(x.grad, shares[ranks.index(hvd.rank())].grad)
    assert_close(layer.running_mean, expected.running_mean)


@each_rank_of(2)
def test_messages_a_step():
    """Training: an allgather, and an allreduce backward when the input needs it; evaluation: nothing."""
    layer = set_up(hvd.SyncBatchNorm(CHANNELS))
    x, counts = batch(3, hvd.rank(), ()), []
    for call in (
        lambda: layer(x),
        lambda: layer(x).sum().backward(),
        lambda: layer(x.clone().requires_grad_()).sum().backward(),
        lambda: layer.eval()(x),
    ):
        before = hvd.info().submissions
        call()
        counts.append(hvd.info().submissions - before)
    assert counts == [1, 1, 2, 0]


@each_rank_of(2)
def test_its_state_fits_torchs_own_layer():
    layer = hvd.SyncBatchNorm(CHANNELS)
    layer(batch(3, hvd.rank(), (), dtype=torch.float32))
    own = torch.nn.BatchNorm1d(CHANNELS)
    own.load_state_dict(layer.state_dict())
    copy.deepcopy(layer).load_state_dict(own.state_dict())
    assert isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    return own.running_mean


WRONG = [
    (lambda layer: layer(torch.ones(3)), r"expected at least 2D input \(got 1D input\)"),
    (lambda layer: layer(torch.ones(3, 5)), "5 channels; expected num_features=4"),
    (
        lambda layer: layer(torch.ones(1 - hvd.rank(), CHANNELS)),
        r"expected more than 1 value per channel when training, got 1 on all ranks together; this rank's input is",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
@each_rank_of(2)
def test_what_is_refused(call, message):
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match=message):
        call(layer)
    assert layer.num_batches_tracked == 0
    assert layer(torch.ones(3, CHANNELS)).abs().max().item() == 0


class NormAct(torch.nn.BatchNorm2d):
    """With an activation; and a buffer, an attribute and a module of its own."""

    def __init__(self, features, slope=0.1):
        super().__init__(features)
        self.register_buffer("seen", torch.zeros(()))
        self.slope, self.drop = slope, torch.nn.Identity()

    def forward(self, x):
        self.seen += 1
        return torch.nn.functional.leaky_relu(self.drop(super().forward(x)), self.slope)


class Rewritten(torch.nn.BatchNorm2d):
    """As timm's BatchNormAct2d, which does what BatchNorm2d.forward does, and more."""

    def forward(self, x, scale=1.0):
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = momentum or 1.0 / float(self.num_batches_tracked)
        y = torch.nn.functional.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            momentum,
            self.eps,
        )
        return torch.nn.functional.gelu(y * scale)


class Checked(torch.nn.BatchNorm2d):
    """Has no forward() of its own."""

    def _check_input_dim(self, input):
        assert input.dim() == 4, "four"


class Absolute:
    def forward(self, x, shift=0.5):
        return super().forward(x).abs() + shift


class Mixed(Absolute, torch.nn.modules.batchnorm._BatchNorm):
    """Its forward() stands before torch's class, which is no BatchNorm2d."""

    def __init__(self, features):
        super().__init__(features, eps=1e-2, momentum=0.7)

    def _check_input_dim(self, input):
        pass


class OfSync(torch.nn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x).tanh()


def parametrized(features):
    layer = torch.nn.BatchNorm2d(features)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Softplus())
    return layer


def frozen_statistics(features):
    """Switched off later: they are kept, and change no more."""
    layer = torch.nn.BatchNorm2d(features)
    layer.running_mean += 3
    layer.track_running_stats = False
    return layer


def without_a_count(features):
    layer = torch.nn.BatchNorm2d(features)
    layer.num_batches_tracked = None
    return layer


LAYERS = {
    "plain": torch.nn.BatchNorm2d,
    "torch's own": torch.nn.SyncBatchNorm,
    "no weights": lambda features: torch.nn.BatchNorm2d(features, affine=False),
    "cumulative": lambda features: torch.nn.BatchNorm2d(features, momentum=None),
    "no statistics": lambda features: torch.nn.BatchNorm2d(features, track_running_stats=False),
    "frozen statistics": frozen_statistics,
    "without a count": without_a_count,
    "lazy": lambda features: torch.nn.LazyBatchNorm2d(momentum=0.3),
    "parametrized": parametrized,
    "with an activation": NormAct,
    "rewritten": Rewritten,
    "of a class with a check": Checked,
    "mixed": Mixed,
    "of a class of torch's own": OfSync,
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_converted_layer_does_what_it_did_with_the_rows_of_all_ranks(make):
    """In training; and in evaluation the same as before it was converted."""

    def model():
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Conv2d(4, CHANNELS, 1), make(CHANNELS), torch.nn.Flatten()).double()

    def train(made, batches):
        told = []
        for step in range(3):
            shares = batches(step)
            y = made(torch.cat(shares))
            y.pow(3).sum().backward()
            told.append((y.detach(), *(each.grad for each in shares)))
        return told, {name: each.clone() for name, each in made.state_dict().items()}

    def program():
        made = hvd.SyncBatchNorm.convert_sync_batchnorm(models[hvd.rank()])
        told, state = train(made, lambda step: [batch(3, hvd.rank(), (2, 2), step).requires_grad_()])
        assert isinstance(made[1], hvd.SyncBatchNorm)
        return told, state, made.eval()(batch(3, 0, (2, 2), 9))

    *models, whole = [model() for _ in range(3)]
    told, state = train(whole, lambda step: [batch(3, rank, (2, 2), step).requires_grad_() for rank in range(2)])
    for rank, (own, own_state, evaluated) in enumerate(run_ranks(2, program)):
        for (y, gradient), (ys, *gradients) in zip(own, told, strict=True):
            assert_close(y, ys.chunk(2)[rank])
            assert_close(gradient, gradients[rank])
        assert own_state.keys() == state.keys()
        for name, each in state.items():
            assert_close(own_state[name], each)
        if whole[1].running_mean is not None:
            assert_close(evaluated, whole.eval()(batch(3, 0, (2, 2), 9)))


class Model(torch.nn.Module):
    """One layer under two names, in containers, in a list that torch does not know, with hooks and shared weights."""

    def __init__(self):
        super().__init__()
        self.norm = NormAct(CHANNELS)
        self.same, self.plain = self.norm, torch.nn.BatchNorm2d(CHANNELS)
        self.others = torch.nn.ModuleDict({"x": self.plain, "y": torch.nn.Sequential(torch.nn.BatchNorm2d(CHANNELS))})
        self.others["y"][0].weight = self.plain.weight
        self.unknown = [self.others["y"][0]]
        self.calls = []
        self.norm.qconfig = "kept"
        self.norm.register_forward_hook(lambda layer, _, y: self.calls.append(layer is self.norm))

    def forward(self, x):
        return self.unknown[0](self.others["x"](self.same(self.norm(x))))


@each_rank_of(2)
def test_what_a_model_has_is_the_same_after_it_was_converted():
    model = Model().double()
    before = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    layers = model.norm, model.same, model.plain, model.others["x"], model.others["y"][0], model.unknown[0]
    assert [layers.index(each) for each in layers] == [0, 0, 2, 2, 4, 4]
    assert all(isinstance(each, hvd.SyncBatchNorm) for each in layers)
    assert (type(model.norm).__name__, model.norm.qconfig, model.norm.slope) == ("SyncNormAct", "kept", 0.1)
    assert isinstance(model.norm, NormAct)
    for name, each in model.named_parameters(remove_duplicate=False):
        assert each is before[0][name]
    copied = copy.deepcopy(model)
    for made in (model, copied, torch.nn.DataParallel(model)):
        made(batch(2, hvd.rank(), (2, 2)))
    assert model.calls == [True, True, False, False, True, True]  # the hook is the model's
    assert type(copied.norm) is type(model.norm)
    assert copied.norm is copied.same
    plain = Model().double()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    kinds = list(map(type, model.modules()))
    assert list(map(type, hvd.SyncBatchNorm.convert_sync_batchnorm(model).modules())) == kinds
    return model.norm.running_mean


@each_rank_of(2)
def test_a_layer_itself_is_copied_and_pickled_and_its_parametrization_removed():
    layer = NormAct(CHANNELS)
    made = hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert (type(layer), isinstance(made, hvd.SyncBatchNorm)) == (NormAct, True)
    assert made.weight is layer.weight
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    torch.testing.assert_close(again.state_dict(), made.state_dict())
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(parametrized(CHANNELS))
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is hvd.SyncBatchNorm
    layer(batch(2, hvd.rank(), (2, 2)).float())
    lazy = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm2d())
    lazy.load_state_dict(layer.state_dict())
    lazy(batch(2, hvd.rank(), (2, 2)).float())
    assert type(lazy) is hvd.SyncBatchNorm
    return lazy.running_mean


class ByItself(torch.nn.BatchNorm2d):
    def forward(self, x):
        return x - x.mean((0, 2, 3), keepdim=True) if self.training else super().forward(x)


class Final(torch.nn.BatchNorm2d):
    def __init_subclass__(cls, *, allowed):
        pass


def test_a_layer_that_cannot_be_synchronised_is_named():
    def program():
        own = torch.nn.Sequential(ByItself(CHANNELS))
        hvd.SyncBatchNorm.convert_sync_batchnorm(own)
        own.eval()(batch(2, 0, (2, 2)).float())
        own.train()(batch(2, 0, (2, 2)).float())

    with pytest.warns(UserWarning, match="layer '0', a SyncByItself, normalizes without .*: its statistics stay each"):
        run_ranks(2, program)
    final = torch.nn.Sequential(torch.nn.ReLU(), Final(CHANNELS))
    with pytest.warns(UserWarning, match="layer '1', a Final, stays as it is: .*; its statistics are each rank's own"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(final)
    assert type(final[1]) is Final


@each_rank_of(3, process_sets=[[0, 2], [1]])
def test_converted_layers_in_a_process_set():
    ranks, number = ([1], 2) if hvd.rank() == 1 else ([0, 2], 1)
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(Rewritten(CHANNELS).double(), known(ranks, number))
    layer(batch(3, hvd.rank(), (2, 1)), scale=2.0)
    expected = plain((1, 1)).double()
    expected(torch.cat([batch(3, rank, (2, 1)) for rank in ranks]))
    assert_close(layer.running_var, expected.running_var)
