"""Signals reach ringrun whatever its main thread does."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.jobs import executable
from tests.support.patience import patient, wait_until


def run(program):
    """Run a Python program that has SignalReader, and `send(number)` to signal itself."""
    head = """
        import os, queue, signal, subprocess, sys, threading, time
        from ringrun.job.signals import SignalReader
        got = queue.SimpleQueue()
        def send(number):
            os.kill(os.getpid(), number)
    """
    source = textwrap.dedent(head) + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30)


def test_signals_are_delivered_in_their_order_even_those_from_before_the_start():
    done = run("""
        reader = SignalReader(got.put)
        send(signal.SIGUSR1)
        send(signal.SIGINT)
        reader.start()
        print(got.get(timeout=5), got.get(timeout=5))
        send(signal.SIGINT)
        print(got.get(timeout=5))
    """)
    assert (done.stdout, done.returncode) == ("10 2\n2\n", 0), done.stderr


def test_a_main_thread_that_runs_no_python_keeps_none_back():
    done = run("""
        import ctypes
        SignalReader(lambda number: (print(number, flush=True), os._exit(7))).start()
        threading.Timer(0.2, send, [signal.SIGTERM]).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # another thread gets it: nothing wakes this one
        ctypes.CDLL(None).sleep(20)
    """)
    assert (done.stdout, done.returncode) == ("15\n", 7), done.stderr


def test_the_third_that_is_to_end_it_ends_it():
    done = run("""
        SignalReader(got.put).start()
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
            send(number)
            got.get(timeout=5)
        send(signal.SIGTERM)  # with the last one
        time.sleep(1.1)
        print("still here", got.empty(), flush=True)
        send(signal.SIGTERM)
        time.sleep(20)
    """)
    assert (done.stdout, done.returncode) == ("still here True\n", 143), done.stderr


def test_what_the_parent_has_said_to_ignore_is_ignored():
    done = run("""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        SignalReader(got.put).start()
        send(signal.SIGHUP)
        send(signal.SIGTERM)
        print(got.get(timeout=5))
    """)
    assert done.stdout == "15\n", done.stderr


@pytest.mark.without_mpi
def test_a_parent_that_ignores_the_ends_of_its_own_children_hides_no_rank_s(ringrun):
    """An ignored SIGCHLD is inherited, and leaves no exit code to whoever waits for a child."""
    done = ringrun("-np", 2, "sh", "-c", "exit 3", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert done.returncode == 3, done.stderr


def test_before_a_job_a_hangup_ends_ringrun_but_not_under_nohup():
    program = """
        from ringrun.job.signals import exit_at
        signal.signal(signal.SIGHUP, signal.{})
        exit_at((signal.SIGTERM, signal.SIGHUP))
        send(signal.SIGHUP)
        send(signal.SIGTERM)
    """
    assert run(program.format("SIG_DFL")).returncode == 129
    assert run(program.format("SIG_IGN")).returncode == 143


def test_a_request_for_stacks_that_comes_at_the_very_end_ends_nothing():
    done = run("""
        reader = SignalReader(got.put)
        reader.start()
        class Last:
            def __del__(self):  # after the interpreter has put the handlers back
                send(10)
        import builtins
        builtins.last = Last()
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.without_mpi
def test_a_request_for_stacks_that_comes_before_the_job_ends_nothing(start, tmp_path):
    script = executable(tmp_path / "hosts", "#!/bin/sh\ntouch asked\nsleep 0.5\necho localhost:1\n")
    ringrun = start("--host-discovery-script", script, "touch", "ran")
    wait_until((tmp_path / "asked").exists)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        ringrun.send_signal(number)
    assert ringrun.wait(patient(20)) == 0
    assert (tmp_path / "ran").exists()
