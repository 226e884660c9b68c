"""Training that goes on, in the same processes, when ranks die: under `ringrun --elastic`.

    state = rr.elastic.ObjectState(params=params, step=0)

    @rr.elastic.run
    def train(state):
        while state.step < steps:
            ...
            state.step += 1
            state.commit()

    train(state)

kept          files in memory, from which a job goes on that was started again
commit        one copy of a state
state         State, ObjectState: what is committed, restored and shared
sampler       ElasticSampler: which items of a dataset are left
loop          run: what happens when ranks die
common        the names that each framework's elastic module has, too

Frameworks' states: ringreduce.torch.elastic, ringreduce.jax.elastic, ringreduce.keras.elastic.
"""

from ringreduce.elastic.common import *  # noqa: F403
from ringreduce.elastic.common import __all__ as __all__
