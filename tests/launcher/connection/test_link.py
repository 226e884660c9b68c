"""The sockets between ringrun and its agents: both kinds, who gets in, and what is seen when the other end is gone."""

import contextlib
import hmac
import os
import queue
import resource
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun import network
from ringrun.connection import link as link_module
from ringrun.connection import listener as listener_module
from ringrun.connection import queued
from ringrun.connection.frames import HEAD_BYTES
from ringrun.connection.link import Gone, HostSilentError, connect, introduce
from ringrun.connection.listener import Listener
from ringrun.connection.queued import NotReadError
from ringrun.connection.wire import Address, Note, Signal
from ringrun.errors import MachineError
from ringrun.network import addresses_or_loopback, listen_everywhere, own_addresses, parse_interfaces
from tests.support.patience import patient, wait_until


class Served:
    """ringrun's end of a connection: what comes is kept until `receive`."""

    def __init__(self, link):
        self.link, self.send, self.close = link, link.send, link.close
        self._came = queue.SimpleQueue()

    def handle(self, message):
        self._came.put(message)
        return not isinstance(message, Gone)

    def receive(self):
        message = self._came.get(timeout=10)
        if isinstance(message, Gone):
            raise message.error
        return message


def keeping(served):
    """What Listener.start needs to put each connection there."""
    return lambda link: served.put(made := Served(link)) or made


@pytest.fixture
def listener(tmp_path):
    made = Listener(str(tmp_path), ["127.0.0.1"], 4)
    yield made
    made.close()


@pytest.fixture
def served():
    return queue.SimpleQueue()


@pytest.fixture
def pair(listener, served):
    """pair(is_local): both ends of a connection, an agent's and ringrun's."""
    with contextlib.ExitStack() as at_end:

        def connected(is_local):
            listener.start(keeping(served))
            ours = connect(listener.address if is_local else elsewhere(listener.address), listener.authkey)
            theirs = served.get(timeout=10)
            at_end.callback(theirs.close)
            at_end.callback(ours.close)
            return ours, theirs

        yield connected


def elsewhere(address):
    """As an agent on another host sees it."""
    return address._replace(host="another-host")


@pytest.mark.parametrize("is_local", [True, False])
def test_messages_go_both_ways(pair, is_local):
    ours, theirs = pair(is_local)
    assert ours.is_local == theirs.link.is_local == is_local
    threading.Thread(target=ours.send, args=[Note("é" * 100_000)]).start()  # longer than what a socket holds
    theirs.send(Signal(15))
    assert theirs.receive() == Note("é" * 100_000)
    assert ours.receive() == Signal(15)
    if not is_local:
        assert ours.peer_address == ours.own_address == theirs.link.own_address == "127.0.0.1"
    ours.close()
    with pytest.raises((EOFError, OSError)):
        theirs.receive()


def test_one_that_is_taken_just_now_is_waited_for_at_the_close(tmp_path, served):
    """It knows that it is taken, so it counts on a last word."""

    def slowly(link):
        time.sleep(0.3)
        return keeping(served)(link)

    listener = Listener(str(tmp_path), [], 1)
    listener.start(slowly)
    ours = connect(listener.address, listener.authkey)
    closing = threading.Thread(target=listener.close, args=(10.0,))
    closing.start()
    theirs = served.get(timeout=10)
    assert closing.is_alive()
    theirs.send(Signal(15))
    assert ours.receive() == Signal(15)
    ours.close()
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_a_stranger_gets_nowhere_and_holds_nobody_up(listener, served):
    listener.start(keeping(served))
    silent = socket.create_connection(("127.0.0.1", listener.address.port))
    with pytest.raises(
        OSError, match=r"127\.0\.0\.1 port \d+: what listens there has not shown that it knows this job's key"
    ):
        connect(elsewhere(listener.address), b"another key")
    friend = connect(elsewhere(listener.address), listener.authkey)
    theirs = served.get(timeout=10)
    assert theirs.link.peer_address == "127.0.0.1"
    assert served.empty()
    theirs.close()
    friend.close()
    silent.close()


def test_all_that_was_tried_is_told():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(OSError, match=rf"127\.0\.0\.1 port {port}: .*refused; ::1 port {port}: "):
        connect(Address("h1", "/nowhere", port, ("127.0.0.1", "::1")), b"key")
    with pytest.raises(OSError, match="no address of h1 is known"):
        connect(Address("h1", "/nowhere"), b"key")


