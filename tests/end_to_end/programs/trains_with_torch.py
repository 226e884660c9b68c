"""Trains, and leaves what rank 0 has in a file: FILE 'RANK:STEP:HOW'…, where RANK, that of the start, dies in STEP."""

import os
import sys

import torch

import ringreduce.torch as hvd
from tests.end_to_end.test_elastic_training import STEPS, batch_of, new_model
from tests.support.elastic.plain import die

ORIGIN = int(os.environ["OMPI_COMM_WORLD_RANK"])
deaths = {int(rank): (int(step), how) for rank, step, how in (each.split(":") for each in sys.argv[2:])}
when, how = deaths.get(ORIGIN, (None, None))

hvd.init()
torch.set_num_threads(1)
model, optimizer = new_model(seed=hvd.rank() + 5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())


@hvd.elastic.run
def train(state):
    while len(state.history) < STEPS:
        step = len(state.history)
        members = hvd.allgather_object(ORIGIN)
        loss = model(batch_of(step, ORIGIN)).square().mean()
        if step == when and how == "SIGKILL":
            die(how)
        loss.backward()
        if step == when:
            die(how)
        optimizer.step()
        optimizer.zero_grad()
        state.history.append(members)
        state.commit()


state = hvd.elastic.TorchState(model, optimizer, history=[])
train(state)
if hvd.rank() == 0:
    torch.save([state.history, hvd.size(), [each.detach().clone() for each in model.parameters()]], sys.argv[1])
