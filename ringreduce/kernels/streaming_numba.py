"""A copy by streaming stores with numba, which bypass this core's caches, into lines that another core may hold.

Imported by copying.py when plain stores prove slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.kernels.jit import compiled, extending, ir, numba

WORD = 8


@extending.intrinsic  # type: ignore[untyped-decorator]
def _store(typing: Any, array: Any, index: Any, word: Any) -> Any:
    """array[index] = word, by a streaming store; `array` is contiguous and aligned."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        store = builder.store(arguments[2], builder.gep(memory, [arguments[1]]), align=WORD)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return numba.void(array, numba.intp, array.dtype), build


@extending.intrinsic  # type: ignore[untyped-decorator]
def _fence(typing: Any) -> Any:
    """Streaming stores are weakly ordered: a core that sees a later write sees them too."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), build


@compiled
def _copy_words(source: Any, target: Any) -> None:
    for i in range(len(target)):
        _store(target, i, source[i])
    _fence()


def copy(source: Any, target: Any) -> None:
    """Copy 1-D contiguous elements; first and last bytes that fill no whole word of the target by plain stores."""
    source, target = source.view(np.uint8), target.view(np.uint8)
    head = min(-target.ctypes.data % WORD, target.size)
    tail = head + (target.size - head) // WORD * WORD
    target[:head], target[tail:] = source[:head], source[tail:]
    _copy_words(source[head:tail].view(np.int64), target[head:tail].view(np.int64))


def compile_kernels() -> None:
    """Compile for arrays of both alignments that a source may have."""
    for shift in range(2):
        memory = np.zeros(32, np.uint8)
        copy(memory[shift : shift + 8], memory[16:24])
