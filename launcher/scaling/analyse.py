"""What the runs of a script say: how much faster more ranks are, what limits them, and how many pay. Pure functions.

Ratios are taken within a round, of runs that follow each other, so that a machine that becomes slower changes none.
What a step of so many ranks should take is what it takes with the fewest ranks, for as many examples; what it takes
longer is the price of more ranks, and its largest part is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..text import columns, counted
from .measure import Run

_EQUAL = 0.05  # as much may batches differ that count as equal
_LEAST_GAIN = 0.05  # with less, more ranks do not pay off
_MUCH = 0.1  # of a step: what takes less is no limit
_IMPOSSIBLE = 1.2  # times the number of ranks: no speed-up that ranks give
_MOST_ADVICE = 3
_LOCAL_STEPS = 8
_CORES = "all ranks wait for a CPU core"  # how the run report's advice begins, in whose place is ours

UNKNOWN, PER_RANK, GLOBAL, OTHER = "unknown", "batch per rank", "global batch", "neither"
"""What the runs have held equal."""


def figure(number: float) -> str:
    """Return a number with three digits, or all of those before the point.

    >>> figure(1284.6), figure(1.837), figure(0.02)
    ('1,285', '1.84', '0.02')
    """
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


@dataclass(frozen=True)
class Range:
    """A figure of several rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Range:
        """Return the median, and the least and the most."""
        return cls(median(numbers), min(numbers), max(numbers))

    def text(self, scale: float = 1.0) -> str:
        """Return `1.84 (1.8–1.9)`; without the range where it is none."""
        low, middle, high = (figure(scale * each) for each in (self.low, self.middle, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True)
class Size:
    """What all runs with so many ranks say."""

    size: int
    runs: Sequence[Run] = ()
    problem: str = ""
    """Why there are none."""
    speed_up: Range | None = None
    """Of examples a second, against the fewest ranks; None where examples are not known."""
    steps_ratio: Range | None = None
    """Of steps a second."""
    limit: str = ""
    """What takes longer than with the fewest ranks, most of all."""
    limit_ms: float = 0.0
    step_ms: float = 0.0

    @property
    def limited_by(self) -> str:
        """The limit as the table shows it."""
        return f"{self.limit}: {figure(self.limit_ms)} of {figure(self.step_ms)} ms" if self.limit_ms else self.limit


@dataclass(frozen=True)
class Answer:
    """What all runs of a script say."""

    sizes: Sequence[Size]
    held: str = UNKNOWN
    best: int = 0
    """How many ranks pay off; 0: unknown."""
    sentence: str = ""
    notes: Sequence[str] = ()
    advice: Sequence[str] = ()

    @property
    def measured(self) -> Sequence[Size]:
        """Those with figures; the first one is what the others are compared with."""
        return [each for each in self.sizes if each.runs]


def analyse(rounds: Sequence[Mapping[int, Run]], cores: float) -> Answer:
    """Return what `rounds` say, runs by the number of ranks; `cores`: see Plan."""
    sizes = sorted({size for each in rounds for size in each})
    runs = {size: [each[size] for each in rounds if size in each and not each[size].problem] for size in sizes}
    measured = [size for size in sizes if runs[size]]
    if not measured:
        problems = [_problem(rounds, size) for size in sizes]
        return Answer([Size(size, problem=_problem(rounds, size)) for size in sizes], sentence=_nothing(problems))
    base, held = measured[0], _held([(size, _examples(runs[size])) for size in measured])
    found = [
        _size(size, runs[size], runs[base], rounds, cores) if runs[size] else Size(size, problem=_problem(rounds, size))
        for size in sizes
    ]
    answer = Answer(found, held)
    sentence = _too_busy(answer.measured)
    if not sentence:
        answer = replace(answer, best=_best(answer.measured) if held != UNKNOWN else 0)
        sentence = _sentence(answer)
    answer = replace(answer, sentence=sentence)
    return replace(answer, notes=_notes(answer, rounds), advice=_advice(answer, cores))


def _problem(rounds: Sequence[Mapping[int, Run]], size: int) -> str:
    return next((each[size].problem for each in rounds if size in each and each[size].problem), "was not run")


def _nothing(problems: Sequence[str]) -> str:
    """Return the sentence without any figures."""
    return f"nothing could be measured: {problems[0]}" if problems else "nothing was measured"


def _examples(runs: Sequence[Run]) -> float | None:
    known = [each.examples for each in runs if each.examples is not None]
    return median(known) if known and len(known) == len(runs) else None


def _held(examples: Sequence[tuple[int, float | None]]) -> str:
    """Return what is equal for all numbers of ranks, by the examples of one rank and step."""
    base, of_base = examples[0]
    if of_base is None or len(examples) < 2:
        return UNKNOWN
    kinds = set()
    for size, found in examples[1:]:
        if found is None:
            return UNKNOWN
        is_rank, is_global = (abs(each / of_base - 1) <= _EQUAL for each in (found, found * size / base))
        kinds.add(PER_RANK if is_rank else GLOBAL if is_global else OTHER)
    return kinds.pop() if len(kinds) == 1 else OTHER


def _size(
    size: int, runs: Sequence[Run], base: Sequence[Run], rounds: Sequence[Mapping[int, Run]], cores: float
) -> Size:
    pairs = [(each.get(base[0].size), each.get(size)) for each in rounds]
    both = [(one, other) for one, other in pairs if one in base and other in runs] or [(base[0], runs[0])]
    examples = [(one.examples_s, other.examples_s) for one, other in both if one and other]
    known = [other / one for one, other in examples if one and other]
    limit, limit_ms = _limit(runs, base, cores)
    return Size(
        size,
        runs,
        speed_up=Range.of(known) if len(known) == len(both) else None,
        steps_ratio=Range.of([other.steps_s / one.steps_s for one, other in both if one and other]),
        limit=limit,
        limit_ms=limit_ms,
        step_ms=_middle(runs, "step_ms"),
    )


def _middle(runs: Sequence[Run], name: str) -> float:
    return float(median(getattr(each, name) for each in runs))


def _limit(runs: Sequence[Run], base: Sequence[Run], cores: float) -> tuple[str, float]:
    """Return what takes most of a step that need not be, and how many ms of it; computing, if that is little."""
    step_ms, size, hosts = _middle(runs, "step_ms"), runs[0].size, runs[0].hosts
    core_ms, loading_ms, late_ms = (min(step_ms, _middle(runs, name)) for name in ("core_ms", "loading_ms", "late_ms"))
    late = next((each.late for each in reversed(runs) if each.late), "nobody")
    found = {
        "more ranks than cores" if hosts == 1 and size > cores else "waiting for a CPU core": core_ms,
        "data loader": loading_ms,
        "all-reduce" if hosts == 1 else "all-reduce between hosts": _middle(runs, "exposed_ms"),
        late: late_ms,  # which does not wait for itself
        "waiting for other ranks": _middle(runs, "waiting_ms") - late_ms * (size - 1) / size,
    }
    examples, before = _examples(runs), _examples(base)
    if runs is not base and examples and before:
        expected_ms = _middle(base, "computing_ms") * examples / before
        grown_ms = _middle(runs, "computing_ms") - expected_ms - core_ms - late_ms / size
        fewest = counted(base[0].size, "rank")
        found[f"fewer cores or less memory bandwidth per rank than with {fewest}"] = grown_ms
    limit = max(found, key=lambda name: found[name])
    return (limit, found[limit]) if found[limit] >= _MUCH * step_ms else ("computing", 0.0)


def _best(sizes: Sequence[Size]) -> int:
    """Return how many ranks pay off: more only where each step up is a gain in all rounds, or a clear one."""
    best = sizes[0]
    for each in sizes[1:]:
        if each.speed_up and best.speed_up and each.speed_up.low >= (1 + _LEAST_GAIN) * best.speed_up.middle:
            best = each
    return best.size


def _sentence(answer: Answer) -> str:
    base, *more = answer.measured
    if not more:
        return f"only {counted(base.size, 'rank')} could be measured: there is nothing to compare"
    of, last = counted(base.size, "rank"), more[-1]
    if answer.held == UNKNOWN:
        ratio = last.steps_ratio or Range(0.0, 0.0, 0.0)
        alike, more_each = ratio.text(), ratio.text(last.size / base.size)
        return (
            f"{counted(last.size, 'rank')} do {alike} times as many steps/s as {of}: that is {more_each} times as fast "
            f"if each rank has its own batch, and {alike} times as fast if the script splits one batch across its ranks"
        )
    best = next((each for each in more if each.size == answer.best), None)
    if best is None or best.speed_up is None:
        fastest = max(more, key=lambda each: each.speed_up.middle if each.speed_up else 0.0)
        reached = fastest.speed_up.text() if fastest.speed_up else "–"
        text = f"more ranks do not pay off: {counted(fastest.size, 'rank')} are {reached} times as fast as {of}"
        return f"{text}, limited by {_named(fastest)}"
    share = 100 * best.speed_up.middle * base.size / best.size
    text = f"{counted(best.size, 'rank')} pay off: {best.speed_up.text()} times as fast as {of}"
    text = f"{text}, {share:.0f} % efficiency"
    if last is not best and last.speed_up:
        text = f"{text}; {counted(last.size, 'rank')} are {last.speed_up.text()} times as fast"
        return f"{text}, limited by {_named(last)}"
    return f"{text}; limited by {_named(best)}"


def _named(size: Size) -> str:
    return (
        f"{size.limit} ({figure(size.limit_ms)} of a step's {figure(size.step_ms)} ms)" if size.limit_ms else size.limit
    )


def _notes(answer: Answer, rounds: Sequence[Mapping[int, Run]]) -> list[str]:
    """Return what was held equal, and what is to be known of single numbers of ranks."""
    base, *more = answer.measured
    notes = [_held_text(answer, base, more)] if more else []
    busy = _busy(base)
    if busy and busy not in answer.sentence:
        notes.append(f"this machine is busy: {busy}; measure again when it is idle")
    for each in answer.sizes:
        if each.problem:
            notes.append(f"{counted(each.size, 'rank')}: {each.problem}")
        elif lost := [one[each.size].problem for one in rounds if each.size in one and one[each.size].problem]:
            notes.append(f"{counted(each.size, 'rank')}, in {len(lost)} of {len(rounds)} runs: {lost[0]}")
    if early := [each for each in answer.measured if any(run.ended for run in each.runs)]:
        steps = min(run.steps for each in early for run in each.runs if run.ended)
        notes.append(f"the script ended on its own before --seconds were up, after at least {steps} measured steps")
    return notes


def _too_busy(measured: Sequence[Size]) -> str:
    """Return the sentence if the fewest ranks were so slow, for want of a core, that others seem impossibly fast."""
    base, *more = measured
    ratios = [(each.size / base.size, each.speed_up or each.steps_ratio) for each in more]
    if (busy := _busy(base)) and any(ratio and ratio.middle >= _IMPOSSIBLE * ideal for ideal, ratio in ratios):
        return f"this machine is too busy to compare anything: {busy}; measure again when it is idle"
    return ""


def _busy(base: Size) -> str:
    """Return how long the fewest ranks wait for a core, where that is much: something else uses it."""
    core_ms, step_ms = (_middle(base.runs, name) for name in ("core_ms", "step_ms"))
    share = f"{figure(min(core_ms, step_ms))} of a step's {figure(step_ms)} ms"
    even = f"even with {counted(base.size, 'rank')}, {share} are spent waiting for a core"
    return even if core_ms >= _MUCH * step_ms else ""


def _held_text(answer: Answer, base: Size, more: Sequence[Size]) -> str:
    of_base, of_last = _examples(base.runs), _examples(more[-1].runs)
    if answer.held == UNKNOWN or of_base is None or of_last is None:
        return (
            "the number of examples in a step is unknown, and so is what was held equal: the first speed-up applies "
            "if the script splits one batch across its ranks, the second if each rank has its own batch; "
            "to find out which, call rr.mark_step(examples=…) in the script"
        )
    if answer.held == PER_RANK:
        return f"held equal: the batch per rank, {figure(of_base)} examples; the global batch grows with the ranks"
    if answer.held == GLOBAL:
        total, each = figure(of_base * base.size), figure(of_last)
        return f"held equal: the global batch, {total} examples; with {counted(more[-1].size, 'rank')} each has {each}"
    texts = [f"{figure(_examples(each.runs) or 0.0)} with {counted(each.size, 'rank')}" for each in (base, *more)]
    return f"no batch was held equal; examples per rank and step: {', '.join(texts)}"


def _advice(answer: Answer, cores: float) -> list[str]:
    """Return what would help, by what limits most ranks, each with the figure that says so."""
    last = answer.measured[-1]
    run, found = last.runs[-1], []
    if len(answer.measured) < 2:
        return []
    exposed_ms, step_ms, core_ms = (_middle(last.runs, name) for name in ("exposed_ms", "step_ms", "core_ms"))
    who = f"with {counted(last.size, 'rank')}"
    if core_ms >= _MUCH * step_ms:
        text = "cores that nothing else uses: stop other jobs, or use fewer threads"
        has_too_many = run.hosts == 1 and last.size > cores
        if has_too_many:
            text = f"no more ranks than cores ({cores} here)"
        if not has_too_many or last.size != answer.best:  # as many as pay off are not too many
            found.append((f"{text}: {who}, waiting for a core takes", core_ms, core_ms))
    if exposed_ms >= _MUCH * step_ms:
        twice_ms = exposed_ms * step_ms / (2 * step_ms - exposed_ms)
        share, then = (100 * each / step_ms for each in (exposed_ms, twice_ms))
        text = f"a batch twice as large per rank: {who}, the all-reduce would take {then:.0f} % of a step"
        found.append((f"{text} instead of {share:.0f} %", exposed_ms - twice_ms, 0.0))
        every = exposed_ms * (1 - 1 / _LOCAL_STEPS)
        text = f"local steps (LocalSGD) with an all-reduce every {_LOCAL_STEPS} steps"
        found.append((f"{text}: {who}, this saves up to", every, every))
        if run.hosts > 1:
            eighth_ms = 0.875 * exposed_ms
            text = f"compression=int4, an eighth of the bytes between hosts: {who}, this saves up to"
            found.append((text, eighth_ms, eighth_ms))
    if run.loading_ms >= _MUCH * step_ms:
        text = f"more workers for the data loader, or a faster disk: {who}, it takes"
        found.append((text, run.loading_ms, run.loading_ms))
    found += [(f"{text}: {who}, this saves about", ms, ms) for text, ms in run.advice if not text.startswith(_CORES)]
    found = sorted(found, key=lambda each: -each[1])[:_MOST_ADVICE]
    return [f"{text} {figure(shown)} of a step's {figure(step_ms)} ms" if shown else text for text, _, shown in found]


def table(answer: Answer) -> list[str]:
    """Return the lines of the table."""
    heads = list(HEADS.values())
    cells = [[row[name] for name in HEADS] for row in rows(answer)]
    return columns([heads, *([first.rjust(len(heads[0])), *others] for first, *others in cells)])


HEADS = {
    "ranks": "RANKS",
    "steps_s": "STEPS/S",
    "examples_s": "EXAMPLES/S",
    "speed_up": "SPEED-UP",
    "efficiency": "EFFICIENCY",
    "limit": "LIMITED BY",
}
"""The columns of the table, by the names of `rows`."""


def rows(answer: Answer) -> list[dict[str, str]]:
    """Return what is shown of each number of ranks."""
    base = answer.measured[0].size if answer.measured else 1
    found = []
    for each in answer.sizes:
        row = dict.fromkeys(HEADS, "–") | {"ranks": str(each.size), "limit": each.limited_by or "see below"}
        if each.runs:
            row["steps_s"] = Range.of([run.steps_s for run in each.runs]).text()
        if examples := [run.examples_s for run in each.runs if run.examples_s is not None]:
            row["examples_s"] = Range.of(examples).text()
        if each.speed_up:
            row |= {"speed_up": each.speed_up.text(), "efficiency": f"{each.speed_up.text(100 * base / each.size)} %"}
        elif each.steps_ratio:
            row["speed_up"] = " or ".join(
                f"{figure(each.steps_ratio.middle * by)}" for by in sorted({1, each.size / base})
            )
        found.append(row)
    return found
