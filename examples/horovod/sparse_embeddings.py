"""Embeddings with sparse gradients, trained on Python's own source: guess a character from the eight before it.

ringrun -np 2 python examples/horovod/sparse_embeddings.py
"""

import argparse

import common
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--steps", type=int, default=15)
args = parser.parse_args()
CONTEXT, WIDTH = 8, 6

hvd.init()
torch.set_num_threads(1)
text = common.python_text(20_000)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH, sparse=True)
        self.output = nn.Linear(CONTEXT * WIDTH, 256)

    def forward(self, context):
        return self.output(self.embedding(context).flatten(1))


def make_model():
    torch.manual_seed(hvd.rank())
    model = Model().double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def loss_of(model, step):
    batch_size = args.batch_size * hvd.size()
    places = torch.randint(len(text) - CONTEXT, (batch_size,), generator=torch.Generator().manual_seed(step))
    places = places[hvd.rank() :: hvd.size()]
    context = text[places[:, None] + torch.arange(CONTEXT)]
    return F.cross_entropy(model(context), text[places + CONTEXT])


def train(model, *optimizers):
    losses = []
    for step in range(args.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, common.digest(model.state_dict())


def train_sgd(sparse_as_dense):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )
    return train(model, optimizer)


def train_adam():
    """An optimizer for the sparse gradients, another for the others."""
    model = make_model()
    named = dict(model.named_parameters())
    sparse = {name: named.pop(name) for name in ["embedding.weight"]}
    return train(
        model,
        hvd.DistributedOptimizer(torch.optim.SparseAdam(list(sparse.values()), lr=0.05), sparse.items()),
        hvd.DistributedOptimizer(torch.optim.Adam(named.values(), lr=0.05), named.items()),
    )


def sum_by_hand():
    """A sparse tensor whose rows differ by rank; every rank returns the sum."""
    rows = torch.tensor([[hvd.rank(), 7]])
    values = torch.tensor([[1.0 + hvd.rank()] * 2, [0.5] * 2])
    tensor = torch.sparse_coo_tensor(rows, values, (8, 2), check_invariants=True)
    handle = hvd.sparse_allreduce_async(tensor, name="by hand", op=hvd.Sum)
    return handle().to_dense()[:, 0].tolist()


results = {"sparse": train_sgd(False), "dense": train_sgd(True), "SparseAdam": train_adam()}
told = hvd.allgather_object(([digest for _, digest in results.values()], sum_by_hand()))
if hvd.rank() == 0:
    digests, sums = zip(*told, strict=True)
    losses = {name: losses for name, (losses, _) in results.items()}
    common.show(losses)
    common.record(losses=losses, digests=digests, sums=sums)
