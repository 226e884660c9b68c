"""Commits that are kept in files: from these a state goes on in a new process, and never from one that is torn."""

import os

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.elastic import ObjectState, kept
from ringreduce.elastic.commit import Commit
from ringreduce.elastic.kept import Kept
from ringreduce.runtime import Runtime
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks


def tree(number):
    return {"w": np.arange(1000.0) + number, "b": torch.full((3,), number), "step": number, "text": "x" * number}


def take(files, commit, number, after=None):
    """Commit to the file whose turn it is."""
    commit.file = files.next(after)
    commit.take(tree(number), number)
    return commit


def values(found):
    commit = Commit()
    commit.read(found)
    one = commit.tree()
    return one["w"].tolist(), one["b"].tolist(), one["step"], one["text"]


def test_a_new_process_reads_the_newest(tmp_path):
    files, commits = Kept(tmp_path, 0), [Commit(), Commit()]
    for number in range(1, 6):
        take(files, commits[number % 2], number, commits[1 - number % 2].file)
        found = Kept(tmp_path, 0).newest()
        assert found.number == number
        assert values(found) == (list(np.arange(1000.0) + number), [number] * 3, number, "x" * number)
    assert sorted(os.listdir(tmp_path)) == ["0.a", "0.b"]
    assert Kept(tmp_path, 1).newest() is None


@pytest.mark.parametrize("written", [0, 500])
def test_what_is_being_written_counts_for_nothing(tmp_path, written):
    files, commits = Kept(tmp_path, 0), [Commit(), Commit()]
    take(files, commits[0], 1)
    take(files, commits[1], 2, commits[0].file)
    torn = files.next(after=commits[1].file)
    torn.begin(commits[0].memory.nbytes)
    torn.memory[:written] = 0xFF
    found = Kept(tmp_path, 0).newest()
    assert found.number == 2
    assert values(found)[2] == 2


@pytest.mark.parametrize("count", [0, 3, 5000], ids=["none", "few", "many"])
@pytest.mark.parametrize("is_finished", [False, True], ids=["begun", "finished"])
def test_a_commit_that_is_overwritten_while_it_is_read_is_not_taken(tmp_path, monkeypatch, count, is_finished):
    files, commit = Kept(tmp_path, 0), Commit()
    commit.file = files.next(None)
    commit.take({"w": np.arange(count)}, 1)
    fromfile = np.fromfile

    def while_it_is_read(file, dtype, nbytes):
        found = fromfile(file, dtype, nbytes)
        commit.file.begin(nbytes)
        if is_finished:
            commit.file.finish(2, "another")
        return found

    monkeypatch.setattr(kept.np, "fromfile", while_it_is_read)
    assert Kept(tmp_path, 0).newest() is None


def test_the_file_written_last_is_not_written_next_whatever_the_other_has(tmp_path):
    """As where an earlier job left a commit of a higher number, and this one began again."""
    take(Kept(tmp_path, 0), Commit(), 9)
    files = Kept(tmp_path, 0)
    last = take(files, Commit(), 1).file
    assert (last.path.name, last.number) == ("0.b", 1)
    following = files.next(last)
    assert (following.path.name, following.number) == ("0.a", 9)


def test_a_file_that_is_cut_off_counts_for_nothing(tmp_path):
    take(Kept(tmp_path, 0), Commit(), 7)
    os.truncate(tmp_path / "0.a", (tmp_path / "0.a").stat().st_size - 1)
    assert Kept(tmp_path, 0).newest() is None


def test_arrays_of_other_sizes_take_other_room(tmp_path):
    files, commit = Kept(tmp_path, 0), Commit()
    for number, count in enumerate([10, 1000, 0, 3], 1):
        commit.file = files.next(None)
        commit.take({"w": np.arange(count)}, number)
        other = Commit()
        other.read(files.newest())
        assert other.tree()["w"].tolist() == list(range(count))


