"""A model that is saved and loaded trains on as it would have without, with all options of its DistributedOptimizer."""

import copy
import pickle

import keras
import numpy as np
import pytest

import ringreduce.keras as hvd
from tests.keras import models

optimizers = keras.optimizers
H5 = {"mse": "mse"}  # which Keras does not find in its older format
PASSES = {"backward_passes_per_step": 2}
OPTIONS = {
    "a sum of passes": PASSES,
    "a mean of passes": PASSES | {"average_aggregated_gradients": True},
    "a sum": {"op": hvd.Sum},
    "predivided, named": {"gradient_predivide_factor": np.float32(4), "name": "mine"},
    "compressed": {"compression": hvd.Compression.int8.everywhere, **PASSES},
}


def sgd():
    return optimizers.SGD(0.02, momentum=0.9)


def saved(path, make=sgd, **options):
    """A model that was trained, in the middle of an accumulation, and saved."""
    trained = models.model()
    models.fit(trained, hvd.DistributedOptimizer(make(), **options), together=True, epochs=1)
    x, y = (models.share(each)[:5] for each in models.data())
    trained.train_on_batch(x, y)
    trained.save(path)
    return trained


def goes_on_alike(trained, loaded):
    expected, found = (models.fit_on(each, epochs=1, shuffle=False) for each in (trained, loaded))
    models.equal_on_all_ranks(found)
    models.close(found, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_come_back(tmp_path, options, said):
    """Also of what was loaded and saved again, by Keras alone, too."""
    trained = saved(tmp_path / "model.keras", **options)
    loaded = hvd.load_model(tmp_path / "model.keras")
    loaded.save(tmp_path / "model.keras")
    keras.models.load_model(tmp_path / "model.keras").save(tmp_path / "again.keras")
    goes_on_alike(trained, hvd.load_model(tmp_path / "again.keras"))
    models.close(models.fit_on(loaded, epochs=1, shuffle=False), models.numbers(trained.weights))
    assert said == []


@pytest.mark.quick
def test_horovods_arguments_by_position(tmp_path):
    none = hvd.Compression.none
    for legacy_opts in (False, True):
        trained = saved(tmp_path / "model.keras")
        goes_on_alike(trained, hvd.load_model(tmp_path / "model.keras", None, None, none, legacy_opts))


@pytest.mark.quick
def test_a_loss_scale_and_a_process_set_come_back(tmp_path):
    last = hvd.add_process_set([models.SIZE - 1]) if models.SIZE > 1 else hvd.global_process_set
    make = lambda: optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)  # noqa: E731
    trained = saved(tmp_path / "model.keras", make, process_set=last)
    expected = models.fit_on(trained, epochs=1, shuffle=False)
    models.close(models.fit_on(hvd.load_model(tmp_path / "model.keras"), epochs=1, shuffle=False), expected)
    everyone = hvd.load_model(tmp_path / "model.keras", process_set=hvd.global_process_set)
    weights = models.fit_on(everyone, epochs=1, shuffle=False)
    assert models.SIZE == 1 or not np.allclose(weights[0], expected[0])
    if models.SIZE > 1:
        hvd.remove_process_set(last)
        with pytest.raises(
            ValueError,
            match=rf"saved with process_set=\[{models.SIZE - 1}\], which is not known here; pass process_set= your",
        ):
            hvd.load_model(tmp_path / "model.keras")


class Halved(hvd.Compression.fp16):
    """One's own."""


@pytest.mark.quick
def test_what_a_file_does_not_have_must_be_passed(tmp_path, said):
    saved(tmp_path / "model.keras", compression=Halved)
    with pytest.raises(
        ValueError,
        match=r"saved with compression=<class '.*Halved'>, which is not known here; pass compression= yourself",
    ):
        hvd.load_model(tmp_path / "model.keras")
    hvd.load_model(tmp_path / "model.keras", compression=Halved)
    saved(tmp_path / "model.h5", **PASSES)
    with pytest.raises(ValueError, match=r"model.h5 does not say who accumulates 2 gradients; pass backward_passes_"):
        hvd.load_model(tmp_path / "model.h5", custom_objects=H5)
    hvd.load_model(tmp_path / "model.h5", custom_objects=H5, **PASSES)  # Keras 3.15 cannot train on with HDF5
    assert said == []
    saved(tmp_path / "plain.h5")
    hvd.load_model(tmp_path / "plain.h5", custom_objects=H5)
    assert len(said) == (models.RANK == 0)
    assert all("plain.h5: HDF5 does not keep the options of DistributedOptimizer" in text for text in said)


@pytest.mark.quick
def test_an_optimizer_that_keras_loads_or_copies_says_that_it_does_not_reduce(tmp_path, said):
    """It is Keras' own, as it would be without this package; and may be wrapped."""
    trained = saved(tmp_path / "model.keras", **PASSES)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (loaded, copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        said.clear()
        for _ in range(2):
            models.fit_on(each, epochs=1)
        assert len(said) == (models.SIZE > 1)
        assert all(f"rank {models.RANK} of {models.SIZE} trains alone: its SGD was a" in text for text in said)
    again = keras.models.load_model(tmp_path / "model.keras")
    hvd.DistributedOptimizer(again.optimizer, **PASSES)
    goes_on_alike(trained, again)
    assert len(said) == (models.SIZE > 1)
