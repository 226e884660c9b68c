import torch

import ringreduce.torch as hvd

hvd.init()
model = torch.nn.Linear(3, 1)
optimizer: torch.optim.SGD = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loss: torch.Tensor = hvd.allreduce(model(torch.ones(2, 3)).sum())
optimizer.step()
