"""parameter_server.py on real ranks: it learns in every mode, and a server that hears no more of a worker names it."""

import re

import pytest

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("mode", [[], ["--mode", "async"], ["--mode", "ssp", "--staleness", "3"]], ids=str)
def test_it_learns_and_each_server_says_what_it_did(ringrun, examples, mode):
    ended = ringrun(6, examples / "parameter_server.py", *mode, flags=["--servers", "2"])
    assert float(re.search(r"test accuracy (\d\.\d+)", ended.stdout).group(1)) > 0.87
    ahead = [int(each) for each in re.findall(r"up to (\d+) steps ahead", ended.stdout)]
    assert len(ahead) == 2
    if mode != ["--mode", "async"]:
        assert max(ahead) <= (3 if mode else 0)


def test_a_worker_that_is_killed_is_named(ringrun, examples):
    program = examples.parent / "tests" / "examples" / "programs" / "ps_worker_dies.py"
    ended = ringrun(4, program, returncode=137, flags=["--servers", "1"])
    assert "rank 1 of 4 failed first" in ended.stderr
    assert "recv 'ordered' (thread:ps-worker-1)" in ended.stderr
