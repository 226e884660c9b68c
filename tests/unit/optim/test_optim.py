"""optim/: what the distributed optimizers of all frameworks share."""

import ast
import re
import types
from pathlib import Path

import numpy as np
import pytest

import ringreduce
from ringreduce import Adasum, Average, Compression, InputError, Max, Sum
from ringreduce.optim import reducer
from ringreduce.optim.exchange import Exchange, check_passes
from ringreduce.optim.parameters import group_parameters, name_parameters
from ringreduce.optim.powersgd import PowerSGD
from tests.support.loops import in_a_loop
from tests.support.sources import parsed

PARAMETERS = [np.full((number + 1, 2), number) for number in range(5)]
NAMED = [(f"layer{number}.w", parameter) for number, parameter in enumerate(PARAMETERS)]


def test_no_framework_is_named():
    """But in what users read of PowerSGD and of local steps."""
    frameworks = re.compile("torch|jax|optax|flax|keras|tensorflow|cupy|mxnet", re.IGNORECASE)
    folder = Path(ringreduce.__file__).parent / "optim"
    told = {folder / "powersgd.py", *(folder / "local").glob("*.py")}
    for path in folder.rglob("*.py"):
        assert path in told or not frameworks.search(path.read_text()), path
        tree = parsed(path)
        fields = [
            value for node in ast.walk(tree) if not isinstance(node, ast.Constant) for value in vars(node).values()
        ]
        assert not [each for each in fields if isinstance(each, str) and frameworks.search(each)], path


def same(pairs, expected):
    """The same names, and the very same parameters."""
    return [(name, id(each)) for name, each in pairs] == [(name, id(each)) for name, each in expected]


def test_parameters_are_named_or_numbered():
    (numbered, none), numbers = name_parameters([PARAMETERS[1:2], PARAMETERS[2:3]], None), PARAMETERS[1:3]
    assert same(numbered, [("parameter.0", numbers[0]), ("parameter.1", numbers[1])])
    assert none == []
    assert name_parameters([PARAMETERS[:2]], enumerate(PARAMETERS[:2]))[0] == list(zip("01", PARAMETERS, strict=False))
    owned, others = name_parameters([PARAMETERS[3:1:-1], PARAMETERS[1:2]], iter(NAMED))
    assert same(owned, NAMED[1:4])
    assert same(others, [NAMED[0], NAMED[4]])


@in_a_loop(
    ("named", "message"),
    [
        (PARAMETERS, r"expected \(name, parameter\) pairs"),
        ([("b", PARAMETERS[0]), ("a", PARAMETERS[1]), ("b", PARAMETERS[2])], "names must differ; given .* once: b$"),
        (
            [*NAMED[1:4]],
            r"2 of the optimizer's 5 parameters have no names in it: param_groups\[0\]\['params'\]\[0\] of shape "
            r"\(1, 2\), param_groups\[1\]\['params'\]\[1\] of shape \(5, 2\); pass the names of all parameters",
        ),
        (NAMED[1:], r"1 of the optimizer's 5 parameters has no name in it: param_groups\[0\]\['params'\]\[0\] of"),
        (NAMED[:0], r"5 of the optimizer's 5 .*, param_groups\[1\]\['params'\]\[1\] of shape \(5, 2\); pass"),
    ],
)
def test_wrong_names_are_refused(named, message):
    with pytest.raises(InputError, match=message):
        name_parameters([PARAMETERS[:3], PARAMETERS[3:]], named)


@in_a_loop(
    ("groups", "sizes"),
    [
        (None, []),
        (0, []),
        (1, [5]),
        (2, [2, 3]),
        (np.int64(2), [2, 3]),
        (3, [1, 2, 2]),
        (9, [1] * 5),
        ([PARAMETERS[3:], PARAMETERS[:1]], [2, 1]),
    ],
)
def test_groups_are_a_number_or_lists(groups, sizes):
    grouped = group_parameters(NAMED, groups)
    assert [len(each) for each in grouped] == sizes
    if isinstance(groups, int) and groups:
        assert [id(each) for group in grouped for each in group] == [id(each) for each in PARAMETERS]


