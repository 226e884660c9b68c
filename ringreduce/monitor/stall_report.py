"""The words of stall reports: who is behind, which operations wait, and what ranks do instead."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

from ringreduce.execution.frames import current_frames
from ringreduce.execution.signature import PACKAGE, ranks_text, tensor_text
from ringreduce.monitor import launcher_link
from ringreduce.negotiation.coordinator import Waiting
from ringreduce.negotiation.protocol import StackReply
from ringreduce.settings import Settings
from ringreduce.settings.log import LOGGER

NAMED = 3  # how many operations, tensors and lines a text names; of others it states the number
SILENT = "it is stopped, or in C code that holds the GIL"


def warn(settings: Settings, text: str, full: str = "") -> None:
    """Report `text` to ringrun, which adds the stacks of all ranks; without ringrun log the full text."""
    if not launcher_link.report(settings.error_file, stalled=text):
        LOGGER.warning(f"stalled: {full or text}")


def stack_of(thread: int) -> str:
    """The Python stack of a thread, down to the line that called this package."""
    frame = current_frames().get(thread)
    if frame is None:
        return "its main thread has ended\n"
    frames = list(traceback.extract_stack(frame))
    while len(frames) > 1 and frames[-1].filename.startswith(PACKAGE):
        frames.pop()
    return "".join(traceback.format_list(frames))


def named(texts: Sequence[str], comma: str = "") -> str:
    """The first of them, and how many more there are."""
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f"{comma} and {more} more" if more > 0 else "")


def headline(waiting: Sequence[Waiting], now: float) -> str:
    """Who is behind, as far as it is known; which tensors wait, for how long, who has submitted them, and who has not.

    Tensors that the same ranks have submitted in the same lines are one sentence.
    """
    groups: dict[tuple[object, ...], list[Waiting]] = {}
    for each in waiting:
        groups.setdefault((each.signature.kind, *each.submitted.items(), *each.missing), []).append(each)
    lines = [_sentence(each, now) for each in list(groups.values())[:NAMED]]
    others = sum(map(len, list(groups.values())[NAMED:]))
    lines += [f"and {others} more, of other ranks or lines"] if others else []
    lines[-1] += f". All ranks must submit {'them' if waiting[1:] else 'it'}"
    if behind := _behind(waiting):
        lines.insert(0 if len(groups) > 1 else 1, behind)
    return "\n".join(lines)


def _sentence(waiting: Sequence[Waiting], now: float) -> str:
    """Of tensors that wait for the same ranks."""
    first = waiting[0]
    shapes = ", ".join(map(tensor_text, first.signature.tensors[:NAMED]))
    text = first.signature.text + (f" ({shapes})" if shapes else "")
    if len(waiting) > 1:
        names = ", ".join(each.signature.text.removeprefix(f"{first.signature.kind} ") for each in waiting[1:NAMED])
        more = len(waiting) - NAMED
        text += f", and {names}" + (f" and {more} more" if more > 0 else "")
    by_line: dict[str, list[int]] = {}
    for rank, line in sorted(first.submitted.items()):
        by_line.setdefault(line, []).append(rank)
    submitted = [f"{ranks_text(ranks)} ({line})" for line, ranks in list(by_line.items())[:NAMED]]
    others = f" and in {len(by_line) - NAMED} more lines" if len(by_line) > NAMED else ""
    return (
        f"{text}: waiting for {now - first.since_s:.0f} s; submitted by {', '.join(submitted)}{others}; "
        f"missing: {ranks_text(first.missing)}"
    )


def _behind(waiting: Sequence[Waiting]) -> str:
    """How many steps ranks have taken, where that is known: all had reduced a tensor that waits equally often."""
    newest = max(waiting, key=lambda each: each.step)
    same = [
        each
        for each in waiting
        if (each.signature.unnumbered, each.missing) == (newest.signature.unnumbered, newest.missing)
    ]
    newest = min(same, key=lambda each: each.step)  # of unnamed tensors several may wait
    if newest.step < 1:
        return ""
    own, late, number = list(newest.submitted), newest.missing, newest.step
    text = (
        f"{ranks_text(late)} took {number} step{'s' * (number > 1)}, {ranks_text(own)} {'are' if own[1:] else 'is'} in "
        f"{'their' if own[1:] else 'its'} {ordinal(number + 1)} ({newest.signature.text})"
    )
    elsewhere = [each for each in waiting if not each.submitted.keys().isdisjoint(late)]
    if any(each.step == number - 1 for each in elsewhere):  # which the others have left
        return text + ": is a parameter frozen (requires_grad=False) on some ranks only?"
    return text + (": do all ranks have the same number of batches?" if elsewhere else "")


def ordinal(number: int) -> str:
    """Such as 1st, 12th, 22nd."""
    teen = 10 <= number % 100 < 20
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def report(text: str, queried: Sequence[int], replies: Mapping[int, StackReply], *, stacks: bool = True) -> str:
    """The headline, and each rank's reply, with or without its stack."""
    parts = [text]
    for rank in queried:
        reply = replies.get(rank)
        if reply is None:
            parts.append(f"rank {rank} does not answer: {SILENT}")
        else:
            parts.append(f"rank {rank} {reply.doing}" + (f"; it is here:\n{reply.stack.rstrip()}" if stacks else ""))
    return "\n".join(parts)
