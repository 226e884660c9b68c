"""accelerate's Accelerator: accumulation, clipping, metrics from all ranks, a state that is saved and loaded."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(3)
inputs = torch.rand(48, 6)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(2):
    for source, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(source), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
seen = sum(len(accelerator.gather_for_metrics(targets)) for _, targets in loader)
assert seen == len(dataset), "each sample once, on whichever rank"
assert accelerator.num_processes > 1
model = accelerator.unwrap_model(model)
accelerator.end_training()
