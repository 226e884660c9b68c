"""The way of one gradient, as docs/architecture.md has it, is what steps of real ranks call; found by tracing them."""

import re
import threading
from pathlib import Path

import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.kernels import native
from ringreduce.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PACKAGE = f"{Path(rr.__file__).parent}/"
STEPS = 4
OVER_MPI = ("transport/message.py", "send")  # here messages go from thread to thread
COMPILED = ("collectives/compiled.py", "allreduce")


def way():
    """(file, function), line by line of the page."""
    lines = PAGE.read_text().partition("The way of one gradient")[2].split("```")[1].splitlines()
    named = [re.findall(r"([\w/]+\.py) ((?:\w+, )*[\w.]+)", line) for line in lines]
    return [
        [(file, name.rpartition(".")[2]) for file, names in each for name in names.split(", ")]
        for each in named
        if each
    ]


def traced(hosts, steps):
    """What these steps call in ringreduce, on all ranks, as (file, function), in order."""
    calls, is_on = [], threading.Event()

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and is_on.is_set() and file.startswith(PACKAGE):
            calls.append((file.removeprefix(PACKAGE), frame.f_code.co_name))

    def program():
        model = torch.nn.Linear(1024, 1024, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(STEPS):
            rr.barrier()
            if step in steps:
                is_on.set()
            optimizer.zero_grad()
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            rr.barrier()
            is_on.clear()

    before = threading.getprofile()
    threading.setprofile(note)
    try:
        run_ranks(len(hosts), program, hosts=hosts)
    finally:
        threading.setprofile(before)
    return calls


def test_the_way_of_one_gradient_is_that_of_a_traced_step():
    lines, on_a_host = way(), traced([0, 0], [STEPS - 1])
    assert len(lines) > 10
    over_hosts = traced([0, 0, 1], [0, STEPS - 1])  # the first step, too: what is new is announced
    seen = {*on_a_host, *over_hosts}
    absent = {OVER_MPI} if native.module else {OVER_MPI, COMPILED}
    assert {each for line in lines for each in line} - seen == absent
    at = 0
    for file, name in [line[0] for line in lines[:-1] if line[0] not in absent]:  # step() has begun before
        assert (file, name) in on_a_host[at:], f"{file} {name} is not called where the page has it"
        at = on_a_host.index((file, name), at)
