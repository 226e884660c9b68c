"""tf.data's service: the ranks of one job prepare the data of another, which trains.

    ringrun -np 4 python -m ringreduce.tensorflow.data.compute_worker service.json              they prepare
    ringrun -np 2 python train.py service.json                                                  they train

Tf.data's workers, one in each rank that prepares, take work from a dispatcher, to which the ranks that train turn.
Dispatchers are on either side, and there is one for all, or one for each rank that trains. Rank 0 of the first job has
a service that says where they are, to who knows the key in the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import tensorflow as tf

from ringreduce import runtime
from ringreduce.api.control import barrier, init
from ringreduce.api.world import rank
from ringreduce.errors import InputError, StartupError

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

_PROBE_S = 4.0
_LOOK_S = 0.2
_HERE = "tf.data's service"
_END = "the end"


class ComputeService:
    """What dispatchers and workers say of themselves; it is in rank 0 of the ranks that prepare."""

    def __init__(self, key: bytes) -> None:
        self._said: dict[str, str] = {}
        self._changed = threading.Condition()
        server = _manager(("", 0), key, self).get_server()
        self.port: int = server.address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def say(self, name: str, text: str = "") -> None:
        """Let all know."""
        with self._changed:
            self._said[name] = text
            self._changed.notify_all()

    def wait(self, names: Sequence[str], timeout_s: float | None) -> list[str]:
        """What they say of themselves, once all have; TimeoutError where some do not."""
        with self._changed:
            if self._changed.wait_for(lambda: self._said.keys() >= set(names), timeout_s):
                return [self._said[each] for each in names]
            late = ", ".join(each for each in names if each not in self._said)
        raise TimeoutError(
            f"{_HERE}: {late} did not start within {timeout_s:g} s; see what the ranks print, or raise timeout"
        )


class ComputeClient:
    """Calls a ComputeService from another process."""

    def __init__(self, addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes) -> None:
        for address in (each for several in addresses.values() for each in several):
            with contextlib.suppress(OSError), socket.create_connection(address, _PROBE_S) as probe:
                own = probe.getsockname()[0]
                break
        else:
            raise StartupError(f"{_HERE}: nobody answers at {dict(addresses)}; is compute_worker still running?")
        self.own_address = f"[{own}]" if ":" in own else own
        manager = _manager(address, key)
        manager.connect()
        service = manager.service()
        service._close.cancel()  # collected in the service's own thread, it would call that, and wait for itself
        self.say, self.wait = service.say, service.wait

    def shutdown(self) -> None:
        """End the ranks that prepare."""
        self.say(_END)


def _manager(address: Any, key: bytes, service: ComputeService | None = None) -> Any:
    """What Python has for calls between processes, which takes them from those alone that have the key."""

    class Manager(BaseManager):
        pass

    Manager.register("service", lambda: service)
    return Manager(address, key)


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """How to reach a tf.data service; saved with `write`, loaded with `read`.

    dispatchers:     one for all ranks that train, or one for each of them.
    dispatcher_side: where they are: "compute" or "training".
    addresses, key:  of the service that says where they are.
    timeout:         how many seconds dispatchers and workers may take to start.
    Source:          Horovod's class of this name.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> Any:
        """Connect to the service; its `shutdown()` ends the job that prepares data.  verbose: Horovod's, ignored."""
        return ComputeClient(self.addresses, self.key)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Of `to_dict`."""
        addresses = {name: [(host, port) for host, port in several] for name, several in config["addresses"].items()}
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"]), "addresses": addresses})

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write it to a file, whole, which only its owner may read."""
        unfinished = Path(f"{os.fspath(filename)}.{os.getpid()}")
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.to_dict(), file)
        unfinished.replace(filename)

    @staticmethod
    def read(filename: str | os.PathLike[str], wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read it from a file, which may yet have to be written."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_LOOK_S)
        return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text()))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Give this rank, which trains, the address of its dispatcher, for tf.data.experimental.service.distribute.

    Where dispatchers are on this side they end with the `with`; all ranks leave it together.

    Raises: TimeoutError where dispatchers or workers do not start; StartupError where the other job does not answer.
    Source: Horovod's context manager of this name.
    """
    compute, each = compute_config.compute_client(), compute_config.workers_per_dispatcher
    one_for_all, server = compute_config.dispatchers == 1, None
    number = 0 if one_for_all else rank
    if compute_config.dispatcher_side == "training" and rank == number:
        server = _dispatcher(compute, number)
    try:
        workers = [f"worker {worker}" for worker in range(number * each, (number + 1) * each)]
        address, *_ = compute.wait([f"dispatcher {number}", *workers], compute_config.timeout)
        yield address
        if one_for_all and compute_config.dispatcher_side == "training" and runtime.is_initialized():
            barrier()  # others may still read from it
    finally:
        _stop(server)


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Let a dataset be prepared by the service; also a method of tf.data.Dataset.

    processing_mode: TensorFlow's: by default each item comes once, whoever prepares it.
    reuse_dataset: all ranks read from one, whoever comes first; round_robin: in turns, of which `size` take part.
    Raises:        InputError where dispatchers are on this side: use `tf_data_service`; otherwise as that.
    Source:        Horovod's send_to_data_service.
    """
    if compute_config.dispatcher_side == "training":
        raise InputError("send_to_data_service: dispatchers are on the side that trains; use `with tf_data_service(…)`")
    in_turns = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        distribute = tf.data.experimental.service.distribute(
            processing_mode=processing_mode,
            service=address,
            job_name="job" if reuse_dataset else None,
            consumer_index=rank if in_turns else None,
            num_consumers=size if in_turns else None,
        )
        return dataset.apply(distribute)


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig, timeout: int | None = None) -> None:
    """Prepare data on this rank until the service is shut down.

    timeout: how many seconds a worker tries to reach its dispatcher.
    Raises:  TimeoutError where the dispatcher does not start in time.
    Source:  Horovod's function of this name.
    """
    init()
    compute, service = compute_config.compute_client(), tf.data.experimental.service
    number, place = divmod(rank(), compute_config.workers_per_dispatcher)
    is_first = compute_config.dispatcher_side == "compute" and place == 0
    dispatcher = _dispatcher(compute, number) if is_first else None
    (address,) = compute.wait([f"dispatcher {number}"], compute_config.timeout)
    options = service.WorkerConfig(
        dispatcher_address=address.partition("://")[2],
        worker_address=f"{compute.own_address}:%port%",
        heartbeat_interval_ms=1000,
        dispatcher_timeout_ms=timeout and timeout * 1000,
    )
    worker = service.WorkerServer(options)
    compute.say(f"worker {rank()}")
    compute.wait([_END], None)
    _stop(worker)
    _stop(dispatcher)
    barrier()  # rank 0 has the service that tells the others


def _dispatcher(compute: ComputeClient, number: int) -> Any:
    """Start one, and say where it is: it calls its host localhost."""
    server = tf.data.experimental.service.DispatchServer()
    compute.say(f"dispatcher {number}", str(server.target).replace("localhost", compute.own_address))
    return server


def _stop(server: Any) -> None:
    """TensorFlow has no public way."""
    if server is not None:
        server._server.stop()
