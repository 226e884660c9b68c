"""Ways to hosts that are not the usual ones: sshd on another port, a network that leads nowhere. On both MPIs."""

from tests.cluster.hosts import PROGRAMS

EXPECTED = [f"[{rank}] {rank} h{rank} 0 1 {rank} 3 3 {999.0 * (1 + 2 + 3)}" for rank in range(3)]


def ringrun(hosts, python, *flags, returncode):
    """An allreduce on the first three hosts; when it has ended, nothing is left of it."""
    done = hosts.ringrun(python, *flags, "-H", "h0:1,h1:1,h2:1", python, PROGRAMS / "where.py", returncode=returncode)
    hosts.assert_nothing_is_left()
    return done


def test_sshd_listens_on_another_port(own_hosts, python):
    for k in (1, 2):
        own_hosts.stop_sshd(k)
        with (own_hosts.files / own_hosts.names[k] / "sshd_config").open("a") as config:
            config.write("Port 2222\n")
        own_hosts.start_sshd(k)
    assert "port 22: Connection refused" in ringrun(own_hosts, python, returncode=3).stderr
    done = ringrun(own_hosts, python, "-p", 2222, returncode=0)
    assert sorted(done.stdout.splitlines()) == EXPECTED


def test_only_one_of_two_networks_leads_to_the_others(own_hosts, python):
    """Each host has a second interface with an address of its own in a network that has no other own_hosts."""
    for k in range(4):
        own_hosts.check(k, ["ip", "link", "add", "eth1", "type", "veth", "peer", "name", "nobody"])
        own_hosts.check(k, ["ip", "addr", "add", f"10.78.0.{k + 1}/24", "dev", "eth1"])
        for device in ("eth1", "nobody"):
            own_hosts.check(k, ["ip", "link", "set", device, "up"])
    done = ringrun(own_hosts, python, "--network-interfaces", "eth0", returncode=0)
    assert sorted(done.stdout.splitlines()) == EXPECTED
    cut_off = ringrun(own_hosts, python, "--network-interfaces", "eth1", returncode=3)
    assert "2 hosts, h[1-2]: no connection from there to this host (10.78.0.1 port " in cut_off.stderr, cut_off.stderr
    assert "eth7" in ringrun(own_hosts, python, "--network-interfaces", "eth7", returncode=2).stderr
