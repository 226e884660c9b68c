"""Ray's TorchTrainer over the backend "ring": DDP in the group that Ray makes, and a worker that is killed once."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

STEPS = 6


def fresh():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(number, model, optimizer, rank=0, size=1):
    """Train on the rows of a step that are this rank's."""
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(8, 5)[rank::size]).square().mean().backward()
    optimizer.step()


def values(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def train(config):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = fresh()
    wrapped, first = ray.train.torch.prepare_model(model), 0
    if before := ray.train.get_checkpoint():
        with before.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for number in range(first, STEPS):
        if (rank, number) == (1, 3) and not (killed := Path(config["folder"], "killed")).exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step(number, wrapped, optimizer, rank, size)
        everyones = [None] * size
        dist.all_gather_object(everyones, values(model))
        found = {"step": number, "first": first, "backend": dist.get_backend(), "values": everyones}
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
            torch.save(state, Path(folder, "state.pt"))
            ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main():
    folder = sys.argv[1]
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="ring"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    )
    found = trainer.fit().metrics
    model, optimizer = fresh()
    for number in range(STEPS):
        step(number, model, optimizer)
    of_ranks = torch.tensor(found["values"])
    print("trained over", found["backend"], "to step", found["step"], "from", found["first"])
    print("killed", Path(folder, "killed").exists(), "ranks", len(of_ranks))
    print("the same bits", torch.equal(of_ranks[0], of_ranks[1]))
    print("as alone", torch.allclose(of_ranks[0], torch.tensor(values(model)), rtol=1e-5, atol=1e-6))


if __name__ == "__main__":
    main()
