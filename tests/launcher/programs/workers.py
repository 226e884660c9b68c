"""Work in threads, or in processes that are forked, spawned and a program, as argv[1] says."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time


def deep(n):
    return deep(n - 1) if n else [k * k for k in range(50)]


def busy(end_s):
    while time.monotonic() < end_s:
        deep(30)


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        workers = [threading.Thread(target=busy, args=(time.monotonic() + 3,)) for _ in range(2)]
    else:
        contexts = [multiprocessing.get_context(how) for how in ("fork", "spawn")]
        workers = [context.Process(target=time.sleep, args=(4,)) for context in contexts]
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(4)"])
    for worker in workers:
        worker.start()
    open(f"up{os.environ['RANK']}", "w").close()
    for worker in workers:
        worker.join()
    print("done" if sys.argv[1] == "threads" else ([worker.exitcode for worker in workers], child.wait()))
