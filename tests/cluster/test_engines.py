"""Dask, Spark and Ray on hosts that nobody can log in to: their head and the program are on h0, workers elsewhere."""

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.patience import wait_until

pytestmark = pytest.mark.timeout(600)
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java (.ci/packages installs it)")
HEAD = "10.77.0.1"

ON_DASK = f"""
import sys
from distributed import Client
import ringreduce.dask
from tests.support.engines import go_on, train, trained

if __name__ == "__main__":
    with Client("tcp://{HEAD}:8786", timeout=300) as client:
        client.wait_for_workers(3)
        slow = {{"client": client, "timeout_s": 300, "start_timeout": 300}}
        assert ringreduce.dask.run(train, (2,), **slow) == trained(3, 2)
        print("sizes", ringreduce.dask.run(go_on, (sys.argv[1], 2), elastic=True, min_np=2, **slow))
"""
ON_SPARK = f"""
import sys, time
from pyspark.sql import SparkSession
import ringreduce as rr
import ringreduce.spark
from tests.support.engines import go_on, sleep, train, trained

if __name__ == "__main__":
    made = SparkSession.builder.master("spark://{HEAD}:7077").config("spark.driver.host", "{HEAD}")
    made = made.config("spark.executor.memory", "512m").config("spark.ui.enabled", "false")
    made = made.config("spark.task.maxFailures", "1")  # counts where an executor is lost that its worker outlives
    spark = made.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR").getOrCreate()
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:  # the driver is counted, too
        time.sleep(0.1)
    slow = {{"num_proc": 2, "start_timeout": 300}}
"""
GOES_ON = """
    print("sizes", ringreduce.spark.run_elastic(go_on, (sys.argv[1], 3), max_num_proc=3, **slow))
"""
FAILS = """
    assert ringreduce.spark.run(train, (2,), **slow) == trained(2, 2)
    try:
        ringreduce.spark.run(sleep, (sys.argv[1],), **slow)
    except rr.JobFailedError as error:
        print(error)
"""
ON_RAY = f"""
import sys
import ray
import ringreduce.ray
from tests.support.engines import go_on, train, trained

if __name__ == "__main__":
    ray.init("{HEAD}:6379")
    slow = {{"np": 3, "timeout_s": 300, "start_timeout": 300}}
    assert ringreduce.ray.run(train, (2,), **slow) == trained(3, 2)
    print("sizes", ringreduce.ray.run(go_on, (sys.argv[1], 3), elastic=True, **slow))
"""


@pytest.fixture
def start(nodes, python, engines):
    """start(K, COMMAND …): a program on host K that has the engines; Spark starts this `python`."""
    own = {**engines, "PYSPARK_PYTHON": str(python)}
    nothing = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return lambda k, *command, **pipes: nodes.start(
        k, command, env={**own, "SPARK_LOCAL_IP": nodes.addresses[k]}, **(pipes or nothing)
    )


@pytest.fixture
def run(start, python, script):
    """Runs a program on h0; returns the process, whose output is for `ended`."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return lambda program, *arguments: start(0, python, script(program), *arguments, **both)


def ended(program):
    """What a program has written that ends well."""
    said = program.communicate(timeout=120)[0]
    assert program.returncode == 0, said
    return said


@pytest.fixture
def ranks(nodes):
    """The folder in which ranks say that they are there."""
    (folder := nodes.folder / "ranks").mkdir()
    return folder


def await_(ranks, pattern, count, program):
    """Wait until so many ranks have said so; return when the last did."""

    def look():
        found = len(list(ranks.glob(pattern))) == count
        assert found or program.poll() is None, program.communicate()[0]
        return found

    wait_until(look, within_s=120)
    return max(each.stat().st_mtime for each in ranks.glob(pattern))


@pytest.mark.adapters
def test_the_loss_of_a_host_of_dask_is_that_of_its_rank(nodes, start, run, python, ranks):
    quiet = ["--no-dashboard"]
    start(0, python, "-m", "distributed.cli.dask_scheduler", "--host", HEAD, "--port", 8786, *quiet)
    for k in (1, 2, 3):
        one = ["--nworkers", 1, "--nthreads", 1, *quiet]
        start(k, python, "-m", "distributed.cli.dask_worker", f"tcp://{HEAD}:8786", *one)
    program = run(ON_DASK, ranks)
    await_(ranks, "1 *", 3, program)
    killed_s = time.time()
    nodes.kill_all(3)
    print(f"the others' next step was done after {await_(ranks, '2 *', 2, program) - killed_s:.3f} s")
    said = ended(program)
    assert "sizes [[3, 2], [3, 2]]\n" in said
    assert re.search(r"-- ringrun: rank \d of 3 failed -.*\nhow .*\nwhere +host h3, pid", said)


@pytest.fixture
def spark(nodes, start, engines):
    """A Spark whose master is on h0, and that has a worker with one core on h1 and on h2; `spark(K)` starts another."""
    spark_class = Path(engines["PYTHONPATH"].partition(":")[0], "pyspark", "bin", "spark-class")

    def daemon(k, kind, *options):
        start(k, spark_class, f"org.apache.spark.deploy.{kind}", "--host", nodes.addresses[k], *options)

    def worker(k):
        has = ["--cores", 1, "--memory", "1g", "--work-dir", nodes.folder / f"work-{k}"]
        daemon(k, "worker.Worker", *has, f"spark://{HEAD}:7077")

    daemon(0, "master.Master", "--port", 7077)
    worker(1)
    worker(2)
    return worker


def end_executor(nodes, k):
    """Kill Spark's executor on host k, and its ranks, but not its worker, which starts a new one."""
    for pid, line in nodes.processes(k).items():
        if "spark.deploy.worker.Worker" not in line:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@needs_java
