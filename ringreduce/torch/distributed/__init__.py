"""The torch.distributed backend "ring": a script of DistributedDataParallel changes one word.

    import ringreduce.torch.distributed  # registers it

    torch.distributed.init_process_group("ring")

group      the ProcessGroup: some ranks, and the backends of their devices
operations torch's operations, as ringreduce's
forms      the arguments of these in torch's other forms
work       one call of a group: its tensors as buffers, its operation, waiting for it, and its future
uncompiled methods that Dynamo must not compile
tensors    torch's tensors, reductions and timeouts, as ringreduce has them

torch/rendezvous.py says which rank this is. For jobs that keep another backend there is torch/bucket_hook.py.
A group is a channel for operations in the order of the program (execution/channel.py), which its members open alone.
"""

from ringreduce.torch.distributed.group import RingProcessGroup as RingProcessGroup
from ringreduce.torch.distributed.group import register

__all__ = ["RingProcessGroup"]

register()
