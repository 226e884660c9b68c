"""A model of Keras 2 that is saved in its own format and loaded trains on, with all options of its optimizer."""

import numpy as np
import pytest
import tf_keras

import ringreduce.tensorflow.keras as hvd
from ringreduce.keras.loading import loaded
from ringreduce.settings.log import JOB
from tests.keras import models
from tests.keras.models import RANK, SIZE
from tests.keras.test_saved import OPTIONS
from tests.tensorflow.test_keras_2 import model, of_2022, scaled, sgd


@pytest.fixture
def said(monkeypatch):
    """What the log warns of."""
    texts = []
    monkeypatch.setattr(JOB, "warning", texts.append)
    return texts


def saved(path, optimizer):
    trained = model()
    models.fit(trained, optimizer, together=True, epochs=1)
    trained.save(path)
    return trained


def load_model(path, **options):
    """As `tf.keras` is where TF_USE_LEGACY_KERAS=1."""
    return loaded(tf_keras.models.load_model, path, None, None, None, options)


def go_on(trained):
    return models.fit_on(trained, epochs=1, shuffle=False)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_come_back(tmp_path, options, said):
    """Also of what was saved again: by the rank that loaded it, and by Keras alone."""
    trained = saved(tmp_path / "model.keras", hvd.DistributedOptimizer(sgd(0.02), **options))
    again = load_model(tmp_path / "model.keras")
    again.save(tmp_path / "model.keras")
    tf_keras.models.load_model(tmp_path / "model.keras").save(tmp_path / "again.keras")
    expected, found = go_on(trained), go_on(load_model(tmp_path / "again.keras"))
    models.equal_on_all_ranks(found)
    models.close(found, expected)
    models.close(go_on(again), expected)
    assert said == []


@pytest.mark.quick
def test_a_loss_scale_a_process_set_and_layers_of_one_s_own_come_back(tmp_path):
    last = hvd.add_process_set([SIZE - 1]) if SIZE > 1 else hvd.global_process_set
    trained = saved(tmp_path / "model.keras", hvd.DistributedOptimizer(scaled(sgd()), process_set=last))
    expected = go_on(trained)
    models.close(go_on(load_model(tmp_path / "model.keras")), expected)
    everyone = go_on(load_model(tmp_path / "model.keras", process_set=hvd.global_process_set))
    assert SIZE == 1 or not np.allclose(everyone[0], expected[0])
    if SIZE > 1:
        hvd.remove_process_set(last)
    trained = model()
    own = trained.layers[-1]
    optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=own)
    models.fit(trained, optimizer, together=True, epochs=1)
    trained.save(tmp_path / "own.keras")
    again = load_model(tmp_path / "own.keras")
    expected = go_on(trained)
    models.close(go_on(again), expected)
    weights = hvd.allgather(own.weights[0][None])
    assert SIZE == 1 or not np.allclose(weights[0], weights[-1])


@pytest.mark.quick
def test_what_a_format_does_not_keep_is_warned_of(tmp_path, said):
    kinds = [("model.h5", sgd, "HDF5"), ("model", sgd, "SavedModel")]
    kinds.append(("legacy.keras", of_2022, "for a `legacy` optimizer Keras 2"))
    for name, kind, which in kinds:
        saved(tmp_path / name, hvd.DistributedOptimizer(kind(), op=hvd.Sum))
        said.clear()
        load_model(tmp_path / name, op=hvd.Sum)
        assert said == []
        load_model(tmp_path / name)
        assert len(said) == (RANK == 0)
        assert all(f"{name}: {which} does not keep the options of DistributedOptimizer, so" in each for each in said)
    saved(tmp_path / "plain.keras", sgd())
    said.clear()
    load_model(tmp_path / "plain.keras")
    assert said == []


@pytest.mark.quick
def test_an_optimizer_that_keras_loads_says_that_it_does_not_reduce(tmp_path, said):
    trained = saved(tmp_path / "model.keras", hvd.DistributedOptimizer(sgd()))
    again = tf_keras.models.load_model(tmp_path / "model.keras")
    for _ in range(2):
        go_on(again)
    assert len(said) == (SIZE > 1)
    assert all(f"rank {RANK} of {SIZE} trains alone: its SGD was a" in text for text in said)
    again = tf_keras.models.load_model(tmp_path / "model.keras")
    hvd.DistributedOptimizer(again.optimizer)
    models.close(go_on(again), go_on(trained))
    assert len(said) == (SIZE > 1)
