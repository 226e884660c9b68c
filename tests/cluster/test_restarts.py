"""--restarts over several hosts: what a rank on another host finds, on both MPIs."""

import re

from tests.support.cluster.hosts import PROGRAMS


def test_a_job_on_two_hosts_goes_on_from_its_checkpoint(hosts, python, tmp_path):
    script = PROGRAMS / "dies_once.py"
    command = ["-H", "h0:1,h1:1", "--restarts", "1", "--output-filename", tmp_path / "kept", python, script]
    done = hosts.ringrun(python, *command, returncode=0)
    hosts.wait_until_gone()
    total = float(3 * sum(range(4)))
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] attempt 1 on h{rank} has {total}" for rank in range(2)]
    card = done.stderr[done.stderr.index("-- ringrun: rank 1 of 2 failed first --") :]
    assert re.search(r"^how +killed by signal 9 \(SIGKILL\), exit code 137$", card, re.MULTILINE)
    assert re.search(r"^where +host h1, pid \d+, ran for ", card, re.MULTILINE)
    assert "ringrun: restart 1 of 1 in 1 s\n" in done.stderr
    assert (tmp_path / "kept" / "rank.1" / "stdout").read_text() == f"attempt 1 on h1 has {total}\n"
