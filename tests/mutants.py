"""Do the quick tests notice a broken line? Breaks one line of mutants.txt after the other; each time a test must fail.

    python tests/mutants.py                    all of them, a third of a minute each; the last line counts the survivors
    python tests/mutants.py ring hook          those whose reason holds one of these words
    python tests/mutants.py --today 5          a fifth, by the date: in five days each, as in CI every night
    python tests/mutants.py --list

Every mutant is made in a copy of the tree, in a temporary folder, which the tests import instead of this one; nothing
here is changed, so it may be interrupted at any moment. The tests that probably notice run first, then all quick ones
and the adapters. A hang counts as noticed: with threads or ranks that wait for ever there is no other sign. A test that
has failed runs once without a mutant, where it must pass.

A text that does not stand exactly once in its file is an error, and so is a rename: mend the mutant then.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = [each.name for each in ROOT.iterdir() if each.name == ".ci" or not each.name.startswith((".", "site"))]
LIKELY_S, REST_S = 400, 1200
"""How long the likely tests, and all others, may take: more is a hang."""


class Mutant(NamedTuple):
    """`old` stands once in `file`; `new` in its place is wrong, as `why` says; `likely` tests notice it."""

    why: str
    file: str
    old: str
    new: str
    likely: str


def read(text: str) -> list[Mutant]:
    """The mutants of mutants.txt: by block why, the file and the likely tests, and -old and +new as in a diff.

    Without a + the whole line goes.
    """
    found = []
    for block in text.strip().split("\n\n"):
        why, where, *change = block.split("\n")
        old, new = ([line[1:] for line in change if line[0] == sign] for sign in "-+")
        file, _, likely = where.partition(": ")
        found.append(Mutant(why, file, "\n".join(old) + "\n" * (not new), "\n".join(new), likely))
    return found


MUTANTS = read(Path(__file__).with_suffix(".txt").read_text())


def tree(folder: Path, source: Path) -> Path:
    """A copy of the tree, with an import path that has its packages under the names that they are imported by."""
    (folder / "tree").mkdir()  # whatever the file system lists first
    for name in COPIED:
        path = source / name
        if path.is_dir():
            # with what is compiled from C; what pytest has compiled keeps the name of the file that it was made of
            shutil.copytree(path, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, folder / "tree" / name)
    (folder / "imports").mkdir()
    (folder / "imports" / "ringreduce").symlink_to(folder / "tree" / "ringreduce")
    (folder / "imports" / "ringrun").symlink_to(folder / "tree" / "launcher")
    return folder / "tree"


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it."""
    if text.count(mutant.old) != 1:
        sys.exit(
            f"{mutant.why}: expected {mutant.old!r} once in {mutant.file}, found it {text.count(mutant.old)} times"
        )
    return text.replace(mutant.old, mutant.new)


def environment(copy: Path) -> dict[str, str]:
    """What makes tests, and the jobs that they start, import the copy; other environments are this tree's."""
    pythons = {name: ROOT / f".venv-test-{name.lower()}" / "bin" / "python" for name in ("MPICH", "FRAMEWORKS")}
    own = {f"TEST_{name}_PYTHON": str(python) for name, python in pythons.items() if python.exists()}
    return own | os.environ | {"PYTHONPATH": str(copy.parent / "imports")}


def noticed(copy: Path, paths: list[str], limit_s: float) -> str:
    """The test that fails, or what else has shown that something is wrong; empty when all is well."""
    # without the test that all texts of MUTANTS stand in their files: it notices each of them
    flags = "-x -q -rfE --color=no -p no:cacheprovider --timeout=90 --ignore=tests/unit/test_mutants.py"
    command = [sys.executable, "-m", "pytest", *flags.split(), "-m", "not extended", *paths]
    log = copy.parent / "log"
    with log.open("w") as output:
        # a session of its own: what hangs is ended with all that it has started
        process = subprocess.Popen(
            command, cwd=copy, env=environment(copy), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"a hang of more than {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    told = log.read_text(errors="replace")
    if code in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    if failed:
        return failed[1]
    if hung := re.search(r"in (test_\w+)", told):
        return f"{hung[1]}, a hang"
    return f"exit code {code}: {told.strip().splitlines()[-1] if told.strip() else ''}"


def of_day(mutants: list[Mutant], parts: int, day: date) -> list[Mutant]:
    """The day's part of them; `parts` days in a row have all. Neighbours, which are alike, are on different days."""
    return mutants[day.toordinal() % parts :: parts]


def compile_again(copy: Path, path: Path) -> None:
    """Compile a C file of the copy where tests import it."""
    if path.suffix == ".c":
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        subprocess.run(command, cwd=copy, check=True)


def verdict(copy: Path, mutant: Mutant, source: Path, rest: bool, sound: set[str]) -> str:
    """Which test notices the mutant; empty when none does.  sound: tests that have passed without a mutant."""
    path = copy / mutant.file
    before = (source / mutant.file).read_text()
    path.write_text(mutated(before, mutant))
    compile_again(copy, path)
    try:
        likely = [word for word in mutant.likely.split() if not word.startswith("tests/") or (copy / word).exists()]
        by = noticed(copy, likely, LIKELY_S) or (noticed(copy, [], REST_S) if rest else "")
    finally:
        shutil.copy2(source / mutant.file, path)
        compile_again(copy, path)
    test = by.partition("[")[0]  # for all of its parameters
    if test.startswith("tests/") and test not in sound:
        if noticed(copy, [test], LIKELY_S):
            sys.exit(f"{test} fails without a mutant, too: mend it first, since it would notice anything")
        sound.add(test)
    return by


def table(mutants: list[Mutant], source: Path, rest: bool) -> Iterator[bool]:
    """Print a line for each; True for every one that no test notices."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy, sound = tree(Path(folder), source), set[str]()
        for mutant in mutants:
            begin = time.monotonic()
            by = verdict(copy, mutant, source, rest, sound)
            seconds = time.monotonic() - begin
            print(f"{'killed  ' if by else 'SURVIVED'} {seconds:4.0f} s  {mutant.why:<75} {by}", flush=True)
            yield not by


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose reason holds one of these")
    parser.add_argument("--today", type=int, metavar="PARTS", default=1, help="only one of so many parts, by the date")
    parser.add_argument("--list", action="store_true", help="print their reasons, and check that all still fit")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; by default this one")
    parser.add_argument("--likely", action="store_true", help="run the likely tests only")
    return parser.parse_args()


def main() -> int:
    """Return 1 when a mutant has survived."""
    asked = parse()
    words = re.compile("|".join(rf"\b{re.escape(word)}" for word in asked.words))  # "ps:" is none of "groups:"
    chosen = of_day([each for each in MUTANTS if words.search(each.why)], asked.today, date.today())
    for mutant in chosen:
        mutated((asked.tree / mutant.file).read_text(), mutant)
    if asked.list:
        print("\n".join(mutant.why for mutant in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed, and what runs is ended
    survivors = sum(table(chosen, asked.tree.resolve(), not asked.likely))
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
