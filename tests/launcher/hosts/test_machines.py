"""The machines behind the names of hosts: which are one, and which networks lead to others. Ranks that go astray."""

import socket
from dataclasses import replace

import pytest

from ringrun.connection.wire import Hello
from ringrun.engines import MPICH, OpenMPI
from ringrun.errors import MachineError
from ringrun.hosts import Host, Interface, Machine, Machines
from ringrun.hosts.host import parse_host_list
from ringrun.job.misplaced import misplaced, require_own_names
from ringrun.job.plan import Job
from tests.support.loops import in_a_loop


def machine(number, name="", **changes):
    """Machine `number`, with one address of its own."""
    interfaces = (Interface("eth0", is_running=True, networks=(f"10.0.0.{number}/24",)),)
    return Machine(name or f"ip-10-0-0-{number}", f"boot{number} 1:2 net", interfaces)._replace(**changes)


def known(**machines):
    return Machines(machines)


# one machine, several names


@in_a_loop(
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
        f"alias, {own} are one machine, which calls itself {own}: treated as one host, {own}:3"
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


# where ranks are

HOSTS = ((Host("node7"), 2), (Host("node8"), 1))
JOB = Job(3, ["true"], hosts=HOSTS, machines=known(node7=machine(7), node8=machine(8)))
ONE_HOST = Job(2, ["true"])
CURE_NAME = "use the name that `hostname` prints on each host"


@in_a_loop(
    ("job", "hello", "why"),
    [
        (JOB, Hello(1, 3, 1, 2, "ip-10-0-0-7", 1), ""),
        (JOB, Hello(2, 3, 0, 1, "ip-10-0-0-8", 1), ""),
        (
            JOB,
            Hello(2, 3, 2, 3, "ip-10-0-0-7", 1),
            f"rank 2 is to run on node8, which calls itself ip-10-0-0-8, but was started on ip-10-0-0-7; {CURE_NAME}",
        ),
        (
            JOB,
            Hello(1, 3, 0, 1, "ip-10-0-0-7", 1),
            "rank 1 is to be local rank 1 of 2 on node7, but was started as local rank 0 of 1; "
            "name each host once, with all its slots",
        ),
        (JOB, Hello(1, 3, 1, 2, "ip-10-0-0-7", 1, "boot7"), ""),
        (
            replace(JOB, machines=known(node7=machine(7, "ubuntu"), node8=machine(8, "ubuntu"))),
            Hello(2, 3, 0, 1, "ubuntu", 1, "boot7"),
            "rank 2 is to run on node8, but was started on another machine that calls itself ubuntu, too; give each",
        ),
        (replace(JOB, machines=known(node8=machine(8, identity=""))), Hello(2, 3, 0, 1, "ip-10-0-0-8", 1, "b"), ""),
        (JOB, Hello(2, 3, 0, 2, "ip-10-0-0-8", 1), "rank 2 is to be local rank 0 of 1 on node8, but"),
        (ONE_HOST, Hello(1, 2, 1, 2, socket.gethostname(), 1), ""),
        (ONE_HOST, Hello(1, 2, 0, 1, "n9", 1), f"rank 1 is to run on {socket.gethostname()}, but was started on n9;"),
        (
            replace(JOB, machines=known(node7=machine(7, "node7"))),
            Hello(0, 3, 0, 2, "n9", 1),
            "rank 0 is to run on node7,",
        ),
        (replace(JOB, machines=Machines()), Hello(0, 3, 0, 2, "nobody-knows", 1), ""),
        (replace(JOB, mpi_args=["--map-by", "node"]), Hello(1, 3, 0, 1, "ip-10-0-0-8", 1), ""),
        (replace(JOB, mpi_args=["-v"]), Hello(1, 3, 0, 1, "ip-10-0-0-8", 1), "rank 1 is to run on node7, which"),
    ],
)
def test_a_rank_that_is_not_where_it_is_to_be_is_told_with_both_places(job, hello, why):
    found = misplaced(job, hello, {"PATH": "/bin", "OMPI_MCA_btl": "^ofi"})
    assert found == why if not why or why.endswith(("there", "slots")) else found.startswith(why)


@in_a_loop(
    ("cpus", "job", "why"),
    [
        ("0-7", ONE_HOST, ""),
        ("", ONE_HOST, ""),
        (
            "0-3",
            ONE_HOST,
            f"of the CPUs 0-7 of {socket.gethostname()}, but was started on 0-3; let nothing but ringrun",
        ),
        ("0-3", replace(ONE_HOST, bind=False), ""),
        ("0-3", replace(ONE_HOST, mpi_args=["-bind-to", "core"]), ""),
        ("0-3", replace(ONE_HOST, mpi_args=["--cpu-bind=cores"]), ""),
    ],
)
def test_a_rank_that_something_else_has_bound_to_cores_is_told(cpus, job, why):
    found = misplaced(job, Hello(1, 2, 1, 2, socket.gethostname(), 1, "", cpus), {}, "0-7")
    assert found == why or (why and found.startswith(f"rank 1 is to get its share {why}"))


@pytest.mark.parametrize(
    "variable", ["PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_orte_default_hostfile", "SLURM_DISTRIBUTION"]
)
def test_what_else_places_ranks_is_named(variable):
    found = misplaced(JOB, Hello(0, 3, 0, 1, "ip-10-0-0-8", 1), {variable: "x"})
    assert found.endswith(f"but was started on ip-10-0-0-8; unset {variable}, which may have placed it")


def test_hosts_that_call_themselves_the_same_are_refused_where_the_mpi_goes_by_that():
    twins = replace(JOB, machines=known(node7=machine(7, "ubuntu"), node8=machine(8, "ubuntu")))
    require_own_names(twins, MPICH())
    require_own_names(JOB, OpenMPI())
    require_own_names(replace(JOB, machines=Machines()), OpenMPI())
    with pytest.raises(MachineError) as info:
        require_own_names(twins, OpenMPI())
    assert str(info.value) == (
        "node7 and node8 both call themselves ubuntu, by which Open MPI tells hosts apart; "
        "give each a name of its own, as with `hostnamectl set-hostname`, or use MPICH: pip install mpich"
    )
