"""A rank has children of every kind, and says what becomes of them."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import ringreduce as rr

rr.init()


def refused(how):
    with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
        try:
            pool.submit(abs, 3).result()
        except Exception as error:
            return type(error).__name__


if __name__ == "__main__":
    print("spawn", refused("spawn"), "forkserver", refused("forkserver"))
    own = "import ringreduce as rr; rr.init(); print('sum', rr.allreduce(1.0, op=rr.Sum))"
    child = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True)
    print("child", child.returncode, child.stderr.splitlines()[-1])
    if rr.rank() == 1:
        ringrun = os.path.join(os.path.dirname(sys.executable), "ringrun")
        inside = subprocess.run([ringrun, "-np", "2", sys.executable, "-c", own], capture_output=True, text=True)
        print("inside", inside.returncode, sorted(inside.stdout.split()))
    pending = rr.allreduce_async(1.0, op=rr.Sum) if rr.rank() else None  # rank 0 calls it later
    pid = os.fork()
    if pid == 0:
        for ask in (rr.poll, rr.synchronize) if pending else ():
            try:
                ask(pending)
            except rr.NotInitializedError as error:
                print("forked handle", error)
        try:
            rr.allreduce(1.0)
        except rr.NotInitializedError as error:
            again = type(error)(str(pickle.loads(pickle.dumps(error))))  # as torch's DataLoader makes it again
            place = rr.rank(), rr.size(), rr.local_rank(), rr.cross_size(), rr.global_process_set.included()
            print("forked", *place, again)
        try:
            rr.init()
        except rr.StartupError as error:
            print("forked", error)
        samplers = rr.DistributedSampler(6, shuffle=False), rr.elastic.ElasticSampler(range(6), shuffle=False)
        print("forked samplers", rr.rank(), *[list(each) for each in samplers])
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print("total", rr.synchronize(pending) if pending else rr.allreduce(1.0, op=rr.Sum))
