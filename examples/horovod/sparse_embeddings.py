"""Embeddings with sparse gradients, trained on Python's own source: guess a character from the eight before it.

ringrun -np 2 python examples/horovod/sparse_embeddings.py
ringrun -np 2 python examples/horovod/sparse_embeddings.py --adam              # an optimizer for the sparse ones alone
ringrun -np 2 python examples/horovod/sparse_embeddings.py --sparse-as-dense   # reduced as dense gradients are
"""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--adam", action="store_true", help="SparseAdam and Adam in place of SGD")
parser.add_argument("--sparse-as-dense", action="store_true")
args = parser.parse_args()
CONTEXT, WIDTH = 8, 6

hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()[:20_000]))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH, sparse=True)
        self.output = nn.Linear(CONTEXT * WIDTH, 256)

    def forward(self, context):
        return self.output(self.embedding(context).flatten(1))


model = Model()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if args.adam:
    dense = dict(model.named_parameters())
    sparse = {"embedding.weight": dense.pop("embedding.weight")}
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SparseAdam(list(sparse.values()), lr=0.05), sparse.items()),
        hvd.DistributedOptimizer(torch.optim.Adam(dense.values(), lr=0.05), dense.items()),
    ]
else:
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizers = [hvd.DistributedOptimizer(sgd, model.named_parameters(), sparse_as_dense=args.sparse_as_dense)]

for step in range(args.steps):
    generator = torch.Generator().manual_seed(step)  # the same batch on all ranks, and to each its share
    places = torch.randint(len(text) - CONTEXT, (args.batch_size * hvd.size(),), generator=generator)
    places = places[hvd.rank() :: hvd.size()]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(text[places[:, None] + torch.arange(CONTEXT)]), text[places + CONTEXT])
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"step {step + 1} loss {mean:.4f}")

# by hand: a sparse tensor whose rows differ by rank; every rank returns the sum
rows, values = torch.tensor([[hvd.rank(), 7]]), torch.Tensor([1 + hvd.rank(), 0.5])
used = torch.sparse_coo_tensor(rows, values, (8,), check_invariants=True)
handle = hvd.sparse_allreduce_async(used, name="used", op=hvd.Sum)
summed = handle().to_dense().tolist()
if hvd.rank() == 0:
    print(f"summed by hand {summed}")
    print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
