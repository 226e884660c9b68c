"""Ways to hosts that are not the usual ones: sshd on another port, a network that leads nowhere. On both MPIs."""

import pytest

from tests.support.cluster.hosts import PROGRAMS

EXPECTED = [f"[{rank}] {rank} h{rank} 0 1 {rank} 3 3 {999.0 * (1 + 2 + 3)}" for rank in range(3)]


def ringrun(hosts, python, *flags, returncode=None):
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


BRIDGE = """
    ip link add {name} type bridge && ip addr add {network} dev {name} && ip link set {name} up
    ip link add port{name} type veth peer name other{name}
    ip link set port{name} master {name} up && ip link set other{name} up
"""
CABLE = """
    ip link add {name} type veth peer name other{name} && ip addr add {network} dev {name}
    ip link set {name} up && ip link set other{name} up
"""


def add(hosts, script, name="", network=""):
    """Give hosts one more interface; k is the number of a host."""
    for k in range(3):
        hosts.check(k, ["sh", "-ec", script.format(name=name.format(k=k), network=network.format(k=k + 1))])


@pytest.mark.adapters
def test_addresses_that_all_hosts_have_are_left_out(own_hosts, python):
    """Of bridges, of a tunnel, of an interface without a cable, and of one that gave itself an address."""
    add(own_hosts, BRIDGE, "docker0", "172.17.0.1/16")
    add(own_hosts, BRIDGE, "br-{k}f3a", "192.168.122.1/24")
    add(own_hosts, CABLE, "usb{k}", "169.254.7.{k}/16")
    add(own_hosts, "ip tuntap add dev tun0 mode tun; ip addr add 10.8.0.1 peer 10.8.0.2 dev tun0; ip link set tun0 up")
    add(
        own_hosts,
        "ip link add eth1 type veth peer name e1; ip addr add {network} dev eth1; ip link set eth1 up",
        "",
        "10.9.0.{k}/24",
    )
    done = ringrun(own_hosts, python, returncode=0)
    assert sorted(done.stdout.splitlines()) == EXPECTED


def test_networks_without_a_common_one_lead_to_each_other_by_routes(own_hosts, python):
    """As in clouds that give each host an address and no network."""
    routes = "; ".join(f"ip route add {address} dev eth0" for address in own_hosts.addresses)
    add(
        own_hosts, f"ip addr flush dev eth0; ip addr add {{network}} dev eth0; ({routes}) || true", "", "10.77.0.{k}/32"
    )
    done = ringrun(own_hosts, python, returncode=0)
    assert sorted(done.stdout.splitlines()) == EXPECTED


@pytest.mark.parametrize("network", ["10.78.0.{k}/24", "10.78.{k}.1/24"])
def test_a_network_that_leads_nowhere_is_named_with_the_cure(own_hosts, python, network):
    add(own_hosts, CABLE, "eth1", network)
    done = ringrun(own_hosts, python)
    if done.returncode:
        hint = "perhaps one of these networks does not connect all hosts (eth0 10.77.0.0/24, eth1 10.78."
        assert hint in done.stderr
        assert "): name one that does: --network-interfaces eth0\n" in done.stderr
    else:
        assert "mpich" in str(python), "UCX has found the right one by itself"
