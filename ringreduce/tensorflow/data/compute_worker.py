"""Prepare data on each rank, by tf.data's service, for a job that trains: see compute_service.py.

ringrun -np 4 python -m ringreduce.tensorflow.data.compute_worker service.json
"""

import argparse
import os

from ringreduce.api.control import init
from ringreduce.api.objects import broadcast_object
from ringreduce.api.world import rank, size
from ringreduce.errors import InputError
from ringreduce.tensorflow.data.compute_service import ComputeService, TfDataServiceConfig, compute_worker_fn
from ringrun.network import addresses_or_loopback

_KEY_BYTES = 32


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Prepare data on this rank until the job that trains shuts the service down; see the command line's help."""
    init()
    workers, more = divmod(size(), max(dispatchers, 1))
    if more or not workers or dispatchers < 1:
        raise InputError(f"compute_worker: {size()} ranks for --dispatchers {dispatchers}; expected a multiple of it")
    config = None
    if rank() == 0:
        key = os.urandom(_KEY_BYTES)
        port = ComputeService(key).port
        found = {"": [(each, port) for each in addresses_or_loopback()]}
        config = TfDataServiceConfig(dispatchers, workers, dispatcher_side, found, key, timeout)
        config.write(configfile)
    compute_worker_fn(broadcast_object(config, 0), timeout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="compute_worker", description="Prepare data for a job that trains.")
    parser.add_argument("configfile", help="what the other job reads: where the service is, and its key")
    parser.add_argument("--dispatchers", type=int, default=1, help="1, or as many as ranks that train (1)")
    parser.add_argument("--dispatcher-side", choices=["compute", "training"], default="compute", help="(compute)")
    parser.add_argument("--timeout", type=int, default=60, help="seconds in which all must start (60)")
    main(**vars(parser.parse_args()))
