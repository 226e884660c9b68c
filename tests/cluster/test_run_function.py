"""ringreduce.run() over hosts: the function and the results travel over the network."""

from tests.support.cluster.hosts import PROGRAMS


def test_ranks_on_other_hosts_get_the_function_and_return_their_results(hosts, python):
    done = hosts.run(0, [python, PROGRAMS / "calls_run.py"], timeout=120, returncode=0)
    assert done.stdout == "('h0', 6.0) ('h1', 6.0) ('h2', 6.0)\n"
    hosts.assert_nothing_is_left()
