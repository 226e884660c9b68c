"""Rank 0 fails as soon as rank 1 has failed; rank 2 sleeps."""

import os
import select
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
Path(f"{rank}.tmp").write_text(str(os.getpid()))
os.rename(f"{rank}.tmp", f"up{rank}")
if rank == 2:
    time.sleep(30)
while not all(os.path.exists(f"up{other}") for other in range(3)):
    time.sleep(0.02)
if rank == 0:
    select.select([os.pidfd_open(int(Path("up1").read_text()))], [], [])  # until rank 1 has ended
print("words of", rank, file=sys.stderr, end="")
sys.exit(10 + rank)
