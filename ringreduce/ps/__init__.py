"""A parameter server: what the ring replaced, and what asynchronous training still wants.

Some ranks are servers: each holds a part of the parameters, and steps them by the gradients that the workers push. The
others are workers: they pull the parameters, and never wait for each other unless the mode says so.

    import ringreduce as rr                                       # ringrun -np 6 --servers 2 python train.py

    rr.init()
    if rr.ps.is_server():
        rr.ps.Server(rule, mode="ssp", staleness=3).serve()       # rule(parameters, gradients) changes parameters
    else:
        with rr.ps.Worker(parameters) as worker:
            for batch in my_batches(worker.index, worker.count):
                parameters = worker.pull()
                worker.push(gradients(parameters, batch))

    worker ──push: header, outline, gradients──→ server: one thread a worker; consistency.py decides when a push is
           ←──────── pull: outline, parameters ──        applied, and when a pull is answered
"""

from ringreduce.ps.roles import Mode as Mode
from ringreduce.ps.roles import is_server as is_server
from ringreduce.ps.server import Served as Served
from ringreduce.ps.server import Server as Server
from ringreduce.ps.worker import Worker as Worker

__all__ = ["Mode", "Served", "Server", "Worker", "is_server"]
