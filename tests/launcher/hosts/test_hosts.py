"""Hosts from the command line and from files, and ranks over them: pure functions, and what they refuse."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun import cli
from ringrun.errors import UsageError
from ringrun.hosts import Host, assign, without
from ringrun.hosts.host import parse_host_list
from ringrun.hosts.hostfile import parse_hostfile, read_hostfile
from tests.support.loops import in_a_loop

names = st.one_of(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,15}", fullmatch=True),
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda address: f"{address}%eth0"),
)
slot_counts = st.integers(1, 9999)
hosts_with_slots = st.builds(Host, names, slot_counts)
bare_hosts = st.builds(Host, names)
distinct = {"min_size": 1, "max_size": 8, "unique_by": lambda host: host.name}
# pieces that the formats are made of, in any order
fragments = st.lists(
    st.sampled_from(
        [*"h1:2,4=#@%[] \t\n\0²٣é\ufeff\ud800", "\r\n", "::1", "slots", "max_slots", "cpu", "user", "9" * 5000]
    ),
    max_size=12,
).map("".join)
any_text = st.one_of(st.text(max_size=60), fragments)


def message_of(call, *arguments, **files):
    with pytest.raises(UsageError) as caught:
        call(*arguments, **files)
    return str(caught.value)


@in_a_loop(
    ("text", "hosts"),
    [
        ("h1:4,h2:4", [Host("h1", 4), Host("h2", 4)]),
        ("h1", [Host("h1", None)]),
        (" h1 , h2:2 ", [Host("h1", None), Host("h2", 2)]),
        ("node-1.example.org:8", [Host("node-1.example.org", 8)]),
        ("10.0.0.1:2", [Host("10.0.0.1", 2)]),
        ("[fe80::1]:2,[::1]", [Host("fe80::1", 2), Host("::1", None)]),
        ("[fe80::1%eth0]:2", [Host("fe80::1%eth0", 2)]),
        ("h2:1,h1:2,h2:3", [Host("h2", 4), Host("h1", 2)]),
        ("h1,h1,h2", [Host("h1", 2), Host("h2", 1)]),
        ("h1:3,h1,h2", [Host("h1", 4), Host("h2", 1)]),
        ("h1:2,h1:2,h2", [Host("h1", 4), Host("h2", None)]),
        ("h1:007", [Host("h1", 7)]),
    ],
)
def test_a_host_list(text, hosts):
    assert parse_host_list(text) == hosts


NUMBER = "expected a whole number from 1 to 999999"
NAME = "expected a host name of letters, digits, '.', '-' and '_'"


@in_a_loop(
    ("text", "message"),
    [
        ("", "-H, item 1, '': expected a host name, found nothing"),
        ("h1:4,", "-H, item 2, '': expected a host name, found nothing"),
        ("h1,,h2", "-H, item 2, '': expected a host name, found nothing"),
        (":4", "-H, item 1, ':4': expected a host name, found nothing"),
        ("h1,h2:four", f"-H, item 2, 'h2:four': slots: {NUMBER}, got 'four'"),
        ("h1:", f"-H, item 1, 'h1:': slots: {NUMBER}, got ''"),
        ("h1:0", f"-H, item 1, 'h1:0': slots: {NUMBER}, got '0'"),
        ("h1:-4", f"-H, item 1, 'h1:-4': slots: {NUMBER}, got '-4'"),
        ("h1:1.5", f"-H, item 1, 'h1:1.5': slots: {NUMBER}, got '1.5'"),
        ("h1:1_0", f"-H, item 1, 'h1:1_0': slots: {NUMBER}, got '1_0'"),
        ("h1:1000000", f"-H, item 1, 'h1:1000000': slots: {NUMBER}, got '1000000'"),
        ("[::1]:x", f"-H, item 1, '[::1]:x': slots: {NUMBER}, got 'x'"),
        ("h1 h2", f"-H, item 1, 'h1 h2': {NAME}, got 'h1 h2'"),
        ("-oProxyCommand=x", f"-H, item 1, '-oProxyCommand=x': {NAME}, got '-oProxyCommand=x'"),
        ("me@h1", f"-H, item 1, 'me@h1': {NAME}, got 'me@h1' (the user of a host belongs in ~/.ssh/config)"),
        (
            "fe80::1:2",
            "-H, item 1, 'fe80::1:2': an IPv6 address must be in brackets, as in [fe80::1]:4, got 'fe80::1:2'",
        ),
        (
            "[10.0.0.1]",
            "-H, item 1, '[10.0.0.1]': expected an IPv6 address in brackets, as in [fe80::1]:4, got '[10.0.0.1]'",
        ),
        ("[::1", "-H, item 1, '[::1': expected an IPv6 address in brackets, as in [fe80::1]:4, got '[::1'"),
        ("[::1]4", "-H, item 1, '[::1]4': expected an IPv6 address in brackets, as in [fe80::1]:4, got '[::1]4'"),
    ],
)
def test_a_wrong_host_list_is_told_by_its_item(text, message):
    assert message_of(parse_host_list, text) == message


def test_a_message_stays_short():
    assert len(message_of(parse_host_list, "h" * 100_000 + ":x")) < 300


@given(st.lists(st.one_of(hosts_with_slots, bare_hosts), **distinct))
def test_a_host_list_reads_what_str_writes(hosts):
    assert parse_host_list(",".join(map(str, hosts))) == hosts


@given(any_text)
def test_any_text_is_hosts_or_a_usage_error(text):
    for read in (parse_host_list, partial(parse_hostfile, source="hosts")):
        try:
            hosts = read(text)
        except UsageError as error:
            assert str(error).isprintable()  # noqa: PT017 - either is right
        else:
            assert hosts
            assert len({host.name for host in hosts}) == len(hosts)
            assert all(host.slots is None or host.slots >= 1 for host in hosts)


HOSTFILES = {
    "Open MPI": "h1 slots=4 max_slots=8\nh2 slots=2\n",
    "Open MPI's synonyms": "h1 count=4 max-count=4\nh2\tcpu = 2\n",
    "MPICH": "# two hosts\n\nh1:4   # the first\nh2:2",
    "Horovod": "h1 slots=4\r\nh2:2\r\n",
    "PBS": "h1\nh1\nh2\nh1\nh2\nh1\n",
    "BOM, old line ends": "\ufeffh1:4\rh2:2\r",
    "several times": "h1 slots=1\nh2:2\n  h1:3",
    "max_slots alone": "h1 max_slots=4\nh2 slots-max=2",
}


@in_a_loop("text", HOSTFILES.values())
def test_a_hostfile_in_each_form(text):
    assert parse_hostfile(text, "hosts") == [Host("h1", 4), Host("h2", 2)]


def test_plain_names_leave_their_slots_unsaid_unless_one_is_repeated():
    assert parse_hostfile("h1\nh2\n", "hosts") == [Host("h1", None), Host("h2", None)]
    assert parse_hostfile("h1\nh2\nh1\n", "hosts") == [Host("h1", 2), Host("h2", 1)]
    assert parse_hostfile("h1 slots=4\nh2\n", "hosts") == [Host("h1", 4), Host("h2", None)]
    assert parse_hostfile("[fe80::1]:3\n[::1] slots=2", "hosts") == [Host("fe80::1", 3), Host("::1", 2)]


SSH = "ringrun does not read it here; put it into ~/.ssh/config for this host"
KEYS = "expected slots= or max_slots="


@in_a_loop(
    ("line", "message"),
    [
        ("h2 slots=x", f"slots: {NUMBER}, got 'x'"),
        ("h2 slots=", f"slots: {NUMBER}, got ''"),
        ("h2:0", f"slots: {NUMBER}, got '0'"),
        ("h2 slot=4", f"unknown key 'slot', {KEYS}; did you mean slots=?"),
        ("h2 max_slot=4", f"unknown key 'max_slot', {KEYS}; did you mean max_slots=?"),
        ("h2 ifname=eth0", f"unknown key 'ifname', {KEYS}"),
        ("h2 usr=me", f"unknown key 'usr', {KEYS}; did you mean user=?"),
        ("h2 user=me", f"user=: {SSH}"),
        ("h2 username=me", f"username=: {SSH}"),
        ("h2 port=2222", f"port=: {SSH}"),
        ("h2:2 binding=rr", "binding=: ringrun does not bind ranks host by host; take it out"),
        ("h2 4", "expected key=value behind the host, as in slots=4, got '4'"),
        ("h2:2 slots=2", "slots: the slots are given twice; give them once"),
        ("h2 max_slots=2 max-slots=2", "max-slots: the slots are given twice; give them once"),
        ("h2 slots=4 max_slots=2", "expected max_slots to be at least slots=4, got 2"),
        ("slots=4", f"{NAME}, got 'slots=4'"),
        ("^h2", f"{NAME}, got '^h2'"),
        ("+n0", f"{NAME}, got '+n0'"),
        ("rank 0=h2 slot=1", f"unknown key '0', {KEYS}"),
        ("h2:1,h3:1", f"slots: {NUMBER}, got '1,h3:1'"),
    ],
)
def test_a_wrong_line_is_told_with_its_place(line, message):
    text = f"h1:4\n# comment\n  {line}\t# wrong\nh4\n"
    assert message_of(parse_hostfile, text, "my/hosts") == f"my/hosts:3: {line!r}: {message}"


@in_a_loop("text", ["", "\n\n", "# only\n  # comments", "\ufeff"])
def test_a_hostfile_without_hosts(text):
    expected = "hostfile empty: no host in it; expected a line for each host, as in 'h1 slots=4' or 'h1:4'"
    assert message_of(parse_hostfile, text, "empty") == expected


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path, monkeypatch):
    missing, empty, binary = (str(tmp_path / name) for name in ("missing", "empty", "binary"))
    Path(empty).touch()
    Path(binary).write_bytes(b"h1\n\xff\xfe")
    line = "a line for each host, as in 'h1 slots=4' or 'h1:4'"
    assert message_of(read_hostfile, missing) == f"hostfile {missing}: no such file"
    assert message_of(read_hostfile, str(tmp_path)) == f"hostfile {tmp_path}: a folder; expected a file with {line}"
    assert message_of(read_hostfile, empty) == f"hostfile {empty}: no host in it; expected {line}"
    assert message_of(read_hostfile, binary) == f"hostfile {binary}: not UTF-8 at byte 3; save it as UTF-8 text"
    assert message_of(read_hostfile, "a\0b").startswith("hostfile a\0b: cannot be read: embedded null byte")
    assert message_of(read_hostfile, f"{empty}/x") == f"hostfile {empty}/x: cannot be read: Not a directory"

    def refuse(path):  # root may read every file
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert message_of(read_hostfile, empty) == f"hostfile {empty}: cannot be read: Permission denied"


def two(host):
    return 2


def counts(hosts, size):
    return [(host.name, ranks) for host, ranks in assign(parse_host_list(hosts), size, two)]


@in_a_loop(
    ("hosts", "size", "expected"),
    [
        ("h1:4,h2:4", None, [("h1", 4), ("h2", 4)]),
        ("h1:4,h2", None, [("h1", 4), ("h2", 2)]),
        ("h1:4,h2:4", 8, [("h1", 4), ("h2", 4)]),
        ("h1:4,h2:4", 5, [("h1", 4), ("h2", 1)]),
        ("h1:4,h2:4", 4, [("h1", 4)]),
        ("h1:4,h2:4,h3:4", 1, [("h1", 1)]),
        ("h1,h2", 3, [("h1", 2), ("h2", 1)]),
        ("h1,h2", 7, [("h1", 4), ("h2", 3)]),
        ("h1,h2:3,h3", 9, [("h1", 3), ("h2", 3), ("h3", 3)]),
        ("h1:1,h2", 9, [("h1", 1), ("h2", 8)]),
    ],
)
def test_hosts_are_filled_in_order(hosts, size, expected):
    assert counts(hosts, size) == expected


def test_more_ranks_than_slots_is_told_with_both_numbers():
    assert message_of(counts, "h1:4,[::1]:2", 9) == (
        "-np 9: the hosts have only 6 slots (h1:4, [::1]:2); start at most 6 ranks, or give a host more slots, "
        "as in h1:7"
    )
    many = ",".join(f"h{number}:1" for number in range(100))
    assert "(h0:1, h1:1, h2:1, h3:1, h4:1, h5:1, h6:1, h7:1, and 92 more)" in message_of(counts, many, 101)


def test_only_hosts_that_get_ranks_are_asked_for_their_slots():
    asked = []

    def ask(host):
        asked.append(host.name)
        return 2

    assign(parse_host_list("h1,h2:1,h3,h4"), 4, ask)
    assert asked == ["h1", "h3"]


@given(st.lists(st.one_of(hosts_with_slots, bare_hosts), **distinct), st.integers(1, 60000))
def test_every_rank_has_its_place(hosts, size):
    limit = sum(host.slots or 0 for host in hosts)
    try:
        placed = assign(hosts, size, two)
    except UsageError:
        assert size > limit
        assert all(host.slots is not None for host in hosts)
        return
    assert sum(ranks for _, ranks in placed) == size
    assert all(ranks >= 1 for _, ranks in placed)
    assert all(host.slots is None or ranks <= host.slots for host, ranks in placed)
    remaining = iter(hosts)
    assert all(host in remaining for host, _ in placed)  # in order


@in_a_loop(
    ("excluded", "left"),
    [
        ("h2", "h1:4,h3"),
        ("h1:1", "h1:3,h2:2,h3"),
        ("h1:4,h3", "h2:2"),
        ("h2:3", "--exclude h2:3: h2 has only 2 slots"),
        ("h3:1", "--exclude h3:1: how many slots h3 has is unknown; name it without a number"),
        ("h4", "--exclude h4: there is no such host; there are h1:4, h2:2, h3"),
        ("h1,h2,h3", "--exclude h1,h2,h3: no host is left"),
    ],
)
def test_hosts_and_slots_are_left_out(excluded, left):
    hosts = parse_host_list("h1:4,h2:2,h3")
    if ": " in left:
        assert message_of(without, hosts, parse_host_list(excluded), "--exclude") == left
    else:
        assert without(hosts, parse_host_list(excluded), "--exclude") == parse_host_list(left)


def test_the_flag_takes_hosts_out_of_those_that_are_named():
    request = cli.parse(["-H", "h1:2,h2:2", "--exclude", "h1:1", "true"])
    assert list(map(str, request.found.hosts)) == ["h1:1", "h2:2"]
    assert message_of(cli.parse, ["--exclude", "h1", "true"]).startswith("--exclude: no hosts are named, by -H")
    assert message_of(cli.parse, ["-H", "h1", "--exclude", "h1;", "true"]).startswith(
        "--exclude, item 1, 'h1;': expected"
    )


def test_a_host_that_is_left_out_may_leave_the_file_while_the_job_runs(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("h1:2\nh2:2\nh3:1\n")
    request = cli.parse(["--hostfile", str(file), "--exclude", "h2,h3", "true"])
    assert request.found.hosts == [Host("h1", 2)]
    for text in ("h1:2\nh3:1\nh4:4\n", "h1:2\nh4:4\n", "h2:1\nh1:2\nh4:4\n"):
        file.write_text(text)
        assert request.find_hosts().hosts == [Host("h1", 2), Host("h4", 4)]
