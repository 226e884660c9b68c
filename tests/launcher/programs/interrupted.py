"""Ctrl-C comes while run_all() starts a program: it runs, and nobody knows it yet."""

import os
import signal
import subprocess

from ringrun.remote.parallel import Task, run_all


class Interrupted(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGINT)


subprocess.Popen = Interrupted
run_all([Task(["sh", "-c", "sleep 77 & wait"])], 60)
