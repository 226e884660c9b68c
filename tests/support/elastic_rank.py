"""A rank of an elastic job, without MPI: it speaks with its agent as ringreduce does, and dies as it is told to.

    elastic_rank.py LAST 1@0=kill 0@1=exit-7 …     in world 0 rank 1 kills itself, in world 1 rank 0 ends with code 7

Once a world of number LAST works its ranks leave in order. Each prints the lists that it gets.
"""

import json
import os
import signal
import socket
import sys
import time

RANK = int(os.environ["RANK"])
FILE = os.environ["RINGREDUCE_ERROR_FILE"]
NP = int(os.environ["WORLD_SIZE"]) - int(os.environ["RINGREDUCE_SPARES"])


def say(**message: object) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.sendto(json.dumps(message).encode(), f"{FILE}.agent")


def end_by(action: str) -> None:
    name, _, argument = action.partition("-")
    if name == "kill":
        os.kill(os.getpid(), getattr(signal, f"SIG{argument or 'KILL'}"))
    elif name == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif name == "exit":
        os._exit(int(argument))
    elif name == "sysexit":
        sys.exit(int(argument))
    elif name == "raise":
        print(f"the last words of {RANK}", file=sys.stderr)
        raise ValueError(f"of rank {RANK}")
    elif name == "abort":  # under MPICH, whose MPI_Abort returns
        print(
            f"Abort({argument}) on node {RANK} (rank {RANK} in comm 0): application called MPI_Abort",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1000)
    elif name == "suspect":
        say(suspects=[int(argument)], why=f"waiting for rank {argument}")
    elif name == "lost":  # as PeerLostError, which nobody has caught
        with open(FILE, "w") as file:
            json.dump({"exception": "PeerLostError", "message": "", "lost_ranks": [int(argument)]}, file)
        os._exit(1)


def await_others(number: int, ranks: list[int]) -> None:
    """Wait until all members say that the world of list `number` works, and ringrun has had time to hear it."""
    open(f"{RANK}@{number}", "w").close()
    while not all(os.path.exists(f"{rank}@{number}") for rank in ranks):
        time.sleep(0.01)
    time.sleep(0.3)


def await_question(asked: socket.socket) -> None:
    """Report a stall, at which ringrun asks all ranks what they do: so it has heard what this one said before."""
    say(stalled="rank 0 is about to kill its agent")
    while asked.recv(1 << 16) != b"doing":
        pass


def next_list(asked: socket.socket, number: int) -> dict:
    """The next list after `number`: an agent says one again once it knows that its rank listens."""
    while True:
        said = asked.recv(1 << 16)
        if said.startswith(b"{") and (heard := json.loads(said)["membership"])["number"] > number:
            return heard


def main() -> None:
    last, *planned = sys.argv[1:]
    actions = dict(each.split("=") for each in planned)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
        asked.bind(f"{FILE}.ask")
        say(started="ringreduce")
        number, membership = 0, {}
        is_member = RANK < NP
        while True:
            if is_member:
                action = actions.get(f"{RANK}@{number}", "")
                if number and not action.startswith("lost"):
                    say(reformed=str(number))
                    await_others(number, membership["ranks"])
                elif action == "agent":
                    await_question(asked)
                end_by(action)
                if number >= int(last):
                    say(left="its script ended")
                    end_by(actions.get(f"{RANK}@left", ""))
                    return
            membership = next_list(asked, number)
            print(json.dumps(membership), flush=True)
            number, is_member = membership["number"], RANK in membership["ranks"]


main()
