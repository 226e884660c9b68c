"""Train a small GPT on the source of Python's standard library, data-parallel, and let it write some Python.

    ringrun -np 2 python examples/train_gpt.py                            # a minute or two on two cores
    ringrun -np 2 python examples/train_gpt.py --steps 1600 --resume      # go on where that ended
    ringrun -np 2 --restarts 3 python examples/train_gpt.py               # by itself, after a failure
    ringrun -np 4 python examples/train_gpt.py --width 384 --depth 6 --heads 6 --context 256    # 10.9 M parameters

Every rank trains on its GPU where there is one (which needs CuPy: pip install 'ringreduce[cuda12]'), else on the CPU.
Needs torch, matplotlib and tqdm. Nothing is downloaded: the text is on every machine that has Python. Into --out go
checkpoint.pt (to resume from), losses.json and loss.png.

The text is read as bytes, so there are 256 tokens and no tokenizer. `--batch` counts the sequences of all ranks
together: the same batch gives the same loss curve on 1, 2 or 4 ranks.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import ringreduce as rr


class Block(nn.Module):
    """Attention, then a two-layer network; each adds to what it reads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Both of shape (batch, time, width)."""
        per_head = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts every next byte of a text from the bytes before it."""

    def __init__(self, width, depth, heads, context):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, param in self.named_parameters():
            if name.endswith("weight") and param.dim() == 2:
                nn.init.normal_(param, std=0.02)  # as GPT-2

    def forward(self, tokens):
        """(batch, time) bytes to (batch, time, 256) scores of the byte that follows each."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, prompt, count, generator):
        """The prompt, continued by `count` bytes."""
        text = list(prompt)
        for _ in range(count):
            window = torch.tensor([text[-self.context :]], device=self.head.weight.device)
            scores = self(window)[0, -1].cpu()  # where the generator is
            text.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
        return bytes(text)


def read_text():
    """The modules of Python's standard library, one after the other, in the order of their names."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.from_numpy(np.concatenate([np.fromfile(module, np.uint8) for module in modules]))


def draw_batch(text, step, args, device):
    """This rank's share of the batch of `step`, and the bytes to predict; both (batch / size, context), on `device`.

    All ranks draw the same places from the same seed and take every size-th. The batch depends on the step's number and
    on nothing drawn before, so there is no generator to save in a checkpoint.
    """
    places = np.random.default_rng([args.seed, step]).integers(len(text) - args.context, size=args.batch)
    share = torch.from_numpy(places[rr.rank() :: rr.size()])
    sequences = text[share[:, None] + torch.arange(args.context + 1)].long()
    if device.type == "cuda":
        sequences = sequences.pin_memory().to(device, non_blocking=True)  # while the GPU still does the step before
    return sequences[:, :-1], sequences[:, 1:]


def save(checkpoint, path):
    """Replace the file in one stroke: whoever is killed while writing leaves the old one as it was."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def plot(losses, path):
    """The loss curve as a picture."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title="A small GPT learns the standard library", ylim=(0, None)
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def printable(text):
    """The text without the control characters of a model that has not learnt much: a terminal would obey them."""
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text.decode(errors="replace"))


def digest(model):
    """A short fingerprint of the parameters' bytes: equal only if every bit is."""
    fingerprint = hashlib.blake2b(digest_size=8)
    for param in model.parameters():
        fingerprint.update(param.detach().cpu().numpy().tobytes())
    return fingerprint.hexdigest()


def parse(argv):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="train until this step (%(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="sequences per step, of all ranks (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence (%(default)s)")
    parser.add_argument("--width", type=int, default=96, help="numbers per byte inside the model (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of attention, in each block (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    parser.add_argument("--warmup", type=int, default=100, metavar="STEPS", help="to reach it (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the parameters and the batches (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where files go (%(default)s)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="start from DIR/checkpoint.pt")
    return parser.parse_args(argv)


def main(argv=None):
    """Train, then show what was learnt."""
    args = parse(argv)
    rr.init()
    if args.batch % rr.size():
        sys.exit(
            f"--batch {args.batch} cannot be shared equally by {rr.size()} ranks; pass a multiple of {rr.size()}, "
            f"such as --batch {args.batch + -args.batch % rr.size()}"
        )
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed + rr.rank())  # ranks draw different parameters: the broadcast makes them alike
    checkpoint_path = args.out / "checkpoint.pt"

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # init() has selected this rank's GPU
    text = read_text()
    model = GPT(args.width, args.depth, args.heads, args.context).to(device)
    rr.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = rr.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )

    losses = []
    restarted = int(os.environ.get("RINGREDUCE_RESTART_COUNT", 0)) > 0  # by ringrun --restarts, after a failure
    if args.resume or restarted:
        # Only rank 0 needs to see the file; None tells all ranks that there is none.
        found = rr.rank() == 0 and checkpoint_path.exists()
        checkpoint = rr.broadcast_object(
            torch.load(checkpoint_path, map_location="cpu") if found else None, root_rank=0
        )
        if checkpoint is None and not restarted:
            sys.exit(f"--resume: there is no {checkpoint_path}; train without --resume first, or pass its --out")
        if checkpoint is not None:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            losses = checkpoint["losses"]

    if rr.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        count = sum(param.numel() for param in model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {rr.size()} ranks, on {device}",
            flush=True,
        )

    tokens_per_step = args.batch * args.context
    first_step, start_s = len(losses), time.perf_counter()
    progress = tqdm(
        total=args.steps * tokens_per_step,
        initial=first_step * tokens_per_step,
        unit="tokens",
        unit_scale=True,
        disable=rr.rank() != 0,
    )
    for step in range(first_step, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / args.warmup)
        inputs, targets = draw_batch(text, step, args, device)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over the ranks while backward still computes others
        optimizer.step()

        losses.append(float(rr.allreduce(loss.detach())))  # equal shares: the mean of all is that of the whole batch
        progress.set_postfix(step=step + 1, loss=f"{losses[-1]:.3f}", refresh=False)
        progress.update(tokens_per_step)
        if rr.rank() == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, checkpoint_path)
    progress.close()
    tokens_per_s = (len(losses) - first_step) * tokens_per_step / (time.perf_counter() - start_s)

    digests = rr.allgather_object(digest(model))
    if len(set(digests)) > 1:
        sys.exit(f"the ranks' parameters differ: fingerprints {digests}, by rank; expected equal ones")
    if rr.rank() == 0:
        (args.out / "losses.json").write_text(json.dumps({"losses": losses, "digests": digests}))
        plot(losses, args.out / "loss.png")
        print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}; {tokens_per_s:,.0f} tokens/s")
        print(f"parameters are identical on all {rr.size()} ranks: fingerprint {digests[0]}")
        sample = model.write(b"def ", 300, torch.Generator().manual_seed(args.seed))
        print(f"a sample of what it writes:\n\n{printable(sample)}")


if __name__ == "__main__":
    main()