def test_a_silent_host_is_told_from_one_that_has_closed(pair, monkeypatch):
    for module in (link_module, listener_module):
        monkeypatch.setattr(module, "LOOK_S", 0.1)
    ours, theirs = pair(False)
    threading.Timer(1.0, theirs.send, [Note("late")]).start()
    assert ours.receive() == Note("late"), "nobody speaks, but the kernel at the other end is there"
    ours.lost_after_s = -1.0
    with pytest.raises(HostSilentError):
        ours.receive()
    theirs.link.lost_after_s = -1.0
    with pytest.raises(HostSilentError):
        theirs.receive()


@pytest.mark.parametrize(("lost_after_s", "silent_ms"), [(30.0, 30_000), (0.5, 500)])
def test_a_host_is_silent_after_the_time_that_was_asked_for_and_not_before(lost_after_s, silent_ms, pair, monkeypatch):
    ours, theirs = pair(False)
    for link in (ours, theirs.link):
        link.lost_after_s = lost_after_s
        for ms, is_silent in ((silent_ms, False), (silent_ms + 1, True)):
            acknowledged = bytes(link_module._LAST_ACKNOWLEDGEMENT_AT) + struct.pack("I", ms)
            told = SimpleNamespace(getsockopt=lambda *_, info=acknowledged: info)
            with monkeypatch.context() as patched:
                patched.setattr(link, "_socket", told)
                assert link.is_silent() == is_silent


def test_both_ends_have_the_kernel_probe_for_a_lost_host_in_the_time_that_was_asked_for(tmp_path, served):
    listener = Listener(str(tmp_path), ["127.0.0.1"], 4, lost_after_s=60.0)
    listener.start(keeping(served))
    assert Address.parse(str(listener.address)).lost_after_s == 60.0, "the agents are told"
    ours = connect(elsewhere(listener.address), listener.authkey)
    for link in (served.get(timeout=10).link, ours):
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert tuple(link._socket.getsockopt(socket.IPPROTO_TCP, option) for option in options) == (15, 7, 6)
        assert link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    ours.close()
    listener.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_host_whose_policy_forbids_md5_gets_in_too(pair, is_local, monkeypatch):
    """As OpenSSL in FIPS mode: any use of MD5 is a ValueError."""
    digest = hmac.digest

    def refusing(key, message, kind):
        if kind not in ("sha256", "sha512"):
            raise ValueError("[digital envelope routines] unsupported")
        return digest(key, message, kind)

    monkeypatch.setattr(hmac, "digest", refusing)
    for name in ("hmac.new", "hashlib.new", "hashlib.md5"):
        monkeypatch.setattr(name, None)
    ours, theirs = pair(is_local)
    ours.send(Note("in"))
    assert theirs.receive() == Note("in")


def test_a_descriptor_follows_a_message_and_another_message_that(pair):
    ours, theirs = pair(True)
    read, write = os.pipe()
    theirs.send(Note("before"))
    theirs.link.send_descriptor(read)
    theirs.send(Note("after"))
    os.close(read)
    assert ours.receive() == Note("before")
    received = ours.receive_descriptor()
    os.write(write, b"through")
    assert os.read(received, 7) == b"through"
    assert not os.get_inheritable(received), "the rank gets it as its stdin, and only so"
    assert ours.receive() == Note("after")
    for descriptor in (write, received):
        os.close(descriptor)


@pytest.mark.parametrize("is_local", [True, False])
def test_who_sends_to_one_that_does_not_read_never_waits_and_the_order_stays(pair, is_local):
    ours, theirs = pair(is_local)
    notes = [Note(f"{number} " + "x" * 100_000) for number in range(200)]  # more than any socket holds
    for note in notes:
        theirs.send(note)
    if is_local:
        read, write = os.pipe()
        theirs.link.send_descriptor(read)
        notes.append(Signal(9))
        theirs.send(notes[-1])
    assert [ours.receive() for _ in range(200)] == notes[:200]
    if is_local:
        received = ours.receive_descriptor()
        os.write(write, b"through")
        assert os.read(received, 7) == b"through"
        for descriptor in (read, write, received):
            os.close(descriptor)
        assert ours.receive() == notes[-1]
    ours.send(Note("heard all the while"))
    assert theirs.receive() == Note("heard all the while")


def test_who_sends_much_waits_until_there_is_room(pair):
    ours, theirs = pair(True)
    sent = []

    def give():
        for number in range(100):
            theirs.link.await_room()
            theirs.send(Note("x" * 100_000))
            sent.append(number)
        theirs.send(Signal(1))

    giver = threading.Thread(target=give)
    giver.start()
    wait_until(lambda: len(sent) > 5)
    assert len(sent) < 50
    while ours.receive() != Signal(1):
        pass
    giver.join()
    for _ in range(50):
        theirs.send(Note("x" * 100_000))
    theirs.close()
    with pytest.raises(ConnectionResetError):
        theirs.link.await_room()
    theirs.send(Signal(1))  # nobody gets it, and nobody need mind


