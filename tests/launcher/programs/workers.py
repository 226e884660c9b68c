"""Work in threads, or in processes that are forked, spawned and a program, as argv[1] says, until there is a file."""

import multiprocessing
import os
import subprocess
import sys
import threading

IDLE = "import os, time\nwhile not os.path.exists('stop'): time.sleep(0.02)"


def deep(n):
    return deep(n - 1) if n else [k * k for k in range(50)]


def busy():
    while not os.path.exists("stop"):
        deep(30)


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        workers = [threading.Thread(target=busy) for _ in range(2)]
    else:
        workers = [multiprocessing.get_context(how).Process(target=exec, args=(IDLE, {})) for how in ("fork", "spawn")]
        child = subprocess.Popen([sys.executable, "-c", IDLE])
    for worker in workers:
        worker.start()
    open(f"up{os.environ['RANK']}", "w").close()
    for worker in workers:
        worker.join()
    print("done" if sys.argv[1] == "threads" else ([worker.exitcode for worker in workers], child.wait()))
