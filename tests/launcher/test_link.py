"""The sockets between ringrun and its agents: both kinds, who gets in, and what is seen when the other end is gone."""

import queue
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun import network
from ringrun.connection import link as link_module
from ringrun.connection.link import Address, HostSilentError, Link, Listener, connect
from ringrun.connection.wire import Note, Signal
from ringrun.errors import MachineError
from ringrun.network import own_addresses, parse_interfaces


@pytest.fixture
def listener(tmp_path: Path):
    made = Listener(str(tmp_path), ["127.0.0.1"], 4)
    yield made
    made.close()


def elsewhere(address: Address) -> Address:
    """As an agent on another host sees it."""
    return Address("another-host", address.path, address.port, address.addresses)


@pytest.mark.parametrize("is_local", [True, False])
def test_messages_go_both_ways(listener: Listener, is_local: bool) -> None:
    served: queue.SimpleQueue[Link] = queue.SimpleQueue()
    listener.start(served.put)
    ours = connect(listener.address if is_local else elsewhere(listener.address), listener.authkey)
    theirs = served.get(timeout=10)
    assert ours.is_local == theirs.is_local == is_local
    threading.Thread(target=ours.send, args=[Note("é" * 100_000)]).start()  # longer than what a socket holds
    theirs.send(Signal(15))
    assert theirs.receive() == Note("é" * 100_000)
    assert ours.receive() == Signal(15)
    if not is_local:
        assert ours.peer_address == ours.own_address == theirs.own_address == "127.0.0.1"
    ours.close()
    with pytest.raises((EOFError, OSError)):
        theirs.receive()
    theirs.close()


def test_a_stranger_gets_nowhere_and_holds_nobody_up(listener: Listener) -> None:
    served: queue.SimpleQueue[Link] = queue.SimpleQueue()
    listener.start(served.put)
    silent = socket.create_connection(("127.0.0.1", listener.address.port))
    with pytest.raises(OSError, match=r"127\.0\.0\.1 port \d+: digest"):
        connect(elsewhere(listener.address), b"another key")
    friend = connect(elsewhere(listener.address), listener.authkey)
    theirs = served.get(timeout=10)
    assert theirs.peer_address == "127.0.0.1"
    assert served.empty()
    theirs.close()
    friend.close()
    silent.close()


def test_all_that_was_tried_is_told() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(OSError, match=rf"127\.0\.0\.1 port {port}: .*refused; ::1 port {port}: "):
        connect(Address("h1", "/nowhere", port, ("127.0.0.1", "::1")), b"key")
    with pytest.raises(OSError, match="no address of h1 is known"):
        connect(Address("h1", "/nowhere"), b"key")


def test_a_silent_host_is_told_from_one_that_has_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_LOOK_S", 0.1)
    served: queue.SimpleQueue[Link] = queue.SimpleQueue()
    listener.start(served.put)
    ours = connect(elsewhere(listener.address), listener.authkey)
    theirs = served.get(timeout=10)
    threading.Timer(1.0, theirs.send, [Note("late")]).start()
    assert ours.receive() == Note("late"), "nobody speaks, but the kernel at the other end is there"
    monkeypatch.setattr(link_module, "SILENT_S", -1.0)
    with pytest.raises(HostSilentError):
        ours.receive()
    ours.close()
    theirs.close()


@given(st.builds(Address, st.just("h1"), st.text(), st.integers(0, 65535), st.lists(st.just("10.0.0.1")).map(tuple)))
def test_an_address_survives_a_variable(address: Address) -> None:
    assert Address.parse(str(address)) == address


def test_interfaces_and_addresses_of_this_host() -> None:
    assert parse_interfaces(None) == ()
    assert parse_interfaces("lo") == ("lo",)
    with pytest.raises(MachineError, match="the interfaces lo have no address that other hosts could reach"):
        own_addresses(["h1"], ["lo"])


def test_of_many_hosts_only_some_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(network, "_address_towards", lambda host: asked.append(host))
    monkeypatch.setattr(network, "_interface_addresses", lambda names: iter(["10.0.0.1"]))
    for count in (0, 1, 8, 9, 512):
        asked.clear()
        assert own_addresses([f"h{number}" for number in range(count)], ()) == ("10.0.0.1",)
        assert asked[:1] == ["h0"][:count]
        assert min(count, 4) <= len(asked) <= 8
