"""What batch systems tell a job of its hosts: the variables and files as they write them, and damaged ones."""

from hypothesis import given
from hypothesis import strategies as st

from ringrun.errors import UsageError
from ringrun.hosts.allocation import find_allocation
from ringrun.hosts.host import Allocation, Host
from ringrun.hosts.slurm import expand_nodelist
from tests.launcher.hosts.test_hosts import message_of
from tests.support.loops import in_a_loop

VARIABLES = [
    "SLURM_JOB_NODELIST",
    "SLURM_TASKS_PER_NODE",
    "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "LSB_MCPU_HOSTS",
    "LSB_DJOB_HOSTFILE",
    "PBS_NODEFILE",
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "HYDRA_HOST_FILE",
]


def find(environ, **files):
    """Look for an allocation; the file `/files/x` is the keyword argument x."""

    def read(path):
        try:
            return files[path.removeprefix("/files/")]
        except KeyError:
            raise UsageError(f"hostfile {path}: no such file") from None

    return find_allocation(environ, read)


def hosts_in(environ, **files):
    allocation = find(environ, **files)
    return ",".join(map(str, allocation.hosts))


def test_without_a_batch_system_there_is_no_allocation():
    assert find({"HOME": "/root"}) is None
    assert find(dict.fromkeys(VARIABLES, "")) is None
    assert find({"SLURM_TASKS_PER_NODE": "4"}) is None


@in_a_loop(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n1,login-2.x", "n1 login-2.x"),
        ("n[001-003,7],login-[1-2]x", "n001 n002 n003 n7 login-1x login-2x"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("r[1-2]n[3,5-6]-ib,x", "r1n3-ib r1n5-ib r1n6-ib r2n3-ib r2n5-ib r2n6-ib x"),
        ("[1-2]a", "1a 2a"),
        ("gnode[10,20,25,37]", "gnode10 gnode20 gnode25 gnode37"),
    ],
)
def test_slurm_s_list_of_nodes_is_expanded(text, names):
    assert expand_nodelist(text) == names.split()


LIST = "expected names with ranges in brackets, as in n[001-003,7],m[1-2]x"
RANGE = "expected a number or a rising range, as in 001-003"


@in_a_loop(
    ("text", "message"),
    [
        (",", LIST),
        ("n1,", LIST),
        ("n[1-2", LIST),
        ("n1-2]", LIST),
        ("n[[1]]", LIST),
        ("n[]", f"{RANGE}, got ''"),
        ("n[1,]", f"{RANGE}, got ''"),
        ("n[3-1]", f"{RANGE}, got '3-1'"),
        ("n[a-b]", f"{RANGE}, got 'a-b'"),
        ("n[1-2-3]", f"{RANGE}, got '1-2-3'"),
        ("n[1-2] m", "expected a host name of letters, digits, '.', '-' and '_', got 'n1 m'"),
        ("n[1-999999999999]", "more than 65536 nodes"),
        ("n[1-60000,1-60000]", "more than 65536 nodes"),
        ("n[1-9999][1-9999][1-9999]", "more than 65536 nodes"),
        ("n[1-40000],m[1-40000]", "more than 65536 nodes"),
    ],
)
def test_a_damaged_list_of_nodes_is_told(text, message):
    assert message_of(expand_nodelist, text) == f"SLURM_JOB_NODELIST={text!r}: {message}"


SLURM = {
    "tasks per node": ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, "n1:4,n2:4,n3:3"),
    "CPUs per node": ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}, "n1:16,n2:16,n3:8"),
    "CPUs per task": ({"SLURM_JOB_CPUS_PER_NODE": "16,9,2", "SLURM_CPUS_PER_TASK": "4"}, "n1:4,n2:2,n3:1"),
    "nothing": ({}, "n1,n2,n3"),
}


@in_a_loop(("variables", "hosts"), SLURM.values())
def test_slots_of_a_slurm_job(variables, hosts):
    assert hosts_in({"SLURM_JOB_NODELIST": "n[1-3]", **variables}) == hosts


WORKERS = tuple(Host(f"job-worker-{number}.job.default.svc", 2) for number in range(2))
WORKERS_FILE = "job-worker-0.job.default.svc slots=2\njob-worker-1.job.default.svc:2\n"
MINE = (Host("h1"), Host("h2", 2))


