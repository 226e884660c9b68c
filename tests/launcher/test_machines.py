"""The machines behind the names of hosts: which are one, and which networks lead to others."""

import socket

import pytest

from ringrun.hosts import Host, Interface, Machine, Machines
from ringrun.hosts.host import parse_host_list


def machine(number, name="", **changes):
    """Machine `number`, with one address of its own."""
    interfaces = (Interface("eth0", is_running=True, networks=(f"10.0.0.{number}/24",)),)
    return Machine(name or f"ip-10-0-0-{number}", f"boot {number}", interfaces)._replace(**changes)


def known(**machines):
    return Machines(machines)


# one machine, several names


@pytest.mark.parametrize(
    ("listed", "merged"),
    [
        ("a:1,b:2", "a:1,b:2"),
        ("a:1,b:2,ib:3", "a:4,b:2"),
        ("ib:3,b:2,a:1", "ib:4,b:2"),
        ("a,b", "a,b"),
        ("a,ib", "a:2"),
        ("a:2,ib", "a:3"),
        ("never-asked:1,a:1", "never-asked:1,a:1"),
    ],
)
def test_one_machine_under_several_names_is_one_host(listed, merged):
    found = known(a=machine(1), ib=machine(1), b=machine(2)).merged(parse_host_list(listed))
    assert ",".join(map(str, found)) == merged


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"identity": "boot 2"}, id="a clone, started for itself"),
        pytest.param({"identity": ""}, id="nobody knows"),
        pytest.param({"name": "other"}, id="a container beside it"),
        pytest.param({"interfaces": ()}, id="a container with a network of its own"),
    ],
)
def test_less_than_proof_makes_no_two_hosts_one(other):
    hosts = [Host("a", 1), Host("b", 1)]
    machines = known(a=machine(1), b=machine(1)._replace(**other))
    assert machines.merged(hosts) == hosts
    assert machines.notices(hosts) == []
    unknown = known(a=machine(1, identity=""), b=machine(1, identity=""))
    assert unknown.merged(hosts) == hosts


def test_of_the_names_of_this_host_one_counts_that_says_so():
    own = socket.gethostname()
    machines = Machines({"alias": machine(1, own), own: machine(1, own), "b": machine(2)})
    hosts = [Host("alias", 1), Host("b", 1), Host(own, 2)]
    assert machines.merged(hosts) == [Host(own, 3), Host("b", 1)]
    assert machines.notices(hosts) == [
        f"alias, {own} are one machine, which calls itself {own}: taken for one host, {own}:3"
    ]


# the networks between them


def bridge(name, address, **changes):
    return Interface(name, **{"is_running": True, "networks": (address,), **changes})


@pytest.mark.parametrize(
    ("more", "used"),
    [
        pytest.param([], [[], []], id="nothing is left out"),
        pytest.param([bridge("docker0", "172.17.0.1/16")] * 2, [["eth0"]] * 2, id="equal addresses"),
        pytest.param(
            [bridge("virbr0", "192.168.122.1/24"), bridge("br-0af3", "192.168.122.1/24")],
            [["eth0"]] * 2,
            id="two names",
        ),
        pytest.param([bridge("eth1", f"10.1.0.{k}/24") for k in (1, 2)], [[], []], id="another network"),
        pytest.param([bridge("eth1", f"10.1.0.{k}/24", is_running=k == 1) for k in (1, 2)], [[], ["eth0"]], id="down"),
        pytest.param([bridge("usb0", f"169.254.0.{k}/16") for k in (1, 2)], [["eth0"]] * 2, id="link-local"),
        pytest.param([bridge("lxdbr0", "fd42::1/64")] * 2, [["eth0"]] * 2, id="IPv6"),
        pytest.param(
            [bridge("eth1", "", networks=(f"10.1.0.{k}/24", "10.1.0.99/24")) for k in (1, 2)],
            [[], []],
            id="beside its own",
        ),
    ],
)
def test_interfaces_that_lead_to_no_other_host_are_left_out(more, used):
    found = {f"n{number}": machine(number) for number in (1, 2)}
    if more:
        for each, name in zip(more, found, strict=True):
            found[name] = found[name]._replace(interfaces=(*found[name].interfaces, each))
    machines = Machines(found)
    assert [machines.interfaces(name) for name in found] == used
    assert machines.interfaces("never-asked") == []


def test_two_names_of_one_machine_are_no_equal_addresses():
    machines = known(a=machine(1), ib=machine(1), b=machine(2))
    assert machines.equal_addresses() == set()
    machines.learn({"c": machine(2, identity="boot 3")})
    assert machines.equal_addresses() == {"10.0.0.2"}


def test_networks_are_listed_the_likeliest_first():
    docker = bridge("docker0", "172.17.0.1/16")
    ib = bridge("ib0", "10.9.0.1/16")
    machines = known(
        a=machine(1, interfaces=(docker, ib, *machine(1).interfaces)),
        b=machine(2, interfaces=(docker, *machine(2).interfaces)),
    )
    assert machines.networks(["a", "b", "never-asked"]) == [
        "eth0 10.0.0.0/24",
        "ib0 10.9.0.0/16",
        "docker0 172.17.0.0/16",
    ]


def test_the_address_that_all_have_reached_is_this_host_s():
    machines = known(
        a=machine(1, reached="10.0.0.9"), b=machine(2, reached="10.0.0.9"), c=machine(3, reached="10.1.0.9")
    )
    assert machines.address(["a", "b"]) == "10.0.0.9"
    assert machines.address(["a", "c"]) == machines.address(["a", "never-asked"]) == machines.address([]) == ""