@pytest.mark.parametrize("what", ["host", "executor"])
def test_the_loss_of_an_executor_of_spark_is_that_of_its_rank(what, nodes, spark, run, ranks):
    """What comes in its place lends a slot, also where Spark gives up the task that was lost."""
    program = run(ON_SPARK + GOES_ON, ranks)
    await_(ranks, "1 *", 2, program)
    killed_s = time.time()
    nodes.kill_all(2) if what == "host" else end_executor(nodes, 2)
    print(f"the other's next step was done after {await_(ranks, '2 *', 1, program) - killed_s:.3f} s")
    if what == "host":
        spark(3)
    said = ended(program)
    assert "sizes [[2, 1, 2], [2, 1, 2]]\n" in said
    assert re.search(r"-- ringrun: rank \d of 2 failed -.*\nhow .*\nwhere +host h2, pid", said)


@needs_java
def test_the_loss_of_an_executor_of_spark_ends_a_job_that_is_not_elastic(nodes, spark, run, ranks):
    program = run(ON_SPARK + FAILS, ranks)
    await_(ranks, "*", 2, program)
    killed_s = time.time()
    nodes.kill_all(2)
    said = ended(program)
    print(f"the program had the report after {time.time() - killed_s:.3f} s")
    assert re.search(r"-- ringrun: rank \d of 2 failed first -.*\nhow .*\nwhere +host h2, pid", said)
    assert "at org.apache.spark" not in said


@pytest.fixture
def ray(nodes, python, engines):
    """ray(K): makes a node of host K, with one CPU; h0 is the head."""
    start = [python, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    of_all = ["--num-cpus", 1, "--object-store-memory", 80 << 20]
    own = {**engines, "RAY_health_check_timeout_ms": "60000"}  # a node that is slow is not dead

    def begin(k):
        role = ["--address", f"{HEAD}:6379"] if k else ["--head", "--port", 6379, "--include-dashboard", "false"]
        command = [*start, *role, "--node-ip-address", nodes.addresses[k], *of_all]
        for _ in range(3):  # it gives up after 30 s, however busy the machine is
            done = nodes.run(k, command, env=own, timeout=100)
            if done.returncode == 0:
                return
            nodes.kill_all(k)
        raise AssertionError(done)

    return begin


@pytest.mark.xdist_group("frameworks")  # as what else starts Ray, which takes all cores
def test_the_loss_of_a_node_of_ray_is_that_of_its_rank_and_another_one_lends(nodes, ray, run, ranks):
    """The head lends, too: its slot is one of another host than the program's."""
    for k in range(3):
        ray(k)
    program = run(ON_RAY, ranks)
    await_(ranks, "1 *", 3, program)
    killed_s = time.time()
    nodes.kill_all(2)
    print(f"the others' next step was done after {await_(ranks, '2 *', 2, program) - killed_s:.3f} s")
    ray(3)
    said = ended(program)
    assert "sizes [[3, 2, 3], [3, 2, 3], [3, 2, 3]]\n" in said
    assert re.search(r"-- ringrun: rank \d of 3 failed -.*\nhow .*\nwhere +host h2, pid", said)
