"""ringrun on a terminal: colours, and a progress bar that stays one line."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

RINGRUN = str(Path(sys.executable).parent / "ringrun")

BAR = r"""
    import os, sys, time
    for percent in range(0, 101, 20):
        sys.stderr.write(f"\r{percent:3}%|bar")
        sys.stderr.flush()
        if percent == 40:
            print("a line between")
        time.sleep(0.1)
    sys.stderr.write("\n")
"""


def on_a_terminal(arguments: list[str], environment: dict[str, str]) -> tuple[str, int]:
    child = pexpect.spawn(
        RINGRUN, arguments, env={**os.environ, "TERM": "xterm", **environment}, encoding="utf-8", timeout=30
    )
    output = child.read()
    child.close()
    return output, child.exitstatus


def screen(output: str) -> list[str]:
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
def bar(script: Callable[[str], str], python: str) -> list[str]:
    return ["-np", "1", python, script(BAR)]


def test_a_progress_bar_stays_one_line_below_the_others(bar: list[str]) -> None:
    output, code = on_a_terminal(bar, {})
    assert code == 0
    assert screen(output) == ["[0] a line between", "[0] 100%|bar", ""]
    for percent in (0, 20, 60, 80):
        assert f"{percent:3}%|bar" in output


def test_the_prefix_is_coloured(bar: list[str]) -> None:
    assert "\x1b[36m[0]\x1b[0m a line between" in on_a_terminal(bar, {})[0]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_when_it_is_not_wanted(bar: list[str], environment: dict[str, str]) -> None:
    output = on_a_terminal(bar, environment)[0]
    assert "[0] a line between" in output
    assert "\x1b[36m" not in output


def test_ctrl_c_on_the_terminal(script: Callable[[str], str], python: str) -> None:
    arguments = ["-np", "2", python, script("import time; print('up'); time.sleep(60)")]
    child = pexpect.spawn(RINGRUN, arguments, env={**os.environ, "NO_COLOR": "1"}, encoding="utf-8", timeout=30)
    for _ in range(2):
        child.expect(r"\[[01]\] up")
    child.sendintr()
    child.expect("ringrun: interrupted; ending 2 ranks")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