@in_a_loop(
    ("groups", "message"),
    [
        (-1, "groups=-1; expected a number of 0 or more, or lists"),
        ([PARAMETERS[0]], "expected a number of 0 or more, or lists of parameters"),
        ([["w"]], "groups: a str; expected lists of parameters"),
        ([[np.zeros(3)]], r"a tensor of shape \(3,\) is not a parameter of the optimizer"),
        ([PARAMETERS[:2], PARAMETERS[1:]], r"a parameter of shape \(2, 2\) is in two places"),
    ],
)
def test_wrong_groups_are_refused(groups, message):
    with pytest.raises(InputError, match=message):
        group_parameters(NAMED, groups)


@in_a_loop(
    ("options", "message"),
    [
        ({"op": Max}, "op=Max; expected Average, Sum or Adasum"),
        ({"op": "mean"}, "op='mean'; expected Average"),
        ({"op": Adasum, "compression": Compression.int8}, "op=Adasum with compression=Compression.int8; expected an"),
        ({"op": Sum, "gradient_predivide_factor": 2.0}, "factor=2.0 with op=Sum; it works with op=Average only"),
        ({"gradient_predivide_factor": 0.0}, "factor=0.0; expected a number above 0"),
        ({"compression": PowerSGD()}, "keeps what it has not sent for the next step"),
        ({"op": Adasum, "compression": PowerSGD(), "factors": True}, "with op=Adasum; it works with Average and Sum"),
        (
            {"compression": "fp16"},
            "compression='fp16'; expected Compression.none, .fp16, .bf16, .int8, .int4, PowerSGD",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Exchange(**options)


def test_options_are_arguments_of_an_allreduce():
    exchange = Exchange(Average, Compression.fp16, 4.0)
    assert exchange.arguments == {
        "op": Average,
        "compression": Compression.fp16,
        "prescale_factor": 0.25,
        "postscale_factor": 4.0,
        "process_set": ringreduce.global_process_set,
    }
    assert Exchange(Adasum).arguments["prescale_factor"] == Exchange(Max, any_op=True).scales[1] == 1.0


@pytest.mark.parametrize("value", [0.1, np.float64(0.1), np.full(3, 0.1, np.float32)])
def test_floats_are_compressed_and_come_back(value):
    for compression, kind in ((Compression.fp16, "float16"), (Compression.bf16, "bfloat16")):
        sent, context = compression.compress(value)
        assert sent.dtype.name == kind
        back = compression.decompress(sent, context)
        assert back.dtype == np.asarray(value).dtype
        assert 0 < np.abs(back - 0.1).max() < 1e-3


@in_a_loop("value", [3, True, 1j, np.int16(3), np.arange(3), np.full(3, 1j)])
def test_what_is_no_float_is_not_compressed(value):
    sent, context = Compression.fp16.compress(value)
    assert sent is value
    assert Compression.fp16.decompress(sent, context) is value


def test_at_least_one_pass():
    assert check_passes(3) == check_passes(np.int64(3)) == 3
    for wrong in (0, 2.5, "2"):
        with pytest.raises(InputError, match=f"backward_passes_per_step={wrong!r}; expected a whole number of 1 or m"):
            check_passes(wrong)


def test_a_layout_that_has_come_is_seen_soon_though_an_earlier_one_is_waited_for():
    """Another rank may wait for this one's gradients of it, and has nothing else to do."""

    class Layout:
        ended = False

        def ended_within(self, seconds):
            waited.append(seconds)
            layouts[1].ended = True

    waited, layouts = [], [Layout(), Layout()]
    buckets = [types.SimpleNamespace(trained=[types.SimpleNamespace(layout_handle=each)]) for each in layouts]
    assert next(reducer._as_agreed(buckets)) is buckets[1]
    assert sum(waited) < 0.1
