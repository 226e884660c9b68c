"""Gradient shapes of real models, in the order of their parameters; backward delivers them from last to first.

resnet50    161 tensors, 25.6 M elements, 102 MB in float32: most are tiny, most bytes are in few
gpt2        148 tensors, 124 M elements, 498 MB in float32: GPT-2 small, one embedding of 154 MB
tiny        20 tensors, 1.1 MB: for `--quick`
"""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """He et al., 2015: convolutions, each with a batch norm's weight and bias, and one linear layer."""

    def convolution(out: int, into: int, kernel: int) -> list[Shape]:
        return [(out, into, kernel, kernel), (out,), (out,)]

    shapes, channels = convolution(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, channels, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, channels, 1)  # the shortcut changes shape too
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2() -> list[Shape]:
    """Radford et al., 2019, the small one: embeddings, 12 transformer blocks, a final norm."""
    width, vocabulary, context, depth = 768, 50257, 1024, 12
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (context, width)] + depth * (norm + attention + norm + mlp) + norm


def tiny() -> list[Shape]:
    """A little of everything."""
    return [(1000, 64), *(9 * [(128, 128), (128,)]), (1000, 64)]


MODELS = {"resnet50": resnet50, "gpt2": gpt2, "tiny": tiny}