def test_without_room_a_commit_is_in_own_memory_and_that_is_said_once(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    files, commit = Kept(tmp_path, 0), Commit()
    take(files, commit, 1)
    monkeypatch.setattr(kept.os, "posix_fallocate", full)
    other = take(files, Commit(), 2, commit.file)
    assert other.tree()["step"] == 2
    assert other.file is None
    assert files.next(commit.file) is None
    assert [each for each in caplog.messages if "No space left on device" in each] == [caplog.messages[0]]
    assert Kept(tmp_path, 0).newest().number == 1


def test_what_is_written_in_parts_is_whole_in_the_end(tmp_path, monkeypatch):
    """The system writes 2 GiB at most at a time."""
    pwrite = os.pwrite
    monkeypatch.setattr(kept.os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    take(Kept(tmp_path, 0), Commit(), 5000)
    found = Kept(tmp_path, 0).newest()
    assert found.number == 5000
    assert values(found)[2:] == (5000, "x" * 5000)


def test_without_room_for_all_but_the_arrays_there_is_no_commit_either(tmp_path, monkeypatch, caplog):
    def full(file, begin, length):
        if begin:
            raise OSError(28, "No space left on device")
        allocate(file, begin, length)

    allocate = os.posix_fallocate
    monkeypatch.setattr(kept.os, "posix_fallocate", full)
    monkeypatch.setattr(kept.os, "pwrite", lambda file, data, at: len(data))  # it would not fail
    files = Kept(tmp_path, 0)
    commit = take(files, Commit(), 1)
    assert commit.tree()["step"] == 1
    assert commit.file is None
    assert "No space left on device" in caplog.text
    assert files.newest() is None


def test_after_a_restart_all_ranks_go_on_with_the_most_advanced_commit(tmp_path, monkeypatch):
    """Each host has what its own ranks kept; one has nothing, since it is new."""
    for host, number in enumerate((3, 5)):
        take(Kept(tmp_path / str(host), 0), Commit(), number) if (tmp_path / str(host)).mkdir() is None else None
    monkeypatch.setattr(Runtime, "was_restarted", lambda self: True)
    monkeypatch.setattr("ringreduce.elastic.state.Kept", lambda _, state: Kept(tmp_path / str(rr.rank()), state))
    monkeypatch.setattr(ObjectState, "_numbers", iter([0] * 3))

    def program():
        state = ObjectState(w=np.zeros(1000), b=torch.zeros(3, dtype=torch.int64), step=0, text="")
        return rr.elastic.run(lambda state: (state.step, state.w[-1], state.b.tolist(), state.commits))(state)

    assert run_ranks(3, program, settings=Settings(state_dir="x")) == [(5, 1004.0, [5] * 3, 6)] * 3


@pytest.mark.parametrize(
    ("restarted", "root", "commits"),
    [(True, None, 3), (False, None, 0), (True, 0, 0)],
    ids=["a restart", "a start", "a loss"],
)
def test_what_is_kept_counts_after_a_restart_alone(tmp_path, monkeypatch, restarted, root, commits):
    """A first attempt may find files of an older job, and ranks that have lost others have newer states in memory."""
    take(Kept(tmp_path, 0), Commit(), 3)
    monkeypatch.setattr(Runtime, "was_restarted", lambda self: restarted)
    monkeypatch.setattr(Runtime, "root", root)
    monkeypatch.setattr(ObjectState, "_numbers", iter([0]))

    def program():
        state = ObjectState(w=np.zeros(1000), b=torch.zeros(3, dtype=torch.int64), step=0, text="")
        state.resume()
        state.step += 10  # between two training functions; nothing has been lost since
        state.resume()
        return state.commits, state.step - 10

    assert run_ranks(1, program, settings=Settings(state_dir=str(tmp_path))) == [(commits, commits)]


def test_one_rank_of_a_host_keeps_its_commits(tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "is_elastic", True)
    monkeypatch.setattr(ObjectState, "_numbers", iter([0] * 3))

    def program():
        state = ObjectState(step=rr.rank())
        state.save()
        return state._committed.file is not None

    assert run_ranks(3, program, settings=Settings(state_dir=str(tmp_path))) == [True, False, False]
    assert Kept(tmp_path, 0).newest().number == 1
