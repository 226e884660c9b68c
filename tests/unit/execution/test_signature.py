"""Descriptions: their keys, and how two ranks' differ, in words."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import ringreduce
from ringreduce.arrays.view import as_buffer
from ringreduce.execution import signature
from tests.support.loops import in_a_loop


def tensor(name="w", dtype="float32", shape=(3,), device="cpu"):
    return signature.TensorSignature(name, dtype, shape, device)


def reduction(*tensors, op="Sum", prescale=1.0, name="w"):
    return signature.Signature("allreduce", name, tensors or (tensor(),), (("op", op), ("prescale_factor", prescale)))


def explained(*signatures, size=4):
    return signature.mismatch_message(
        {rank: signature.SubmissionRecord(each, f"train.py:{rank}") for rank, each in enumerate(signatures)}, size
    )


def test_the_key_is_the_operation_and_the_name_or_the_number():
    assert signature.Signature("allgather", "layer.w").key == "allgather.layer.w"
    assert signature.Signature("allgather", "unnamed.3", numbered=True).key == "unnamed.3"
    assert reduction(op="Max").detail("op") == "Max"


def test_a_mismatch_of_unnamed_tensors_says_that_they_are_numbered():
    one, other = (reduction(tensor(shape=(n,)), name="unnamed.3")._replace(numbered=True) for n in (1, 2))
    assert explained(one, other).endswith(
        "all ranks must pass equal shapes; unnamed tensors are numbered in order, so an extra call on a rank shifts "
        "all later ones: pass name="
    )
    assert "numbered" not in explained(reduction(), reduction(op="Max"))


DIFFERENCES = {
    "'w' (train.py:1): float32[4, 2], but rank 0 has float32[3] (tra": reduction(tensor(shape=(4, 2))),
    "int8[3], but rank 0 has float32[3] (train.py:0); all ranks must": reduction(tensor(dtype="int8")),
    "a tensor on cuda, but rank 0 has one on cpu": reduction(tensor(device="cuda")),
    "op=Max, but rank 0 has op=Sum (train.py:0); all ranks must pass the same op": reduction(op="Max"),
    "prescale_factor=0.5, but rank 0 has prescale_factor=1.0": reduction(prescale=0.5),
    "'w' (train.py:1): 2 tensors, 'v' among them, but rank 0 has 1 (train.py:0); all": reduction(tensor(), tensor("v")),
    "'w.1' (train.py:1): name 'w.1', but rank 0 has name 'w'": reduction(tensor("w.1")),
    "rank 1 of 4, barrier 'w' (train.py:1): barrier 'w', but rank 0 has allreduce 'w' (train.py:0); all ranks must "
    "call the same operation": signature.Signature("barrier", "w"),
}


@in_a_loop("message", DIFFERENCES)
def test_the_first_difference_is_told(message):
    assert message in explained(reduction(), DIFFERENCES[message])


def test_of_a_group_the_tensor_that_differs_is_told():
    of_two, second_is_a_number = (reduction(tensor("w.0"), tensor("w.1", shape=shape)) for shape in ((3,), ()))
    message = "allreduce 'w', tensor 2 of 2 (train.py:1): float32[], but rank 0 has float32[3]"
    assert message in explained(of_two, second_is_a_number)


def test_the_first_that_differs_is_told_and_the_others_are_counted():
    text = explained(reduction(), reduction(), reduction(op="Min"), reduction(op="Max"))
    assert text.startswith("rank 2 of 4, allreduce 'w' (train.py:2): op=Min, but rank 0 has op=Sum (train.py:0)")
    assert text.endswith("the same op (ranks 2-3 differ from rank 0)")


def test_the_lowest_rank_that_gave_it_is_the_measure():
    records = {
        3: signature.SubmissionRecord(reduction(), "a.py:3"),
        1: signature.SubmissionRecord(reduction(op="Min"), "a.py:1"),
    }
    assert signature.mismatch_message(records, 4).startswith(
        "rank 3 of 4, allreduce 'w' (a.py:3): op=Sum, but rank 1 has op=Min (a.py:1)"
    )


def test_a_buffer_is_described_by_its_type_shape_and_kind_of_device(cupy):
    assert signature.sign(as_buffer(np.zeros((2, 3), np.int8)), "w") == tensor(dtype="int8", shape=(2, 3))
    assert signature.sign(as_buffer(np.zeros((2, 3))), "w", (3,)) == tensor(dtype="float64", shape=(3,))
    assert signature.sign(as_buffer(cupy.asarray(np.zeros(3, np.float32))), "w").device == "cuda"


def test_how_a_signature_is_worded():
    assert signature.tensor_text(tensor(dtype="bool", shape=())) == "bool[]"
    assert list(signature.names_of("g", None, 1)) == ["g"]
    assert list(signature.names_of("g", None, 2)) == ["g.0", "g.1"]
    assert list(signature.names_of("g", ["a", "b"], 2)) == ["a", "b"]
    assert list(signature.names_of("g", None, 0)) == []


def test_the_calling_line_is_that_of_each_call():
    here = sys._getframe().f_lineno
    lines = [
        signature.calling_line(),
        signature.calling_line(),
    ]
    assert lines == [f"test_signature.py:{here + 2}", f"test_signature.py:{here + 3}"]


def through(path, called=None):
    """A function of a file that calls another one, in its second line."""
    names = {"called": called or signature.calling_line}
    exec(compile("def call():\n    return called()", path, "exec"), names)
    return names["call"]


INSTALLED = os.path.dirname(os.path.dirname(torch.__file__))  # site-packages
LIBRARIES = {
    "this one": os.path.join(os.path.dirname(ringreduce.__file__), "module.py"),
    "torch": os.path.join(os.path.dirname(torch.__file__), "some", "module.py"),
    "an installed one": os.path.join(INSTALLED, "typing_extensions.py"),
    "Debian's": "/usr/lib/python3/dist-packages/wrapt/wrappers.py",
    "Python's": os.path.join(os.path.dirname(os.__file__), "functools.py"),
    "what a library has made": "<decorator-gen-7>",
    "what starts a package": os.path.join(sys.prefix, "bin", "train"),
}


@in_a_loop("path", LIBRARIES.values())
def test_the_calling_line_is_outside_the_libraries(path):
    assert through(path)() == f"test_signature.py:{sys._getframe().f_lineno}"
    assert through(LIBRARIES["this one"], through(path, through(path)))().startswith("test_signature.py:")


@in_a_loop("path", ["<stdin>", "<ipython-input-3-1f>", "/tmp/ipykernel_7/12.py", "/home/me/torchvision/x.py"])
def test_what_a_user_types_is_no_library(path):
    assert through(LIBRARIES["an installed one"], through(path))() == f"{os.path.basename(path)}:2"


def test_where_no_line_is_the_users_it_is_the_outermost_packages_or_a_threads_name():
    own, others = (os.path.join(INSTALLED, each) for each in ("mine/train.py", "lightning/loop.py"))
    started = through(LIBRARIES["what starts a package"], through(own, through(others, through(LIBRARIES["torch"]))))
    with ThreadPoolExecutor(1, "loader") as pool:  # where no test's line is on the stack
        assert pool.submit(started).result() == "train.py:2"
        assert pool.submit(through(LIBRARIES["torch"])).result() == "thread:loader_0"
        within = signature.called_from("jit.f.py:17")
        pool.submit(within.__enter__).result()
        assert pool.submit(signature.calling_line).result() == "jit.f.py:17"
        pool.submit(within.__exit__, None, None, None).result()


@in_a_loop(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([7, 0, 2, 3, 4], "ranks 0,2-4,7"), (range(512), "ranks 0-511")],
)
def test_ranks_are_named_as_spans(ranks, text):
    assert signature.ranks_text(ranks) == text
