"""Numbers, names and tables as people read them. Pure functions."""

from collections.abc import Collection, Iterable, Iterator, Sequence

EMPTY = "it is empty, as a variable that is not set"
"""What a message says of an empty word, which a shell makes of "$NAME"."""


def shortened(text: str, most: int) -> str:
    """Return `text` in at most `most` characters.

    >>> shortened("python train.py", 9)
    'python t…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def in_one_line(text: str) -> str:
    """Return `text` with an escape for each character that a terminal would not show, such as a line's end.

    >>> in_one_line("one\\ntwo")
    'one\\\\ntwo'
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def quoted(text: str, most: int = 80) -> str:
    """Return what a user has written, for a message: in quotes, and not longer than a line."""
    return repr(shortened(text, most))


def close_matches(word: str, known: Sequence[str], alike: float = 0.6) -> list[str]:
    """Return the word of `known` that somebody may have meant by `word`, if any is as much like it."""
    import difflib  # for who has made a mistake

    return difflib.get_close_matches(word, known, 1, alike)


def counted(count: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def was(many: Collection[object]) -> str:
    """Return the verb for what `numbered` has named."""
    return "was" if len(many) == 1 else "were"


def duration(seconds: float) -> str:
    """Return a time in two units at most: `0.3 s`, `12 s`, `2 min 5 s`, `3 h 20 min`, `2 d 4 h`.

    >>> [duration(s) for s in (0.31, 12.4, 125, 12000, 187200)]
    ['0.3 s', '12 s', '2 min 5 s', '3 h 20 min', '2 d 4 h']
    """
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    for large, large_s, small, small_s in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        whole = round(seconds / small_s) * small_s
        if whole >= large_s:
            return f"{whole // large_s} {large} {whole % large_s // small_s} {small}"
    return f"{seconds:.0f} s"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the names; of many the first, and how many there are beside.

    >>> listed(["n1", "n2", "n3", "n4"], 2)
    'n1, n2, and 2 more'
    """
    return ", ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its columns aligned, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def spans(numbers: Iterable[int]) -> Iterator[str]:
    """Return the items of `format_spans`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def format_spans(numbers: Iterable[int]) -> str:
    """Return the shortest text that names `numbers`, in order: of ranks, CPUs or GPUs.

    >>> format_spans({7, 0, 1, 2, 3}), format_spans([4, 5]), format_spans([9])
    ('0-3,7', '4-5', '9')
    """
    return ",".join(spans(numbers))


def split_ranks(ranks: Iterable[int], max_characters: int) -> list[str]:
    """Return texts that together name `ranks`, in order, each of at most `max_characters` or of a single item.

    >>> split_ranks([0, 2, 4, 6, 8], 5)
    ['0,2,4', '6,8']
    """
    texts: list[str] = []
    for item in spans(ranks):
        if texts and len(texts[-1]) + 1 + len(item) <= max_characters:
            texts[-1] += f",{item}"
        else:
            texts.append(item)
    return texts


def numbered(noun: str, numbers: Collection[int]) -> str:
    """Return `rank 3` or `ranks 0,2-3`."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {format_spans(numbers)}"
