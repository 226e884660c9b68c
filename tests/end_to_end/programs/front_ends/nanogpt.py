"""The shape of nanoGPT's train.py: text as bytes, accumulation by require_backward_grad_sync, a cosine, AdamW."""

import argparse
import math
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, n_embd, n_head, max_iters, learning_rate = 4, 16, 32, 4, 4, 1e-2
gradient_accumulation_steps = 6
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)
with open(argparse.__file__, "rb") as file:
    data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            each.view(B, T, n_head, C // n_head).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.h = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd), Block()
        self.lm_head = nn.Linear(n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        logits = self.lm_head(self.h(self.wte(idx) + self.wpe(torch.arange(idx.size(1)))))
        return logits, F.cross_entropy(logits.view(-1, 256), targets.view(-1))


model = raw_model = GPT()
if ddp:
    torch.manual_seed(1337 + ddp_rank)
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size].long() for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + block_size].long() for i in ix])


for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        X, Y = get_batch()
        logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
model = raw_model
