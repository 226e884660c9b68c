import numpy as np
import pytest
import torch

from ringreduce.arrays.buffer import message_bytes
from ringreduce.arrays.dtypes import TABLE
from ringreduce.arrays.view import as_buffer, takes, to_write
from ringreduce.errors import MissingExtraError, UnsupportedArrayError
from tests.support.loops import in_a_loop
from tests.support.reference import Exporter, data

SHAPES = [(), (0,), (7,), (2, 3), (2, 0, 3), (2, 3, 4)]


def numpy_array(name, shape):
    return data(name, int(np.prod(shape)), rank=1).reshape(shape)


def torch_tensor(name, shape):
    array = numpy_array(name, shape)
    if name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


@in_a_loop("shape", SHAPES)
@in_a_loop("name", TABLE)
@in_a_loop("make", [numpy_array, torch_tensor])
def test_a_buffer_is_a_flat_view_of_the_same_memory(make, name, shape):
    array = make(name, shape)
    buffer = as_buffer(array, writable=True)
    assert (buffer.element.name, buffer.shape, buffer.device) == (name, shape, "cpu")
    assert buffer.flat.shape == (int(np.prod(shape)),)
    assert buffer.nbytes == buffer.count * buffer.element.itemsize
    buffer.flat[...] = 0
    assert not array.any()


