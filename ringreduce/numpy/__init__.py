"""Optimizers for arrays of NumPy and CuPy, and the functions that send every other optimizer to its own adapter.

optimizer  DistributedOptimizer, around whatever takes gradients
sharded    ShardedOptimizer, around a function that makes an optimizer of pieces
local      LocalSGD, DiLoCo
"""
