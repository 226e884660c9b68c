"""Local steps: each rank trains by itself, and parameters are averaged every few steps; imports no framework.

options    when which fragment is averaged, as the user asked for it; Nesterov
steps      LocalSteps: the anchors, what is on its way, and what becomes of it

The anchors are the parameters as they were after the last average, with 32 bits or more, the same on all ranks. A
fragment, some of the parameters, goes through these steps, with x a rank's own parameters:

    step k      sent = x;  all ranks begin to average anchor - sent, the pseudo-gradient
    k + delay   anchor = outer(anchor, average);  x = anchor + (x - sent)

With no outer optimizer anchor - average is the mean of what was sent. What a rank has learned since is added to it.

Source: McMahan et al., "Communication-Efficient Learning", 2017; Douillard et al., "DiLoCo", 2023, and "Streaming
DiLoCo", 2025 (fragments, the delay), which mixes x and anchor by a constant instead; Shen et al., "CoCoD-SGD", 2019
(that rule); torchft and torch.distributed (names).
"""