def test_a_link_that_takes_nothing_for_too_long_is_lost_and_a_slow_one_is_not(pair, monkeypatch):
    monkeypatch.setattr(listener_module, "LOOK_S", 0.05)
    now_s = [0.0]
    monkeypatch.setattr(queued, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    ours, theirs = pair(True)
    for _ in range(4):
        theirs.send(Note("x" * 1_000_000))
    for _ in range(3):  # longer than --lost-after, in all
        now_s[0] += 20.0
        assert ours.receive() == Note("x" * 1_000_000)
        assert not theirs.link.is_stuck()
    now_s[0] += 31.0
    with pytest.raises(NotReadError):
        theirs.receive()


@pytest.mark.parametrize("is_local", [True, False])
def test_what_is_no_message_is_told_from_the_end_by_both_ends(pair, is_local):
    ours, theirs = pair(is_local)
    for sender, receiver in ((theirs.link, ours), (ours, theirs)):
        sender._socket.sendall(sender._writer.frame(b"z") + b"\xff" * HEAD_BYTES)
        with pytest.raises(ValueError, match="unknown tag b'z'"):
            receiver.receive()
    with pytest.raises(ValueError, match="message 1 of this connection was changed"):
        ours.receive()


def test_only_the_chosen_addresses_are_listened_at(tmp_path, served):
    listener = Listener(str(tmp_path), ["127.0.0.2", "127.0.0.3"], 4)
    listener.start(keeping(served))
    port = listener.address.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    for chosen in ("127.0.0.2", "127.0.0.3"):
        link = connect(Address("another-host", "", port, (chosen,)), listener.authkey)
        served.get(timeout=10).close()
        link.close()
    listener.close()


def test_a_job_can_start_again_at_its_port_at_once(tmp_path, served):
    """The kernel keeps the ends of connections that this side has closed, for a minute."""
    port = 0
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        listener = Listener(str(tmp_path / attempt), ["127.0.0.1"], 4, port=port or free_port())
        port = listener.address.port
        listener.start(keeping(served))
        with contextlib.closing(connect(elsewhere(listener.address), listener.authkey)) as ours:
            served.get(timeout=10).close()
            with pytest.raises(EOFError):
                ours.receive()
        listener.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(0.5, 1000), (1000, 0.5)])
def test_strangers_that_say_nothing_are_few_at_a_time_and_not_for_ever(
    tmp_path, served, monkeypatch, timeout_s, patience_s
):
    """Where they are so many that nobody else gets in, their time is short."""
    monkeypatch.setattr(listener_module, "HANDSHAKE_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(listener_module, "_SILENT_S", patience_s)
    monkeypatch.setattr(listener_module, "_MOST_GREETINGS", 3)
    listener = Listener(str(tmp_path), ["127.0.0.1"], 8)
    before = threading.active_count()
    listener.start(keeping(served))
    slow, *strangers = [
        socket.create_connection(("127.0.0.1", listener.address.port), source_address=(address, 0))
        for address in ("127.0.0.2", *["127.0.0.1"] * 5)
    ]
    most = 0
    friends = []
    friend = threading.Thread(target=lambda: friends.append(connect(elsewhere(listener.address), listener.authkey)))
    friend.start()
    while friend.is_alive():
        most = max(most, len(listener._greetings))
        time.sleep(0.01)
    friends.append(served.get(timeout=10))
    assert friends[-1].link.peer_address == "127.0.0.1"
    assert most == 3
    assert threading.active_count() <= before + 2, "however many there are"
    assert strangers[0].recv(100), "ringrun's nonce"
    with pytest.raises(ConnectionResetError):  # upon which an agent tries again
        strangers[0].recv(100)
    stays = [each for each in listener._greetings.values() if "127.0.0.2" in str(each.address)]
    assert len(stays) == (timeout_s > patience_s), "there are few of this address"
    for each in (slow, *strangers, *friends):
        each.close()
    listener.close()


def test_where_nothing_is_read_any_more_each_other_end_knows(listener, capsys):
    """Who started it has given no other way to hear of it."""
    taken = []

    def take(link):
        taken.append(link)
        if len(taken) == 2:
            raise RuntimeError("can't start new thread")
        return Served(link)

    listener.start(take)
    with contextlib.closing(connect(listener.address, listener.authkey)) as ours:
        connect(listener.address, listener.authkey).close()
        with pytest.raises((EOFError, OSError)):
            ours.receive()
    wait_until(lambda: not link_module.is_listening(str(Path(listener.address.path).parent)))
    taken[1].close()
    assert capsys.readouterr().err == (
        "ringrun cannot read its connections any more, and ends them: RuntimeError: can't start new thread\n"
    )


def test_a_connection_for_which_no_descriptor_is_free_is_taken_later(listener, served):
    """The last of several: a thread of an earlier test may free a descriptor for the first of them meanwhile."""
    said = queue.SimpleQueue()
    ours = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    connected = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    try:
        most = max(each.fileno() for each in ours) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))  # none is free above it
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        listener.start(keeping(served), said.put)
        complaint = ""
        while ours and not complaint:
            connected.append(ours.pop())
            connected[-1].settimeout(10.0)  # the queue of connections is short
            connected[-1].connect(listener.address.path)
            with contextlib.suppress(queue.Empty):
                complaint = said.get(timeout=1)
        assert "Too many open files" in complaint
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
        for each in ours:
            each.close()
    for each in connected:
        link = introduce(each, listener.authkey, 30.0)
        served.get(timeout=10).close()
        link.close()
    assert said.empty(), "it is said once"


