"""train_gpt.py, but rank 0 is killed when half of its second checkpoint is written; not after a restart.

ringrun -np 2 python killed_while_saving.py EXAMPLES_DIR [arguments of train_gpt.py]
"""

import io
import os
import signal
import sys

import torch

sys.path.insert(0, sys.argv[1])
import train_gpt

save_whole = torch.save


def save_half_and_die(checkpoint, file):
    """Wherever train_gpt.py has torch write: to a path or to a file."""
    whole = io.BytesIO()
    save_whole(checkpoint, whole)
    with open(file, "wb") if isinstance(file, str | os.PathLike) else file as half:
        half.write(whole.getvalue()[: whole.tell() // 2])
        half.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def save_once(checkpoint, file):
    """Let the first one through."""
    save_whole(checkpoint, file)
    torch.save = save_half_and_die


if os.environ["RINGREDUCE_RESTART_COUNT"] == "0":
    torch.save = save_once
train_gpt.main(sys.argv[2:])
