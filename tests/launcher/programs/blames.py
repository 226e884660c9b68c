"""Rank 0 ends with an error file that blames rank 1, which then ends with the code argv[1], and blames itself."""

import json
import os
import signal
import sys
import time

rank, code = int(os.environ["RANK"]), int(sys.argv[1])


def leave(exception, lost):
    report = {"exception": exception, "message": "m", "traceback": f"the traceback of {rank}\n", "lost_ranks": lost}
    with open(os.environ["RINGREDUCE_ERROR_FILE"], "w") as file:
        json.dump(report, file)


while rank == 0:
    if os.path.exists("up1"):
        leave("PeerLostError", [1])
        os._exit(1)
    time.sleep(0.02)
signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
if code:
    leave("ValueError", [])
open("up1", "w").close()
time.sleep(60)
