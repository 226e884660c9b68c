"""ringrun on a terminal: colours, and a progress bar that stays one line."""

import os
import re

import pexpect
import pytest

from tests.launcher.conftest import WITHOUT_MPI
from tests.support.tiers import adapters, parted


def spawn(arguments, **environment):
    command, *first = WITHOUT_MPI
    return pexpect.spawn(command, [*first, *arguments], env={**os.environ, **environment}, encoding="utf-8", timeout=60)


def on_a_terminal(arguments, environment):
    child = spawn(arguments, **{"TERM": "xterm", **environment})
    output = child.read()
    child.close()
    return output, child.exitstatus


def stage_by_stage(bar, environment, folder):
    """As `on_a_terminal`; the bar moves on when its stage was seen: on a busy machine several could come at once."""
    child, output = spawn([*bar, str(folder)], **{"TERM": "xterm", **environment}), ""
    for percent in range(0, 100, 20):
        child.expect_exact(f"{percent:3}%|bar")
        output += child.before + child.after
        (folder / str(percent)).touch()
    output += child.read()
    child.close()
    return output, child.exitstatus


def screen(output):
    """Return the lines that a terminal shows in the end (knows \\r, \\n, and erasing to the end of the line)."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            lines.append("")
        elif token == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif not token.startswith("\x1b"):
            lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token) :]
            column += len(token)
    return lines


@pytest.fixture
def bar(program):
    return ["-np", "1", *program("bar")]


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


@pytest.mark.parametrize(
    "flags",
    parted(
        [
            [],
            ["--timestamps"],
            ["--fold"],
            ["--ranks", "0"],
            ["--output-filename", "DIR"],
            ["--timestamps", "--fold", "--timeout", "40"],
        ],
        lambda flags: len(flags) != 1 and "--ranks" not in flags,
        adapters,
    ),
)
def test_a_progress_bar_stays_one_line_with_any_flag(flags, bar, tmp_path):
    flags = [str(tmp_path) if flag == "DIR" else flag for flag in flags]
    output, code = stage_by_stage([*flags, *bar], {"NO_COLOR": "1"}, tmp_path)
    assert code == 0
    time = TIME if "--timestamps" in flags else ""
    lines = screen(output)
    assert len(lines) == 3
    for line, text in zip(lines, [r"\[0\] a line between", r"\[0\] 100%\|bar", ""], strict=True):
        assert re.fullmatch(time * bool(text) + text, line), line
    for percent in (0, 20, 60, 80):  # the time stands before a bar's frames too: it would jump otherwise
        assert re.search(rf"{time}\[0\] {percent:3}%\|bar", output), percent
    if "--output-filename" in flags:
        kept = (tmp_path / "rank.0" / "stderr").read_bytes()
        assert kept == b"".join(b"\r%3d%%|bar" % percent for percent in range(0, 101, 20)) + b"\n"


def test_bars_of_several_ranks_fold_into_one_line(bar):
    output, code = on_a_terminal(["--fold", "-np", "2", *bar[2:]], {})
    assert code == 0
    shown = [re.fullmatch(r"\[([ 01-]{3})\] (a line between|100%\|bar)", line) for line in screen(output)[:-1]]
    assert all(shown)  # whatever the ranks' pace: nothing else is left on the screen
    ranks = {
        text: [match[1].strip() for match in shown if match and match[2] == text]
        for text in ("a line between", "100%|bar")
    }
    assert all(sorted(found) in (["0-1"], ["0", "1"]) for found in ranks.values())


def test_the_prefix_is_coloured(bar):
    output, _ = on_a_terminal(bar, {})
    assert "\x1b[36m[0]\x1b[0m a line between" in output
    assert screen(output) == ["[0] a line between", "[0] 100%|bar", ""]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_when_it_is_not_wanted(bar, environment):
    output = on_a_terminal(bar, environment)[0]
    assert "[0] a line between" in output
    assert "\x1b[36m" not in output


def test_ctrl_c_on_the_terminal(script):
    arguments = ["-np", "2", *script("import time; print('up'); time.sleep(60)")]
    child = spawn(arguments, NO_COLOR="1")
    for _ in range(2):
        child.expect(r"\[[01]\] up")
    child.sendintr()
    child.expect("ringrun: interrupted; ending 2 ranks")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


DEBUGGED = """
    import os
    x = 6 * 7
    if os.environ["RANK"] == "1":
        breakpoint()
    print("and on", x + 1)
"""


def test_a_debugger_on_one_rank_has_the_terminal_that_it_is_given(script):
    arguments = ["-np", "2", "--stdin", "1", *script(DEBUGGED)]
    child = spawn(arguments, TERM="xterm")
    child.expect(r"\[1\]\S* \(Pdb\) ")
    child.sendline("p x * 1000")
    child.expect("42000")
    child.sendline("c")
    child.expect(r"\[1\]\S* .*and on 43")
    child.read()
    child.close()
    assert child.exitstatus == 0


def test_a_debugger_without_a_terminal_is_told_how_to_get_it(script):
    output, code = on_a_terminal(["-np", "2", *script(DEBUGGED)], {})
    assert code == 1
    assert "ringrun: to debug rank 1 here, give it this terminal: ringrun --stdin 1 …" in output