@in_a_loop("name", TABLE)
@in_a_loop("make", [numpy_array, torch_tensor])
def test_an_array_is_rebuilt_with_its_kind_type_and_elements(make, name):
    array = make(name, (2, 3))
    source = as_buffer(array)
    made = source.empty(source.shape)
    made.flat[...] = source.flat
    rebuilt = made.array()
    assert type(rebuilt) is type(array)
    assert rebuilt.dtype == array.dtype
    assert rebuilt.shape == array.shape
    assert (rebuilt == array).all()
    reshaped = source.empty((2, 2)).array()
    assert (type(reshaped), reshaped.dtype, tuple(reshaped.shape)) == (type(array), array.dtype, (2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_leaf_is_viewed_without_its_history(dtype):
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    as_buffer(parameter, writable=True).flat[...] = 0
    assert parameter.tolist() == [0, 0, 0]


@in_a_loop("value", [3, 2.5, True, 1j, np.float32(7)])
def test_numbers_are_0d_arrays(value):
    buffer = as_buffer(value)
    assert (buffer.shape, buffer.flat[0]) == ((), value)
    with pytest.raises(UnsupportedArrayError, match="cannot be changed in place; pass an array"):
        as_buffer(value, writable=True)


def test_dlpack_arrays_are_viewed():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = as_buffer(Exporter(array))
    assert np.shares_memory(buffer.flat, array)
    assert buffer.shape == (2, 3)


class Frame:
    """Such as pandas' and xarray's."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros(2)


REFUSED = [
    ([1, 2], r"a list is not an array; pass numpy.array\(...\) of numbers, or a list of arrays to allreduce"),
    ({"loss": 1.0}, r"a dict is not an array; pass its arrays one by one"),
    (
        print,
        "a builtin_function_or_method is not an array; expected a NumPy, CuPy or torch array, or an object with __dlp",
    ),
    (np.ma.masked_array([1.0, 2.0], [False, True]), r"a masked array would lose its mask; pass array.filled\(value\)"),
    (torch.zeros(2, 3).to_sparse(), "layout torch.sparse_coo is not dense"),
    (torch.zeros(2, 3, dtype=torch.bfloat16).to_sparse(), "layout torch.sparse_coo is not dense"),
    (torch.zeros(2, device="meta"), "a tensor on meta cannot be communicated; move it to cpu or cuda"),
    (np.array(["a"], object), "elements of type object have no fixed size; pass numbers"),
    (None, "^None is not an array; leave it out on all ranks, or pass zeros of the shape"),
    ("val", "^a str is not an array; for text use broadcast_object; if it is a key of a dict of arrays, pass"),
    (Frame(), r"^a .*Frame is not an array; pass the numbers in it: numpy.asarray\(...\)"),
]


@in_a_loop(("array", "message"), REFUSED)
def test_what_cannot_travel_is_refused(array, message):
    with pytest.raises(UnsupportedArrayError, match=message):
        as_buffer(array)


def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)  # imports half of torch
    with pytest.raises(UnsupportedArrayError, match=r"layout torch\.jagged is not dense"):
        as_buffer(nested)


VIEWS = [torch.tensor([1 + 2j, -3j]).conj(), torch.tensor([1 + 2j, -3j]).conj().imag]


@pytest.mark.parametrize("view", VIEWS, ids=["conjugated", "negated"])
def test_views_whose_memory_holds_other_values_are_copied_to_be_read_and_written_back(view):
    assert as_buffer(view).array().tolist() == view.tolist()
    with pytest.raises(UnsupportedArrayError, match=r"conjugated or negated .*; pass tensor.resolve_conj\(\)"):
        as_buffer(view, writable=True)
    expected = (view * 2j).tolist() if view.is_complex() else (view * 2).tolist()
    (buffer,), back = to_write([view])
    buffer.flat[:] *= 2j if view.is_complex() else 2
    assert view.tolist() != expected
    back()
    assert view.tolist() == expected


def test_a_container_of_an_array_is_no_array():
    """Such as flax's Variable: it would come back as a bare array."""

    class Variable:
        def __getattr__(self, name):
            return getattr(np.zeros(2), name)

    with pytest.raises(UnsupportedArrayError, match="Variable is not an array"):
        as_buffer(Variable())


LAYOUTS = {
    "a column": lambda: np.arange(16.0).reshape(4, 4)[:, 1],
    "Fortran's": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "backwards": lambda: np.arange(6.0)[::-1],
    "torch": lambda: torch.arange(6.0).reshape(2, 3).T,
    "bfloat16": lambda: torch.arange(6).bfloat16().reshape(2, 3).T,
}


@in_a_loop("layout", LAYOUTS)
def test_other_memory_layouts_are_copied_to_be_read_and_written_back(layout):
    array = LAYOUTS[layout]()
    buffer = as_buffer(array)
    assert buffer.shape == tuple(array.shape)
    assert buffer.array().tolist() == array.tolist()
    expected = (array * 2).tolist()
    (buffer,), written = to_write([array])
    buffer.array()[...] = array * 2
    written()
    assert array.tolist() == expected
    array[...] = -1  # the caller's again
    written()
    assert (array == -1).all()


def test_a_view_that_cannot_be_written_back_is_refused():
    with pytest.raises(
        UnsupportedArrayError, match=r"shape \(2,\) and strides \(16,\) is not C-contiguous; pass a cont"
    ):
        to_write([Exporter(np.zeros(4)[::2])])
    with pytest.raises(UnsupportedArrayError, match="a read-only array cannot be changed in place"):
        to_write([np.broadcast_to(np.zeros(1), (3,))])


def test_read_only_memory_is_not_written_to():
    array = np.zeros(3)
    array.flags.writeable = False
    as_buffer(array)
    with pytest.raises(UnsupportedArrayError, match="a read-only array cannot be changed in place; pass a copy"):
        as_buffer(array, writable=True)
    with pytest.raises(
        UnsupportedArrayError, match=r"Exporter cannot be changed in place; use .*, or broadcast_object"
    ):
        as_buffer(Exporter(array), writable=True)


class OnGpu(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda:0")


@pytest.mark.parametrize(
    "array",
    [
        type("GpuArray", (), {"__cuda_array_interface__": {}})(),
        *(torch.zeros(3, dtype=dtype).as_subclass(OnGpu) for dtype in (torch.float32, torch.bfloat16)),
    ],
    ids=lambda array: type(array).__name__,
)
def test_gpu_memory_without_cupy_names_the_extra(array):
    with pytest.raises(MissingExtraError, match=r"GPU arrays need CuPy; .*pip install 'cupy-cuda12x\[ctk\]'"):
        as_buffer(array)


def test_gpu_memory_is_never_read_but_by_ordered_copies(cupy):
    buffer = as_buffer(cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert (buffer.device, buffer.shape) == ("cuda:0", (2, 3))
    memory = message_bytes(buffer.flat)
    assert (memory.data.ptr, memory.nbytes, memory.dtype) == (buffer.pointer, 24, np.uint8)


def of_its_memory(array):
    return np.frombuffer(memoryview(array))


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (lambda whole: whole[:4], lambda whole: whole[4:], True),
        (lambda whole: whole[:4], lambda whole: whole[3:7], False),
        (lambda whole: whole, lambda whole: whole[4:], False),
        (lambda whole: whole[4:], lambda whole: whole, False),
        (lambda whole: whole, lambda whole: whole, False),
        (lambda whole: whole, of_its_memory, False),
        (lambda whole: of_its_memory(whole)[:4], lambda whole: whole[2:], False),
        (lambda whole: whole[::2], lambda _: np.ones((2, 4))[1], True),
        (lambda whole: whole, lambda _: np.ones(4), True),
    ],
)
def test_a_target_is_apart_from_the_source(own, other, expected):
    whole = np.ones(8)
    target, source = own(whole), other(whole)
    assert takes(target, source, target.shape) is expected
