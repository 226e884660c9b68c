"""Fine-tune a language model with LoRA, data-parallel: a few small matrices train and travel, the model stays as it is.

    ringrun -np 2 python examples/finetune_lora.py                              # a small Llama with random weights
    ringrun -np 2 python examples/finetune_lora.py --weights ~/models/SmolLM-135M    # a folder as Hugging Face has them
    ringrun -np 2 python examples/finetune_lora.py --adapters lora.pt --steps 0      # load what was saved, and evaluate

Needs torch and transformers. The text is Python's language reference, which ships with Python; its last tenth is held
out. `--weights` takes any causal model with a config.json and *.safetensors; nothing is downloaded. Without a tokenizer
in that folder, each byte is a token.
"""

import argparse
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import ringreduce.torch as hvd

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=512, initializer_range=0.1,
)  # fmt: skip


class LoRA(nn.Module):
    """A linear layer that is frozen, plus the product of two thin matrices that train; Hu et al., 2021.

    `up` starts at zero, so that the model starts as it was. Both are float32, whatever the layer is.
    """

    def __init__(self, layer, rank, alpha):
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        options = {"device": layer.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.randn(rank, layer.in_features, **options) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **options))

    def forward(self, x):
        """(..., in_features) to (..., out_features)."""
        change = functional.linear(functional.linear(x.float(), self.down), self.up)
        return self.layer(x) + (self.scale * change).to(x.dtype)


def add_lora(model, names, rank, alpha):
    """Freeze the model and wrap its linear layers of these names; returns the parameters that train, by name."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in names and isinstance(layer, nn.Linear):
                setattr(module, name, LoRA(layer, rank, alpha))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not trained:
        linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        sys.exit(
            f"--layers {','.join(names)}: the model has none of these; its linear layers: {', '.join(sorted(linear))}"
        )
    return trained


def load(weights):
    """The model, and the function from text to its tokens."""
    if weights is None:
        return AutoModelForCausalLM.from_config(SMALL), lambda text: list(text.encode())
    if not (weights / "config.json").is_file():
        sys.exit(f"--weights {weights}: expected a folder with a config.json, as save_pretrained() writes it")
    model, info = AutoModelForCausalLM.from_pretrained(
        weights, dtype="auto", local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    misfits = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    if misfits:
        sys.exit(f"--weights {weights}: the weights do not fit config.json: {', '.join(sorted(misfits)[:3])} …")
    if any(weights.glob("tokenizer*")):
        return model, AutoTokenizer.from_pretrained(weights, local_files_only=True).encode
    if model.config.vocab_size < 256:
        sys.exit(f"--weights {weights}: no tokenizer there, and {model.config.vocab_size} tokens are too few for bytes")
    return model, lambda text: list(text.encode())


def go_on(model, trained, file, device):
    """Load adapters that were saved."""
    saved = torch.load(file, map_location=device)
    if {name: each.shape for name, each in saved.items()} != {name: each.shape for name, each in trained.items()}:
        sys.exit(f"--adapters {file}: made for another model, other --layers or another --rank")
    model.load_state_dict(saved, strict=False)


def arguments(argv):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a model as save_pretrained() writes it")
    parser.add_argument("--adapters", type=Path, metavar="FILE", help="go on with adapters that were saved")
    parser.add_argument("--save", type=Path, default="lora.pt", metavar="FILE", help="the adapters alone (%(default)s)")
    layers = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    parser.add_argument("--layers", default=layers, help="names of the linear layers to adapt (%(default)s)")
    for name, default in {"rank": 8, "alpha": 16, "batch": 16, "context": 128, "steps": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="(%(default)s)")
    return parser.parse_args(argv)


def main(argv=None):
    """Train the adapters, and save them; returns the model."""
    args = arguments(argv)
    hvd.init()
    if args.batch % hvd.size():
        sys.exit(
            f"--batch {args.batch} cannot be shared equally by {hvd.size()} ranks; pass a multiple of {hvd.size()}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # init() has selected this rank's GPU
    torch.manual_seed(0)  # the same random weights on all ranks
    model, encode = load(args.weights)
    trained = add_lora(model.to(device), args.layers.split(","), args.rank, args.alpha)
    if args.adapters:
        go_on(model, trained, args.adapters, device)
    hvd.broadcast_parameters(trained, root_rank=0)  # the frozen weights are the same already
    optimizer = torch.optim.AdamW(trained.values(), lr=args.lr, weight_decay=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=trained.items())

    tokens = torch.tensor(encode("\n".join(topics.values())))
    text, held_out = tokens.tensor_split([len(tokens) * 9 // 10])

    def loss_of(text, starts, **options):
        sequences = text[starts[:, None] + torch.arange(args.context + 1)].to(device)
        scores = model(sequences[:, :-1]).logits
        return functional.cross_entropy(scores.flatten(0, 1).float(), sequences[:, 1:].flatten(), **options)

    @torch.no_grad()
    def evaluate():
        """The mean loss of 64 sequences from the held-out text, of which each rank computes its share."""
        starts = torch.linspace(0, len(held_out) - args.context - 1, 64).long()[hvd.rank() :: hvd.size()]
        sums = sum(loss_of(held_out, each, reduction="sum") for each in starts.split(8))
        return float(hvd.allreduce(sums, op=hvd.Sum, name="held out")) / 64 / args.context

    def say(line):
        if hvd.rank() == 0:
            print(line, flush=True)

    count, total = sum(each.numel() for each in trained.values()), sum(each.numel() for each in model.parameters())
    say(f"{count:,} of {total:,} parameters train: {count / total:.2%}")
    say(f"held-out loss {evaluate():.4f} before")
    began_s = time.perf_counter()
    for step in range(args.steps):
        # all ranks draw the same batch, and each takes its share
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = loss_of(text, starts[hvd.rank() :: hvd.size()])
        loss.backward()  # gradients of the adapters alone, and nothing else travels
        optimizer.step()
        if (step + 1) % 20 == 0:
            mean = float(hvd.allreduce(loss.detach(), name="loss"))
            speed = (step + 1) * args.batch * args.context / (time.perf_counter() - began_s)
            say(f"step {step + 1} of {args.steps}: loss {mean:.4f}, {speed:,.0f} tokens/s")
    if args.steps:
        if hvd.rank() == 0:
            torch.save(trained, args.save)
        say(f"saved {args.save}")
    say(f"held-out loss {evaluate():.4f} after")
    return model


if __name__ == "__main__":
    main()
