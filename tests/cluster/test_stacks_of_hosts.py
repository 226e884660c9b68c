"""What ranks on four hosts do: asked while they hang or train, and told on the failure card."""

import re
import subprocess

from ringrun.arguments import parse_ranks
from tests.support.cluster.hosts import PROGRAMS
from tests.support.patience import patient, wait_until

ALL = ("-np", "4", "-H", "h0:1,h1:1,h2:1,h3:1")

STACKS = (
    "ranks 0-1,3 of 4 on 3 hosts: allreduce 'layer3.w' (steps.py:15)\n",
    "rank 2 of 4 on h2: steps.py:19, in <module>: time.sleep(float(sys.argv[1]))\n",
)


def test_the_card_of_a_rank_on_another_host(hosts, python):
    """The others are asked on their hosts, unless they have failed too: Open MPI ends them when a connection closes."""
    done = hosts.ringrun(python, *ALL, python, PROGRAMS / "steps.py", 1, "raise", timeout=120, returncode=1)
    hosts.assert_nothing_is_left()
    card = done.stderr[done.stderr.index("-- ringrun: rank 2 of 4 failed first --") :].splitlines()
    assert card[1] == "how         exit code 1"
    assert re.match(r"where       host h2, pid \d+, ran for ", card[2])
    failed = {int(rank) for rank in re.findall(r"rank (\d) on host h\1: exit code 14$", done.stderr, re.MULTILINE)}
    told = re.findall(r"ranks? ([\d,-]+): allreduce 'layer3.w' \(steps.py:15\)$", done.stderr, re.MULTILINE)
    asked = parse_ranks(",".join(told), 4, "asked") if told else frozenset()  # some answer before they fail
    assert {0, 1, 3} - failed <= asked <= {0, 1, 3}, done.stderr
    assert card[-2:] == ["ValueError: boom", "-" * 80]


def test_a_job_that_hangs_is_asked_on_all_its_hosts(hosts, python):
    ringrun, log = python.parent / "ringrun", hosts.folder / "stderr"
    command = [ringrun, "--stall-check-s", "3", *ALL, python, PROGRAMS / "steps.py", 120, "pass"]
    with log.open("w") as stderr:
        job = hosts.start(0, command, stdout=subprocess.DEVNULL, stderr=stderr)
    wait_until(lambda: all(stack in log.read_text() for stack in STACKS))
    assert "ringrun: the job is stalled; rank 0 says: allreduce 'layer3.w'" in log.read_text()
    listed = hosts.check(0, [ringrun, "stacks"]).splitlines()
    assert len(listed) == 2, listed
    number, ranks, *_ = listed[1].split()
    assert ranks == "4"
    for _ in range(3):
        told = hosts.check(0, [ringrun, "stacks", number])
        assert told.startswith(f"job {number}: "), told
        assert STACKS[0] in told
        assert STACKS[1] in told
    assert job.poll() is None, "the job goes on"
    job.terminate()
    assert job.wait(patient(60)) == 143
    hosts.assert_nothing_is_left()


def test_a_job_is_watched_on_all_its_hosts(hosts, python):
    program = PROGRAMS.parents[1] / "launcher" / "programs" / "steps.py"
    job = hosts.start(0, [python.parent / "ringrun", *ALL, python, program, hosts.folder, "2"])
    wait_until(lambda: (hosts.folder / "trains").exists())
    shown = hosts.check(0, [python.parent / "ringrun", "top", "--once"])
    assert re.search(r"^rank 2 \(h2\) is late, at steps.py:\d+: the others wait ", shown, re.MULTILINE), shown
    rows = [line.replace(">", " ").split()[:2] for line in shown.splitlines()[4:]]
    assert rows == [["0", "h0"], ["1", "h1"], ["2", "h2"], ["3", "h3"]], shown
    (hosts.folder / "stop").touch()
    assert job.wait(patient(60)) == 0
    hosts.assert_nothing_is_left()
