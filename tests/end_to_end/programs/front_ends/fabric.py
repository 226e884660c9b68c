"""Lightning's Fabric around a loop."""

import os

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
fabric.launch()
fabric.seed_everything(6, verbose=False)
inputs = torch.rand(48, 6)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(6, 1)
wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True))
for source, targets in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(wrapped(source), targets)
    fabric.backward(loss)
    fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
    optimizer.step()
mean = fabric.all_reduce(loss.detach())
assert fabric.world_size > 1
fabric.save("fabric.ckpt", {"model": wrapped})
