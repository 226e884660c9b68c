"""transformers' Trainer: a small GPT-2 from its config, on the text of a file of Python's, evaluated and saved."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH = 32
with open(argparse.__file__, "rb") as file:
    text = torch.frombuffer(bytearray(file.read()[: 64 * LENGTH]), dtype=torch.uint8).long().view(-1, LENGTH)
samples = [{"input_ids": each, "labels": each} for each in text]
set_seed(4)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    output_dir="trained",
    use_cpu=True,
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=0.1,
    optim="sgd",  # Adam makes much of a gradient that is zero but for rounding: that of GPT-2's bias of keys
    eval_strategy="steps",
    eval_steps=3,
    save_steps=3,
    logging_steps=2,
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(model=model, args=arguments, train_dataset=samples[8:], eval_dataset=samples[:8])
trainer.train()
assert trainer.args.world_size > 1