def test_an_agent_tries_again_while_nothing_answers(listener, served, monkeypatch):
    """As when ringrun's host drops what more than its queue holds."""
    attempts = 0
    create = socket.create_connection

    def overwhelmed(*arguments, **options):
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise TimeoutError("timed out")
        return create(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", overwhelmed)
    listener.start(keeping(served))
    link = connect(elsewhere(listener.address), listener.authkey)
    assert attempts == 3
    served.get(timeout=10).close()
    link.close()
    attempts = -1000
    with pytest.raises(OSError, match="port 1: timed out"):
        connect(Address("h1", "", 1, ("10.0.0.1",), connect_s=0.3), b"key")


seconds = st.floats(0, 1e9)
addresses = st.lists(st.text()).map(tuple)


@given(st.builds(Address, st.text(), st.text(), st.integers(0, 65535), addresses, seconds, seconds))
def test_an_address_survives_a_variable(address):
    assert Address.parse(str(address)) == address


def test_interfaces_and_addresses_of_this_host():
    assert parse_interfaces(None) == ()
    assert parse_interfaces("lo") == ("lo",)
    with pytest.raises(MachineError, match="the interfaces lo have no address that other hosts could reach"):
        own_addresses(["h1"], ["lo"])


def test_a_host_without_a_network_has_its_loopback(monkeypatch):
    monkeypatch.setattr(network, "_interface_addresses", lambda names: iter(["10.0.0.1"]))
    assert addresses_or_loopback() == ("10.0.0.1",)
    monkeypatch.setattr(network, "_interface_addresses", lambda names: iter([]))
    assert addresses_or_loopback() == ("127.0.0.1",)


@pytest.mark.parametrize("six", [False, True])
def test_what_listens_everywhere_is_reached_by_each_address(monkeypatch, six):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: six)
    with listen_everywhere(1) as listener:
        for address in ["127.0.0.1", "::1"][: 1 + six]:
            socket.create_connection((address, listener.getsockname()[1]), patient(10)).close()


def test_an_address_at_which_nothing_can_listen_is_not_told(tmp_path, monkeypatch):
    table = tmp_path / "if_inet6"
    rows = {"1": "80", "2": "40", "3": "08"}  # permanent, tentative, a duplicate
    table.write_text("".join(f"fd{'0' * 29}{digit} 02 40 00 {flags} lo\n" for digit, flags in rows.items()))
    monkeypatch.setattr(network, "_IPV6_TABLE", str(table))
    monkeypatch.setattr(network, "_address_towards", lambda host: "fe80::1")
    assert own_addresses(["h1"], ["lo"]) == ("fd00::1",)
    monkeypatch.setattr(network, "_interface_addresses", lambda names: iter(["10.0.0.1"]))
    assert own_addresses(["h1"], ()) == ("10.0.0.1",)


def test_of_many_hosts_only_some_names_are_looked_up(monkeypatch):
    asked = []
    monkeypatch.setattr(network, "_address_towards", lambda host: asked.append(host))
    monkeypatch.setattr(network, "_interface_addresses", lambda names: iter(["10.0.0.1"]))
    for count in (0, 1, 8, 9, 512):
        asked.clear()
        assert own_addresses([f"h{number}" for number in range(count)], ()) == ("10.0.0.1",)
        assert asked[:1] == ["h0"][:count]
        assert min(count, 4) <= len(asked) <= 8
