"""Do the quick tests notice a broken line? Breaks one line after the other, and demands that a test fails each time.

    python tests/mutants.py                    all of them, half a minute each; the last line counts the survivors
    python tests/mutants.py ring hook          those whose reason holds one of these words
    python tests/mutants.py --list

Every mutant is made in a copy of the tree, in a temporary folder, which the tests import instead of this one; nothing
here is changed, so it may be interrupted at any moment. The tests that probably notice run first, then all of the
quick tier. A hang counts as noticed: with threads or ranks that wait for ever there is no other sign.

A text that does not stand exactly once in its file is an error, and so is a rename: mend the mutant then.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = [each.name for each in ROOT.iterdir() if each.name == ".ci" or not each.name.startswith((".", "site"))]
LIKELY_S, REST_S = 400, 1200
"""How long the likely tests, and all others, may take: more is a hang."""


class Mutant(NamedTuple):
    """`old` stands once in `file`; `new` in its place is wrong, as `why` says; `likely` tests notice it."""

    why: str
    file: str
    old: str
    new: str
    likely: str


MUTANTS = [
    Mutant(
        "ring: the wrong chunk is received",
        "ringreduce/partition.py",
        "(owned - 2 - i) % size, True",
        "(owned - 1 - i) % size, True",
        "tests/unit/test_partition.py tests/ranks/test_allreduce_algorithms.py",
    ),
    Mutant(
        "ring: nobody waits for the segment that comes",
        "ringreduce/collectives/ring.py",
        "        yield request\n",
        "",
        "tests/ranks/test_ring.py tests/ranks/test_allreduce_algorithms.py",
    ),
    Mutant(
        "ring: a receive is posted into memory that is still being sent",
        "ringreduce/collectives/ring.py",
        "                yield send\n",
        "",
        "tests/ranks/test_ring.py tests/ranks/test_allreduce_algorithms.py tests/ranks/test_random.py",
    ),
    Mutant(
        "ring: a segment's scratch is used again one segment too early",
        "ringreduce/collectives/ring.py",
        "self.scratch[index % RECEIVES_AHEAD]",
        "self.scratch[index % (RECEIVES_AHEAD - 1)]",
        "tests/ranks/test_ring.py tests/ranks/test_allreduce_algorithms.py",
    ),
    Mutant(
        "segments: the last element of each is left out",
        "ringreduce/partition.py",
        "min(start + length, high)",
        "min(start + length, high - 1)",
        "tests/unit/test_partition.py",
    ),
    Mutant(
        "shared memory: a rank waits for the wrong flag",
        "ringreduce/collectives/shared.py",
        "yield flags.arrival(SUMMED, sequence)",
        "yield flags.arrival(0, sequence)",
        "tests/ranks/test_shared.py tests/unit/test_interleavings.py",
    ),
    Mutant(
        "shared memory: a flag runs one turn ahead",
        "ringreduce/transport/window.py",
        "self._flags[self.rank][flag] = sequence + 1",
        "self._flags[self.rank][flag] = sequence + 2",
        "tests/unit/test_window.py tests/ranks/test_shared.py",
    ),
    Mutant(
        "shared memory: one slot too few, so one is filled while others read it",
        "ringreduce/transport/window.py",
        "return views[sequence % SLOTS]",
        "return views[sequence % (SLOTS - 1)]",
        "tests/unit/test_window.py tests/ranks/test_shared.py tests/unit/test_interleavings.py",
    ),
    Mutant(
        "counters: a total that is raised before its counter hides the submission",
        "ringreduce/transport/counters.py",
        "        for each in ids:\n",
        "        self._words[TOTAL] += 1\n        for each in ids:\n",
        "tests/unit/test_leader.py",
    ),
    Mutant(
        "counters: they stay at their highest value and do not wrap around",
        "ringreduce/transport/counters.py",
        "counters[each] = (counters[each] + 1) & WRAP",
        "counters[each] = min(counters[each] + 1, WRAP)",
        "tests/unit/test_leader.py",
    ),
    Mutant(
        "schedule: the leader overwrites what the slowest member has not read",
        "ringreduce/transport/counters.py",
        "for words in self._words) > RING:",
        "for words in self._words) > 2 * RING:",
        "tests/unit/test_leader.py",
    ),
    Mutant(
        "leader: one that lags does not look for what faster ranks have submitted",
        "ringreduce/negotiation/leader.py",
        "self._news = True  # a faster rank may have submitted one already",
        "self._news = False",
        "tests/unit/test_leader.py",
    ),
    Mutant(
        "short: a sum of an earlier submission is used again",
        "ringreduce/negotiation/short.py",
        "below, self._below = list(self._below.values()), dict.fromkeys(self._below)",
        "below = list(self._below.values())",
        "tests/unit/test_short.py",
    ),
    Mutant(
        "leader: news from below is lost",
        "ringreduce/negotiation/leader.py",
        "self._applied_below[child] = message.applied\n        self._news = True",
        "self._applied_below[child] = message.applied",
        "tests/unit/test_leader.py",
    ),
    Mutant(
        "wakeup: an engine that sleeps does not say so, and nobody wakes it",
        "ringreduce/engine/inbox.py",
        "self._asleep = True  # first",
        "self._asleep = False  # first",
        "tests/unit/test_inbox.py tests/ranks/test_api.py",
    ),
    Mutant(
        "hook: the last parameter is forgotten",
        "ringreduce/torch/hooks.py",
        "for gradient in thawed:",
        "for gradient in thawed[:-1]:",
        "tests/ranks/test_torch_optimizer_patterns.py tests/ranks/test_torch_optimizer_lifecycle.py",
    ),
    Mutant(
        "hook: a model that is wrapped again is heard by both optimizers",
        "ringreduce/torch/hooks.py",
        "        if older is not None:\n",
        "        if older is None and older is not None:\n",
        "tests/ranks/test_torch_optimizer_lifecycle.py",
    ),
    Mutant(
        "optimizer: a gradient is sent before its last backward pass",
        "ringreduce/optim/reducer.py",
        "not each.lacks(self.passes)",
        "not each.lacks(1)",
        "tests/ranks/test_torch_optimizer_buckets.py",
    ),
    Mutant(
        "bucket: the last one, which is not full, is forgotten",
        "ringreduce/optim/buckets.py",
        "return buckets + [members for members, _ in open_ones.values()]",
        "return buckets",
        "tests/ranks/test_torch_optimizer_buckets.py",
    ),
    Mutant(
        "bucket: one that backward has submitted is submitted again by step()",
        "ringreduce/optim/reducer.py",
        "for each in self._buckets if not each.begun and each.trained",
        "for each in self._buckets if each.trained",
        "tests/ranks/test_torch_optimizer_buckets.py",
    ),
    Mutant(
        "bucket: a rank that splits one does not say so",
        "ringreduce/optim/reducer.py",
        "        if refuses:\n",
        "        if not refuses:\n",
        "tests/ranks/test_torch_optimizer_buckets.py",
    ),
    Mutant(
        "agreement: a response has two places in the schedule",
        "ringreduce/negotiation/negotiator.py",
        "        self._schedule([[]])",
        "        self._schedule([[], []])",
        "tests/ranks/test_allreduce_algorithms.py tests/ranks/test_api.py",
    ),
    Mutant(
        "agreement: run what all ranks but one have submitted",
        "ringreduce/negotiation/coordinator.py",
        "        return len(self._members) - len(self._joined)",
        "        return len(self._members) - len(self._joined) - 1",
        "tests/unit/test_coordinator.py",
    ),
    Mutant(
        "cache: forgotten numbers are kept",
        "ringreduce/negotiation/negotiator.py",
        "self.cache.forget(number)",
        "number",
        "tests/unit/test_interleavings.py tests/ranks/test_random.py",
    ),
    Mutant(
        "process sets: one is removed without a word to its own ranks",
        "ringreduce/engine/process_sets.py",
        "                state.coordinator.close(why)",
        "                pass",
        "tests/unit/test_interleavings.py",
    ),
    Mutant(
        "process sets: the counters of a removed one are those of the next",
        "ringreduce/engine/process_sets.py",
        "                    self._host.clear(self._resources[each], self._world.rank in self.members[each])",
        "                    pass",
        "tests/unit/test_interleavings.py",
    ),
    Mutant(
        "negotiation: a response is applied before its place in the schedule",
        "ringreduce/negotiation/negotiator.py",
        " if self._awaits_response else None",
        "",
        "tests/unit/test_interleavings.py",
    ),
    Mutant(
        "shutdown: a rank that leaves says so only in the sets that there were",
        "ringreduce/negotiation/negotiation.py",
        "        if self.leaving and number in self.states:\n            self._leave(self.states[number])\n",
        "",
        "tests/unit/test_interleavings.py",
    ),
    Mutant(
        "shutdown: an engine ends while leaders below still report to it",
        "ringreduce/engine/leaving.py",
        " and state.negotiator.ended",
        "",
        "tests/unit/test_interleavings.py",
    ),
    Mutant(
        "shutdown: a coordinator ends before all have left",
        "ringreduce/engine/leaving.py",
        "len(state.left) < len(state.members)",
        "not state.left",
        "tests/unit/test_interleavings.py",
    ),
    Mutant(
        "Average: divided by one rank too many",
        "ringreduce/ops.py",
        "divide(partial, self.size)",
        "divide(partial, self.size + 1)",
        "tests/unit/test_ops.py",
    ),
    Mutant(
        "broadcast: the tree grows from another root",
        "ringreduce/collectives/tree.py",
        "(rank - root) % size",
        "(root - rank) % size",
        "tests/ranks/test_tree_and_bruck.py",
    ),
    Mutant(
        "GPU: the stream does not wait for the others' sums",
        "ringreduce/gpu/ipc_allreduce.py",
        "self.peers.follow(SUMMED, sequence, self.stream)",
        "pass",
        "tests/ranks/test_gpu.py",
    ),
    Mutant(
        "GPU: the engine's stream does not wait for the caller's",
        "ringreduce/gpu/stream.py",
        "        for event in submission.ready:\n            self.stream.wait(event)\n",
        "",
        "tests/ranks/test_gpu.py",
    ),
    Mutant(
        "join: a rank that has joined gives zeros to every operation",
        "ringreduce/negotiation/neutral.py",
        "Reduction(op, element, 1).neutral(flat)",
        "flat[...] = 0",
        "tests/ranks/test_join.py",
    ),
    Mutant(
        "Adasum: the coefficient is twice what it should be",
        "ringreduce/collectives/adasum.py",
        "(2 * a_squared)",
        "a_squared",
        "tests/ranks/test_adasum.py",
    ),
    Mutant(
        "alltoall: what comes is laid out in the reverse order of the ranks",
        "ringreduce/collectives/pairwise.py",
        "bounds_of(received)",
        "bounds_of(received[::-1])",
        "tests/ranks/test_pairwise.py",
    ),
    Mutant(
        "hosts: two units that are in flight share memory",
        "ringreduce/collectives/hierarchical.py",
        "place = unit % UNITS_AHEAD, use",
        "place = 0, use",
        "tests/ranks/test_allreduce_algorithms.py tests/ranks/test_hierarchical.py",
    ),
    Mutant(
        "halving: chunks beyond the last one, on the circle, stay behind",
        "ringreduce/collectives/halving.py",
        "[(first, size), (0, last)]",
        "[(first, size)]",
        "tests/ranks/test_halving.py tests/ranks/test_allreduce_algorithms.py",
    ),
    Mutant(
        "halving: finished chunks arrive in memory that is still being sent",
        "ringreduce/collectives/halving.py",
        "    yield from halves.sends  # their memory is received into from here on\n",
        "",
        "tests/ranks/test_halving.py tests/ranks/test_allreduce_algorithms.py",
    ),
    Mutant(
        "doubling: the partner of a rank behind those that folded in is its neighbour",
        "ringreduce/collectives/doubling.py",
        "other + folded",
        "other + folded - 1",
        "tests/ranks/test_doubling.py tests/ranks/test_allreduce_algorithms.py",
    ),
    Mutant(
        "bfloat16: ties are rounded up, not to even",
        "ringreduce/kernels/half_numpy.py",
        "np.uint32(0x7FFF)",
        "np.uint32(0x8000)",
        "tests/unit/test_half.py",
    ),
    Mutant(
        "launcher: the exit code of the rank that failed last",
        "launcher/report/outcome.py",
        "cause = min(failures.values()",
        "cause = max(failures.values()",
        "tests/launcher/test_outcome.py",
    ),
    Mutant(
        "launcher: a signal is named, but its exit code is not the shell's",
        "launcher/report/outcome.py",
        "128 - end.code",
        "127 - end.code",
        "tests/launcher/test_outcome.py",
    ),
    Mutant(
        "launcher: the last signal of all is one that a rank may ignore",
        "launcher/job/shutdown.py",
        "Step(signal.SIGKILL, 1.0)",
        "Step(signal.SIGTERM, 1.0)",
        "tests/launcher/test_shutdown.py tests/launcher/test_endings.py",
    ),
    Mutant(
        "launcher: secrets travel to other hosts",
        "launcher/forward.py",
        "if not (is_secret(name, value) or ",
        "if not (",
        "tests/launcher/test_forward.py",
    ),
    Mutant(
        "torch's groups: another rank is the root",
        "ringreduce/api/own_channel.py",
        'return (("root_rank", self.members[root]),)',
        'return (("root_rank", self.members[0]),)',
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: another operation",
        "ringreduce/torch/distributed/tensors.py",
        "dist.ReduceOp.BOR: ReduceOp.BITWISE_OR",
        "dist.ReduceOp.BOR: ReduceOp.BITWISE_XOR",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: wait() does not wait",
        "ringreduce/torch/distributed/work.py",
        "self._source = self.handle.wait(",
        "self._source = self.handle.ended and self.handle.wait(",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: a rank of the group is taken for one of the world",
        "ringreduce/api/own_channel.py",
        "payload=(self.members[destination], tag)",
        "payload=(destination, tag)",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: a message of any tag",
        "ringreduce/execution/send_receive.py",
        "if self._waits(submission) and kept.tag == submission.payload[1]:",
        "if self._waits(submission):",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: a future is done before its operation",
        "ringreduce/torch/distributed/work.py",
        "if self._is_told or not self._is_over or self._future is None:",
        "if self._is_told or self._future is None:",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: what is gathered together lies in another order",
        "ringreduce/torch/distributed/operations.py",
        "work.read(inputs), _joined(zip(*parts, strict=True))",
        "work.read(inputs), _joined(parts)",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "torch's groups: another rank's part of a reduce-scatter",
        "ringreduce/torch/distributed/operations.py",
        "arrays = _joined(zip(*parts, strict=True)), work.write(outputs)",
        "arrays = _joined([*zip(*parts, strict=True)][::-1]), work.write(outputs)",
        "tests/ranks/test_torch_distributed.py",
    ),
    Mutant(
        "launcher: a line has the prefix of the rank before",
        "launcher/output/prefix.py",
        "self._single[ranks[0]]",
        "self._single[ranks[0] - 1]",
        "tests/launcher/test_output.py tests/launcher/test_display.py tests/launcher/test_run.py",
    ),
    Mutant(
        "JAX: a module that is not there is imported",
        "ringreduce/jax/__init__.py",
        "from ringreduce.jax.optimizer import *",
        "from ringreduce.jax.optimizers import *",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "JAX: in jit a gradient stays this rank's",
        "ringreduce/jax/primitive.py",
        "return bind(backwards, list(map(ad.instantiate_zeros, gradients)))",
        "return list(map(ad.instantiate_zeros, gradients))",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "JAX: in jit the results are written over the arguments",
        "ringreduce/jax/xla.py",
        "host(_arrays(operands, inputs), _arrays(results, outputs))",
        "host(_arrays(operands, inputs), _arrays(operands, inputs))",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "Keras: gradients stay this rank's",
        "ringreduce/keras/optimizer.py",
        "                gradients = self._reduced(gradients)",
        "                pass",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "Keras: variables are rank 0's, whoever is the root",
        "ringreduce/keras/ops.py",
        "strict=True)), root_rank, process_set)",
        "strict=True)), 0, process_set)",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "Keras: a restored model keeps what it has",
        "ringreduce/keras/elastic.py",
        "            variable.assign(np.array(array))  # a copy",
        "            np.array(array)  # a copy",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "TensorFlow: of sparse gradients a sum is divided",
        "ringreduce/tensorflow/ops.py",
        "(process_set.size() or 1) if op is Average else 1",
        "(process_set.size() or 1)",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "TensorFlow: a tape's gradients stay this rank's",
        "ringreduce/tensorflow/training.py",
        "            flat[number] = each",
        "            flat[number] = flat[number]",
        "tests/end_to_end/test_frameworks.py",
    ),
    Mutant(
        "elastic: a lost rank is an error like others",
        "ringreduce/elastic/loop.py",
        "return not isinstance(error, MismatchError)",
        "return isinstance(error, MismatchError)",
        "tests/ranks/test_elastic.py tests/end_to_end/test_elastic_training.py",
    ),
    Mutant(
        "elastic: a list keeps what it has got since the commit",
        "ringreduce/elastic/commit.py",
        "            live[:] = items\n",
        "",
        "tests/unit/test_elastic_commit.py tests/ranks/test_elastic.py",
    ),
    Mutant(
        "elastic: a sampler counts this rank's items alone",
        "ringreduce/elastic/sampler.py",
        "count * self.num_replicas",
        "count",
        "tests/unit/test_sampler.py tests/ranks/test_torch_elastic.py",
    ),
    Mutant(
        "elastic: torch's state comes back without the optimizer's",
        "ringreduce/torch/elastic.py",
        "            adopt(value, saved, put_back)\n",
        "",
        "tests/ranks/test_torch_elastic.py tests/end_to_end/test_elastic_training.py",
    ),
    Mutant(
        "startup: a rank has its number of the start in a later world",
        "ringreduce/startup/survivors.py",
        "            ranks.index(start.rank),",
        "            start.rank,",
        "tests/elastic/test_deaths.py",
    ),
    Mutant(
        "startup: a host's clock is set the wrong way",
        "ringreduce/startup/clock.py",
        "np.median(by_host[host] - by_host[hosts[0]])",
        "np.median(by_host[hosts[0]] - by_host[host])",
        "tests/unit/test_clock.py",
    ),
    Mutant(
        "startup: a host's link is as good as its better direction",
        "ringreduce/startup/links.py",
        "[min(pair) for pair in zip(out",
        "[max(pair) for pair in zip(out",
        "tests/unit/test_links.py",
    ),
    Mutant(
        "monitor: a stall is reported again and again",
        "ringreduce/monitor/stalls.py",
        "if last <= stalled_s < 2 * last:",
        "if last <= stalled_s < last:",
        "tests/ranks/test_stalls.py",
    ),
    Mutant(
        "monitor: a timeline ends before its last events",
        "ringreduce/monitor/recording.py",
        "            self._until = message.followed",
        "            self._timeline.stop()",
        "tests/ranks/test_timeline.py",
    ),
    Mutant(
        "monitor: what fails beside training goes on failing",
        "ringreduce/monitor/side_job.py",
        "                self.failed = True\n",
        "",
        "tests/ranks/test_timeline.py tests/ranks/test_stalls.py",
    ),
    Mutant(
        "ps: a step's gradients are summed, not averaged",
        "ringreduce/ps/consistency.py",
        "            array /= len(self.pushes)\n",
        "",
        "tests/ranks/test_ps.py tests/unit/test_ps.py",
    ),
    Mutant(
        "ps: a worker waits for the fastest one",
        "ringreduce/ps/consistency.py",
        "self.pushes[worker] - min(self.pushes.values())",
        "self.pushes[worker] - max(self.pushes.values())",
        "tests/ranks/test_ps.py tests/unit/test_ps.py",
    ),
    Mutant(
        "sweeps: a study knows nothing of a trial's reports",
        "ringreduce/sweeps/trial.py",
        'self._team.call(self.number, "report", float(value), step)',
        "None",
        "tests/ranks/test_sweep.py",
    ),
    Mutant(
        "arrays: results stay in the copy of what is not contiguous",
        "ringreduce/arrays/view.py",
        "                assign(array, copy)",
        "                pass",
        "tests/ranks/test_layouts.py tests/unit/test_arrays.py",
    ),
    Mutant(
        "arrays: autograd does not see that a tensor has changed",
        "ringreduce/arrays/view.py",
        "if writable and not array.is_inference():",
        "if not writable and not array.is_inference():",
        "tests/unit/test_arrays.py tests/ranks/test_torch_ops.py tests/ranks/test_torch_compatibility.py",
    ),
    Mutant(
        "membership: ranks that all compute are killed",
        "launcher/job/membership.py",
        "if len(silent) == len(self.ranks):",
        "if not silent:",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: where nobody is lost ranks must hurry",
        "launcher/job/membership.py",
        "        if self._unsettled:\n            self._limit",
        "        if self.ranks:\n            self._limit",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: a spare is left to train alone",
        "launcher/job/membership.py",
        "                self._fresh.add(present[-1])\n",
        "",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: a failure soon after a loss is blamed on that loss",
        "launcher/job/membership.py",
        "self._dead.keys() - {rank for rank, first in self._unsettled.items() if first > self._works}",
        "self._dead.keys() - self._unsettled.keys()",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: a rank that blames others is the cause",
        "launcher/job/membership.py",
        "        self._works = 0  # those are the cause\n",
        "",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: the ranks of a lost host are left out one by one",
        "launcher/job/losses.py",
        "TOGETHER_S = 0.05",
        "TOGETHER_S = 0.0",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: a spare that is lost in init() is waited for",
        "launcher/job/membership.py",
        " or not self._is_formed]",
        "]",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: a spare without a state passes for one with",
        "ringreduce/startup/worlds.py",
        "commits if self.has_state else NO_COMMITS",
        "commits",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: the job ends before the last losses are decided",
        "launcher/job/losses.py",
        "return bool(self._gone)",
        "return False",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: who re-forms does not look for a newer list",
        "ringreduce/startup/survivors.py",
        "        if members.newer_than(membership.number):\n            raise _NewerError\n",
        "",
        "tests/unit/test_simulated_membership.py",
    ),
    Mutant(
        "membership: ranks that have done their work do not count",
        "launcher/job/membership.py",
        "return len(present) + len(self._left) >=",
        "return len(present) >=",
        "tests/unit/test_simulated_membership.py",
    ),
]


def tree(folder: Path, source: Path) -> Path:
    """A copy of the tree, with an import path that has its packages under the names that they are imported by."""
    for name in COPIED:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, folder / "tree" / name)  # with __pycache__: compiled kernels are in it
        else:
            shutil.copy2(path, folder / "tree" / name)
    (folder / "imports").mkdir()
    (folder / "imports" / "ringreduce").symlink_to(folder / "tree" / "ringreduce")
    (folder / "imports" / "ringrun").symlink_to(folder / "tree" / "launcher")
    return folder / "tree"


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it."""
    if text.count(mutant.old) != 1:
        sys.exit(
            f"{mutant.why}: expected {mutant.old!r} once in {mutant.file}, found it {text.count(mutant.old)} times"
        )
    return text.replace(mutant.old, mutant.new)