@in_a_loop(
    ("kind", "variables", "text", "hosts"),
    [
        (
            "slurm",
            {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"},
            "",
            (Host("n1", 4), Host("n2", 4)),
        ),
        ("lsf", {"LSB_MCPU_HOSTS": "h1 4 h2 2"}, "", (Host("h1", 4), Host("h2", 2))),
        ("lsf", {"LSB_DJOB_HOSTFILE": "/files/x"}, "h1\nh1\nh2\n", (Host("h1", 2), Host("h2", 1))),
        ("pbs", {"PBS_NODEFILE": "/files/x"}, "n1\nn2\nn1\n", (Host("n1", 2), Host("n2", 1))),
        ("kubernetes", {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}, WORKERS_FILE, WORKERS),
        ("hostfile", {"PRTE_MCA_prte_default_hostfile": "/files/x"}, "h1\nh2:2", MINE),
        ("kubernetes", {"HYDRA_HOST_FILE": "/etc/mpi/hostfile"}, WORKERS_FILE, WORKERS),
        ("hostfile", {"HYDRA_HOST_FILE": "/files/x"}, "h1\nh2:2", MINE),
    ],
)
def test_an_allocation_says_why(kind, variables, text, hosts):
    says = [f"{name}={value if text else repr(value)}" for name, value in variables.items()]
    files = {"x": text, "/etc/mpi/hostfile": text}
    assert find(variables, **files) == Allocation(kind, hosts, ", ".join(says))


YOURSELF = "; to name the hosts yourself: -H or --hostfile"


PER_NODE = "expected a number for each node, as in 4(x2),3, got"
OF_NODES = "expected numbers for the 3 nodes of SLURM_JOB_NODELIST, not for"


@in_a_loop(
    ("variable", "text", "message"),
    [
        ("SLURM_TASKS_PER_NODE", "4", f"{OF_NODES} 1"),
        ("SLURM_TASKS_PER_NODE", "1(x999999999)", f"{OF_NODES} 999999999"),
        ("SLURM_TASKS_PER_NODE", "4(x3", f"{PER_NODE} '4(x3'"),
        ("SLURM_TASKS_PER_NODE", "4(x2),", f"{PER_NODE} ''"),
        ("SLURM_TASKS_PER_NODE", "0(x3)", "expected a whole number from 1 to 999999, got '0'"),
        ("LSB_MCPU_HOSTS", "h1 4 h2", "expected pairs of a host and its slots, as in 'h1 4 h2 4'"),
        ("LSB_MCPU_HOSTS", "4 h1", "expected a whole number from 1 to 999999, got 'h1'"),
        ("LSB_MCPU_HOSTS", "h! 4", "expected a host name of letters, digits, '.', '-' and '_', got 'h!'"),
    ],
)
def test_damaged_numbers_are_told(variable, text, message):
    nodes = {"SLURM_JOB_NODELIST": "n[1-3]"} if variable.startswith("SLURM") else {}
    assert message_of(find, {variable: text, **nodes}) == f"{variable}={text!r}: {message}{YOURSELF}"


def test_a_nodefile_that_cannot_be_read_is_named():
    environ = {"PBS_NODEFILE": "/files/nodes"}
    assert message_of(find, environ) == f"PBS_NODEFILE: hostfile /files/nodes: no such file{YOURSELF}"
    assert message_of(find, environ, nodes="n1\nn2 x").startswith("PBS_NODEFILE: /files/nodes:2: 'n2 x': expected")


def test_none_is_open_mpi_s_word_for_no_hostfile():
    none = {"OMPI_MCA_orte_default_hostfile": "none"}
    assert find(none) is None
    assert hosts_in({"HYDRA_HOST_FILE": "/files/mine", **none}, mine="h1") == "h1"


def test_the_batch_system_comes_before_a_default_hostfile():
    environ = {"PBS_NODEFILE": "/files/a", "HYDRA_HOST_FILE": "/files/b"}
    assert hosts_in(environ, a="n1", b="h1") == "n1:1"
    assert hosts_in({**environ, "LSB_MCPU_HOSTS": "h3 3", "LSB_DJOB_HOSTFILE": "/files/b"}, a="n1", b="h1") == "h3:3"
    assert hosts_in({**environ, "SLURM_JOB_NODELIST": "s1", "LSB_MCPU_HOSTS": "h3 3"}, a="n1", b="h1") == "s1"


slots_by_name = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 5), min_size=1, max_size=6
)


@given(slots_by_name)
def test_every_batch_system_gives_the_same_hosts(slots):
    hosts = ",".join(f"{name}:{number}" for name, number in slots.items())
    nodelist = ",".join(slots)
    repeated = ",".join(f"{number}(x1)" if number % 2 else str(number) for number in slots.values())
    lines = "".join(f"{name}\n" * number for name, number in slots.items())
    assert hosts_in({"SLURM_JOB_NODELIST": nodelist, "SLURM_TASKS_PER_NODE": repeated}) == hosts
    assert hosts_in({"LSB_MCPU_HOSTS": " ".join(f"{name} {number}" for name, number in slots.items())}) == hosts
    assert hosts_in({"LSB_DJOB_HOSTFILE": "/files/x"}, x=lines) == hosts
    assert hosts_in({"PBS_NODEFILE": "/files/x"}, x=lines) == hosts


values = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from(["n", "[", "]", "-", ",", "1", "07", "(x2)", " ", "4", "::1", "\n", "²", "/files/x"]),
        max_size=10,
    ).map("".join),
)


@given(st.dictionaries(st.sampled_from(VARIABLES), values), st.text(max_size=40))
def test_any_environment_is_an_allocation_or_nothing_or_a_usage_error(environ, text):
    try:
        allocation = find_allocation(environ, lambda path: text)
    except UsageError:
        return
    if allocation is not None:
        assert allocation.hosts
        assert allocation.why
        assert all(host.slots is None or host.slots >= 1 for host in allocation.hosts)
