"""Writes until nobody reads any more, whatever Ctrl-C says; then rank 1 ends, if argv[1] says that a rank fails."""

import os
import signal
import sys
import time

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.set_blocking(1, False)
paused = 0
while paused < 10:
    try:
        os.write(1, b"x" * 1000)
        paused = 0
    except BlockingIOError:
        paused += 1
        time.sleep(0.05)
if os.environ["RANK"] == "1":
    print("last words", file=sys.stderr)
    open("paused", "w").close()
    if sys.argv[1] == "a rank fails":
        sys.exit(3)
time.sleep(100)
