"""Even and odd ranks train a model each, side by side, and end as an ensemble; then each set shares out one layer.

ringrun -np 4 python examples/horovod/process_sets.py --ranks 4
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, required=True, help="how many there are, which init() cannot tell yet")
parser.add_argument("--dynamic", action="store_true", help="add the sets after init()")
parser.add_argument("--batch-size", type=int, default=60, help="of all ranks of a set together")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--lr", type=float, default=1.0)
args = parser.parse_args()

EVEN, ODD = list(range(0, args.ranks, 2)), list(range(1, args.ranks, 2))
if args.dynamic:
    hvd.init()  # HOROVOD_DYNAMIC_PROCESS_SETS=1 is set
    short_lived = hvd.add_process_set([0, 1])
    if short_lived.included():
        assert hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum, process_set=short_lived) == 1
    assert hvd.remove_process_set(short_lived)
    assert short_lived.process_set_id is None
    even_set = hvd.add_process_set(hvd.ProcessSet(EVEN))
    odd_set = hvd.add_process_set(ODD)
else:
    even_set, odd_set = hvd.ProcessSet(EVEN), hvd.ProcessSet(ODD)
    hvd.init(process_sets=[even_set, odd_set])
torch.set_num_threads(1)

mine, number = (even_set, 0) if even_set.included() else (odd_set, 1)
assert mine.rank() == hvd.rank() // 2
assert mine.size() == len(mine.ranks)
assert hvd.global_process_set.size() == args.ranks
digits = load_digits()
images, labels = torch.Tensor(digits.data) / 16, torch.tensor(digits.target)
TEST = slice(1440, 1788)  # a multiple of 2, 3 and 4


def make_model():
    torch.manual_seed(100 + hvd.rank())
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def batch_of(tensor, step):
    """The set's batch; the sets begin at different items."""
    start = (step + number * args.steps) * args.batch_size
    return tensor[start : start + args.batch_size]


def train_in_parallel():
    """Data-parallel among the ranks of the set."""
    model = make_model()
    for name, parameter in model.named_parameters():
        hvd.broadcast_(parameter.data, root_rank=mine.ranks[0], name=name, process_set=mine)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr),
        named_parameters=model.named_parameters(),
        process_set=mine,
    )
    for step in range(args.steps):
        data = batch_of(images, step)[mine.rank() :: mine.size()]
        target = batch_of(labels, step)[mine.rank() :: mine.size()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss", process_set=mine).item()
        if mine.rank() == 0:
            print(f"set {number} step {step + 1} loss {mean:.4f}")
    return model


def ensemble_of(model):
    """The predictions of both sets' models together, for this rank's share of the test images."""
    probabilities = 0
    share = slice(hvd.rank(), None, hvd.size())
    for each in (even_set, odd_set):
        sent = make_model()
        sent.load_state_dict(hvd.broadcast_object(model.state_dict(), root_rank=each.ranks[0]))
        probabilities = probabilities + sent(images[TEST][share]).softmax(dim=1)
    return probabilities.argmax(dim=1) == labels[TEST][share]


def train_split():
    """The hidden layer is shared out: each rank of the set has some of its units, for the whole batch."""
    torch.manual_seed(200 + number)
    first, second = torch.randn(24, 64) / 8, torch.randn(10, 24) / 5
    units = slice(mine.rank(), None, mine.size())
    first, second = (each.contiguous().requires_grad_() for each in (first[units], second[:, units]))
    optimizer = torch.optim.SGD([first, second], lr=args.lr)
    for step in range(args.steps):
        optimizer.zero_grad()
        hidden = torch.tanh(batch_of(images, step) @ first.T)
        output = hvd.allreduce(hidden @ second.T, op=hvd.Sum, name="output", process_set=mine)
        loss = F.cross_entropy(output, batch_of(labels, step))
        # every rank of the set has this loss, and the gradient of a sum over ranks is the sum of their gradients
        (loss / mine.size()).backward()
        optimizer.step()
        if mine.rank() == 0:
            print(f"set {number} layer shared out step {step + 1} loss {loss.item():.4f}")
    return loss.item()


model = train_in_parallel()
right = hvd.allreduce(ensemble_of(model).sum(), op=hvd.Sum, name="right")
split_loss = train_split()
members = hvd.allgather(torch.tensor([hvd.rank()]), name="members", process_set=mine).tolist()
sums = hvd.allgather_object(sum(each.sum().item() for each in model.parameters()))
if hvd.rank() == 0:
    print(f"sets {list(hvd.get_process_set_ids_and_ranks().values())}")
    print(f"accuracy of both models together {right.item() / len(labels[TEST]):.3f}")
    print(f"sum of parameters {sums[0]:.6f} {sums[1]:.6f}")
