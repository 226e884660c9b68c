"""Numbers as people and Linux write many of them: `0-3,7`. For ranks, CPUs and GPUs."""

from collections.abc import Collection, Iterable, Iterator


def format_spans(numbers: Iterable[int]) -> str:
    """Return the shortest text that names `numbers`, in order.

    >>> format_spans({7, 0, 1, 2, 3}), format_spans([4, 5]), format_spans([9])
    ('0-3,7', '4-5', '9')
    """
    return ",".join(spans(numbers))


def spans(numbers: Iterable[int]) -> Iterator[str]:
    """Return the items of that text."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def named_ranks(ranks: Collection[int]) -> str:
    """Return `rank 3` or `ranks 0,2-3`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {format_spans(ranks)}"
