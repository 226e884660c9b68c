"""Train a small GPT on the source of Python's standard library, data-parallel, and let it write some Python.

    ringrun -np 2 python examples/train_gpt.py                            # a minute or two on two cores
    ringrun -np 2 python examples/train_gpt.py --steps 1600 --resume      # go on where that ended
    ringrun -np 2 --restarts 3 python examples/train_gpt.py               # by itself, after a failure
    ringrun -np 4 python examples/train_gpt.py --width 384 --depth 6 --heads 6 --context 256    # 10.9 M parameters

Needs torch. Each rank trains on its GPU where there is one, which needs CuPy (pip install '.[cuda12]').
`--batch` counts the sequences of all ranks: the same batch gives the same loss curve on any number of ranks.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import ringreduce.torch as hvd


class Block(nn.Module):
    """Attention, then a two-layer network; each adds to what it reads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Both of shape (batch, time, width)."""
        per_head = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts every next byte of a text from the bytes before it: 256 tokens, and no tokenizer."""

    def __init__(self, width, depth, heads, context):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, param in self.named_parameters():
            if name.endswith("weight") and param.dim() == 2:
                nn.init.normal_(param, std=0.02)  # as GPT-2

    def forward(self, tokens):
        """(batch, time) bytes to (batch, time, 256) scores of the byte that follows each."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main(argv=None):
    """Train, then show what was learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = {"width": 96, "depth": 4, "heads": 4, "context": 64}
    for name, default in {**shape, "batch": 48, "steps": 800, "save-every": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="(%(default)s)")
    parser.add_argument("--checkpoint", type=Path, default="gpt.pt", metavar="FILE", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    args = parser.parse_args(argv)

    hvd.init()
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(hvd.rank())  # ranks draw different parameters: the broadcast makes them alike
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # init() has selected this rank's GPU
    model = GPT(*(getattr(args, name) for name in shape)).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    if args.resume or int(os.environ.get("RINGREDUCE_RESTART_COUNT", 0)):  # ringrun --restarts, after a failure
        found = hvd.rank() == 0 and args.checkpoint.exists()  # only rank 0 needs to see the file
        saved = hvd.broadcast_object(torch.load(args.checkpoint, map_location="cpu") if found else None, root_rank=0)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            losses = saved["losses"]

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.from_numpy(np.concatenate([np.fromfile(module, np.uint8) for module in modules]))
    for step in range(len(losses), args.steps):
        # All ranks draw the same places, from the step's number, so that there is no generator to save.
        places = torch.from_numpy(np.random.default_rng(step).integers(len(text) - args.context, size=args.batch))
        mine = places[hvd.rank() :: hvd.size(), None] + torch.arange(args.context + 1)
        sequences = text[mine].long().to(device)
        scores = model(sequences[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over the ranks while backward still computes others
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach())))  # equal shares: the mean of all is that of the whole batch
        hvd.mark_step(examples=len(mine))  # so that `ringrun scaling` knows how many sequences a step has
        if hvd.rank() == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(saved, args.checkpoint.with_suffix(".part"))
            args.checkpoint.with_suffix(".part").replace(args.checkpoint)  # whole, or not at all
            print(f"step {step + 1} of {args.steps}, on {device}: loss {losses[-1]:.3f} nats per byte", flush=True)

    if hvd.rank() == 0:
        torch.set_grad_enabled(False)
        written = torch.tensor([list(b"def ")], device=device)
        for _ in range(300):
            scores = model(written[:, -args.context :])[0, -1]
            written = torch.cat([written, torch.multinomial(scores.softmax(0), 1)[None]], 1)
        print("".join(chr(byte) if chr(byte).isprintable() or byte == 10 else "·" for byte in written[0].tolist()))


if __name__ == "__main__":
    main()
