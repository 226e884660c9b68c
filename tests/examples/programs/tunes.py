"""Fine-tunes a tiny model by examples/finetune_lora.py: rank 0 alone, then all ranks, then once more what was saved."""

import os

import finetune_lora
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ringreduce.torch as hvd

TINY = ["--weights=base", "--batch=8", "--context=32", "--rank=2", "--alpha=2", "--lr=0.02"]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def tune(*arguments):
    """Train; returns the adapters as one vector. All other weights must be those of the folder, to the bit."""
    model = finetune_lora.main([*TINY, *arguments])
    params = {name.replace(".layer.", "."): param for name, param in model.named_parameters()}
    for name, param in AutoModelForCausalLM.from_pretrained("base").named_parameters():
        assert torch.equal(params.pop(name), param), name
    assert len(params) == 2 * 7 * SHAPE["num_hidden_layers"]
    return torch.cat([param.detach().flatten() for param in params.values()])


def refused(*arguments):
    try:
        finetune_lora.main([*TINY, *arguments])
    except SystemExit as error:
        if hvd.rank() == 0:
            print(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        hvd.init([0])
        torch.manual_seed(1)
        config = LlamaConfig(vocab_size=256, initializer_range=0.1, **SHAPE)
        AutoModelForCausalLM.from_config(config).save_pretrained("base")
        tune("--steps=20", "--save=alone.pt")
        hvd.shutdown()
    hvd.init()
    adapters = hvd.allgather(tune("--steps=20", "--save=together.pt")[None])
    assert torch.equal(adapters[0], adapters[1])
    again = tune("--steps=0", "--adapters=together.pt")
    assert torch.equal(again, adapters[0])
    refused("--layers=c_attn,c_proj")
    refused("--adapters=together.pt", "--rank=3")
    refused("--weights=.")
    refused("--batch=7")
    if hvd.rank() == 0:
        LlamaConfig(vocab_size=256, **SHAPE | {"hidden_size": 64}).save_pretrained("base")
    hvd.barrier()
    refused()
