"""Training by `fit`, as Keras 2 and Keras 3 do it: the module of callbacks and the front end, `hvd`, are arguments."""

import os
import signal

import numpy as np

BATCHES, ROWS = 7, 6


def batches(steps, *ranks):
    """What ranks of the job's start train on in these steps."""
    x = [np.random.default_rng([step, rank]).normal(size=(ROWS, 4)) for step in steps for rank in ranks]
    x = np.concatenate(x).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def fit_what_is_left(hvd, callbacks, state, origin, killed):
    """The epoch of an elastic job.  killed: the rank, by its origin, that dies, and before which batch."""

    class Watched(callbacks.Callback):
        """Kills a rank before a batch; notes who took part in each."""

        def on_train_batch_begin(self, batch, logs=None):
            if (origin, state.batch) == killed:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch, logs=None):
            state.history.append(hvd.allgather_object(origin))

    counting = [Watched(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state)]
    own = batches(range(state.batch, BATCHES), origin)
    options = {"batch_size": ROWS, "epochs": 1 - state.epoch, "shuffle": False, "verbose": 0}
    state.model.fit(*own, callbacks=[*counting, hvd.elastic.CommitStateCallback(state)], **options)


def assert_all_have(hvd, weights):
    """The same weights on all ranks, to the bit."""
    for theirs in hvd.allgather_object(weights):
        for mine, their in zip(weights, theirs, strict=True):
            np.testing.assert_array_equal(mine, their)


def assert_replayed(alone, state, weights):
    """A model that takes the same steps alone has these weights."""
    for step, ranks in enumerate(state.history):
        alone.train_on_batch(*batches([step], *ranks))
    for mine, expected in zip(weights, alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def recorder(callbacks, everything):
    """A callback that records what batches and each epoch's end see.  everything(model): all a step depends on."""

    class Recorded(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rates, self.logs, self.before = [], [], None

        def on_train_batch_begin(self, batch, logs=None):
            if self.before is None:
                self.before = everything(self.model)
            self.rates.append(float(np.array(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            self.logs.append(dict(logs))

    return Recorded()
