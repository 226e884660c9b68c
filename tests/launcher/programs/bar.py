"""A progress bar with a line between; each stage waits until the folder argv[1], if there is one, has its file."""

import os
import sys
import time

for percent in range(0, 101, 20):
    sys.stderr.write(f"\r{percent:3}%|bar")
    sys.stderr.flush()
    if percent == 40:
        print("a line between")
    time.sleep(0.1)
    while percent < 100 and sys.argv[1:] and not os.path.exists(f"{sys.argv[1]}/{percent}"):
        time.sleep(0.01)
sys.stderr.write("\n")
