"""ringreduce.spark.run() and run_elastic() in a Spark of this machine."""

import re
import shutil

import pytest

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java (.ci/packages installs it)")

SESSION = """
import os, signal, sys, threading, time
from pyspark.sql import SparkSession
import ringreduce as rr
import ringreduce.spark
from tests.support.engines import gone, pids, sleep, train, trained

if __name__ == "__main__":
    made = SparkSession.builder.master(os.environ.get("MASTER", "local[2]")).config("spark.ui.enabled", "false")
    made = made.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    spark = made.getOrCreate()
    slow = {"start_timeout": 300}
"""
WORKS = """
    assert ringreduce.spark.run(train, (2,), env={"ASKED": "for"}, **slow) == trained(2, 2, "for")
    try:
        ringreduce.spark.run(train, (2, True), num_proc=2, **slow)
    except rr.JobFailedError as error:
        print(error)
    assert ringreduce.spark.run_elastic(train, (3,), num_proc=2, min_num_proc=1, **slow) == trained(2, 3)
    print("done")
"""
INTERRUPTED = """
    folder = sys.argv[1]
    def interrupt():
        while len(pids(folder)) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        ringreduce.spark.run(sleep, (folder,), num_proc=2, **slow)
    except KeyboardInterrupt:
        print("interrupted")
    assert all(map(gone, pids(folder)))
    while spark.sparkContext.statusTracker().getActiveStageIds():
        time.sleep(0.1)
    print("done")
"""
CANNOT_LEND = """
    def break_it(_):
        import ringrun.lending
        ringrun.lending._reached = lambda *_: 1 / 0
        return []
    # Spark gives the next stage the same Python processes
    spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(break_it).collect()
    try:
        ringreduce.spark.run(train, (2,), num_proc=2, **slow)
    except rr.StartupError as error:
        assert "ZeroDivisionError: division by zero" in str(error), error
        assert "\tat " not in str(error), "no frames of Java"
        print("done")
"""
TWO_EXECUTORS = """
    for scale in (2, 3):
        assert ringreduce.spark.run(train, (scale,), num_proc=2, **slow) == trained(2, scale)

    executors = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    print("executors", len(executors) - 1)
    print("done")
"""


@pytest.fixture
def in_spark(on_engine):
    """Runs a program in a session of two cores; returns what it has printed."""
    return lambda program, *arguments, **variables: on_engine(SESSION + program, *arguments, **variables)


@pytest.mark.adapters
@pytest.mark.timeout(600)
def test_ranks_run_in_a_session_again_and_again(in_spark):
    said = in_spark(WORKS)
    assert "\ndone\n" in said
    assert "[1] rank 1 says hello\n" in said, "output of all ranks comes to the driver"
    assert re.search(r"-- ringrun: rank 1 of 2 failed first -.*\nhow +exit code 1\nwhere +host \S+, pid \d+", said)


@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_ranks_and_frees_the_cores(in_spark, tmp_path):
    (folder := tmp_path / "ranks").mkdir()
    assert "\ninterrupted\ndone\n" in in_spark(INTERRUPTED, folder)


@pytest.mark.timeout(600)
def test_tasks_that_cannot_lend_say_why_at_once(in_spark):
    assert "\ndone\n" in in_spark(CANNOT_LEND)


@pytest.mark.timeout(600)
def test_ranks_run_on_two_executors_again_and_again(in_spark):
    assert "\nexecutors 2\ndone\n" in in_spark(TWO_EXECUTORS, MASTER="local-cluster[2,1,1024]")
