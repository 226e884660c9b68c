"""How ranks that train find tf.data's service; jobs that use it: end_to_end/test_frameworks.py."""

import dataclasses
import gc
import multiprocessing
import os
import stat
import threading
from multiprocessing.managers import BaseProxy

import pytest
import tensorflow as tf

import ringreduce as rr
from ringreduce.tensorflow.data.compute_service import ComputeService, TfDataServiceConfig, tf_data_service

pytestmark = pytest.mark.quick


@pytest.fixture
def config():
    key = os.urandom(32)
    addresses = {"gone": [("127.0.0.1", 9)], "lo": [("127.0.0.1", ComputeService(key).port)]}
    return TfDataServiceConfig(2, 1, "compute", addresses, key, timeout=1)


def test_a_file_has_all_of_it_for_its_owner_alone(config, tmp_path):
    path = tmp_path / "service.json"
    writing = threading.Timer(0.3, config.write, [path])
    writing.start()
    assert TfDataServiceConfig.read(path, wait_for_file_creation=True) == config
    writing.join()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["service.json"]


def test_who_lacks_the_key_is_not_heard(config):
    with pytest.raises(multiprocessing.AuthenticationError):
        dataclasses.replace(config, key=os.urandom(32)).compute_client()
    config.compute_client().say("worker 0", "here")
    assert config.compute_client().wait(["worker 0"], 1) == ["here"]


def test_a_client_that_is_gone_calls_nobody(config, monkeypatch):
    """Rank 0 has the service, too: garbage collected in the thread that takes its calls would wait for itself."""
    called = []
    monkeypatch.setattr(BaseProxy, "_decref", lambda *_: called.append(1))
    client = config.compute_client()
    client.say("worker 0")
    del client
    gc.collect()
    assert called == []


def test_what_does_not_start_is_named(config):
    client = config.compute_client()
    client.say("dispatcher 1", "grpc://here")
    with pytest.raises(
        TimeoutError, match=r"tf\.data's service: worker 1 did not start within 1 s; see what the ranks"
    ):
        tf_data_service(config, 1).__enter__()
    client.say("worker 1")
    with tf_data_service(config, 1) as address:
        assert address == "grpc://here"
    with pytest.raises(rr.StartupError, match=r"nobody answers at .* is compute_worker still"):
        dataclasses.replace(config, addresses={"gone": [("127.0.0.1", 9)]}).compute_client()


def test_dispatchers_on_this_side_have_another_way(config):
    own = dataclasses.replace(config, dispatcher_side="training")
    with pytest.raises(rr.InputError, match="dispatchers are on the side that trains; use `with tf_data_service"):
        tf.data.Dataset.range(3).send_to_data_service(own, 0)


def test_arguments_have_horovods_order(config, monkeypatch):
    client, asked = config.compute_client(), []
    client.say("dispatcher 1", "grpc://here")
    client.say("worker 1")
    service = tf.data.experimental.service
    monkeypatch.setattr(service, "distribute", lambda **options: asked.append(options) or (lambda dataset: dataset))
    tf.data.Dataset.range(3).send_to_data_service(config, 1, 2, "parallel_epochs", True, True)
    assert [(each["processing_mode"], each["consumer_index"], each["num_consumers"]) for each in asked] == [
        ("parallel_epochs", 1, 2)
    ]