def environment(copy: Path) -> dict[str, str]:
    """What makes tests, and the jobs that they start, import the copy; other environments are this tree's."""
    pythons = {name: ROOT / f".venv-test-{name.lower()}" / "bin" / "python" for name in ("MPICH", "FRAMEWORKS")}
    own = {f"TEST_{name}_PYTHON": str(python) for name, python in pythons.items() if python.exists()}
    return own | os.environ | {"PYTHONPATH": str(copy.parent / "imports")}


def noticed(copy: Path, paths: list[str], limit_s: float) -> str:
    """The test that fails, or what else has shown that something is wrong; empty when all is well."""
    # without the test that all texts of MUTANTS stand in their files: it notices each of them
    flags = "-x -q -rfE --color=no -p no:cacheprovider --timeout=90 --ignore=tests/unit/test_mutants.py"
    command = [sys.executable, "-m", "pytest", *flags.split(), *paths]
    log = copy.parent / "log"
    with log.open("w") as output:
        # a session of its own: what hangs is ended with all that it has started
        process = subprocess.Popen(
            command, cwd=copy, env=environment(copy), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"a hang of more than {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    told = log.read_text(errors="replace")
    if code in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    if failed:
        return failed[1]
    if hung := re.search(r"in (test_\w+)", told):
        return f"{hung[1]}, a hang"
    return f"exit code {code}: {told.strip().splitlines()[-1] if told.strip() else ''}"


def verdict(copy: Path, mutant: Mutant, source: Path, rest: bool) -> str:
    """Which test notices the mutant; empty when none does."""
    path = copy / mutant.file
    before = (source / mutant.file).read_text()
    path.write_text(mutated(before, mutant))
    try:
        likely = [word for word in mutant.likely.split() if not word.startswith("tests/") or (copy / word).exists()]
        return noticed(copy, likely, LIKELY_S) or (noticed(copy, [], REST_S) if rest else "")
    finally:
        shutil.copy2(source / mutant.file, path)


def table(mutants: list[Mutant], source: Path, rest: bool) -> Iterator[bool]:
    """Print a line for each; True for every one that no test notices."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = tree(Path(folder), source)
        for mutant in mutants:
            begin = time.monotonic()
            by = verdict(copy, mutant, source, rest)
            seconds = time.monotonic() - begin
            print(f"{'killed  ' if by else 'SURVIVED'} {seconds:4.0f} s  {mutant.why:<75} {by}", flush=True)
            yield not by


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose reason holds one of these")
    parser.add_argument("--list", action="store_true", help="print their reasons, and check that all still fit")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; by default this one")
    parser.add_argument("--likely", action="store_true", help="run the likely tests only")
    return parser.parse_args()


def main() -> int:
    """Return 1 when a mutant has survived."""
    asked = parse()
    words = re.compile("|".join(rf"\b{re.escape(word)}" for word in asked.words))  # "ps:" is none of "groups:"
    chosen = [each for each in MUTANTS if words.search(each.why)]
    for mutant in chosen:
        mutated((asked.tree / mutant.file).read_text(), mutant)
    if asked.list:
        print("\n".join(mutant.why for mutant in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed, and what runs is ended
    survivors = sum(table(chosen, asked.tree.resolve(), not asked.likely))
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
