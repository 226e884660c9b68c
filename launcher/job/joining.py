"""Whether the ranks of a job all run alone, each as if it were the only one. Pure."""

from ..connection.wire import Alone
from ..text import counted

_CPU = "without GPUs {} needs {}"
_LIGHTNING = _CPU.format("Lightning", 'strategy="ddp", accelerator="cpu", devices=RANKS_PER_HOST, num_nodes=HOSTS')
_CURES = {
    **dict.fromkeys(("lightning", "lightning_fabric", "pytorch_lightning"), _LIGHTNING),
    "transformers.trainer": _CPU.format("transformers", "TrainingArguments(use_cpu=True)"),
    "accelerate": _CPU.format("accelerate", "Accelerator(cpu=True)"),
    "torch": "call torch.distributed.init_process_group() or ringreduce.init()",
}
_EACH_ITS_OWN = (
    "are connected, but have reduced no gradients: each has trained its own model; wrap the model in torch's "
    "DistributedDataParallel, or the optimizer in ringreduce.torch.DistributedOptimizer"
)


class Joining:
    """What the ranks of one job have said of whether they have joined others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._alone: dict[int, Alone] = {}
        self._told = size == 1
        self._is_initialized = False
        self._members: dict[tuple[int, int], set[int]] = {}  # of groups, by the rank whose processes they are, and size

    def joined(self) -> None:
        """A rank has called ringreduce.init()."""
        self._is_initialized = True

    def grouped(self, rank: int, member: int, size: int) -> None:
        """A process of `rank` is a member of a process group; those that it has started may be all the others."""
        self._members.setdefault((rank, size), set()).add(member)

    def alone(self, rank: int, said: Alone) -> str:
        """`rank` says that it has joined no other: return what to tell the user, once, if that is so of all ranks."""
        self._alone[rank] = said
        in_vain = all(each.in_vain for each in self._alone.values())
        if self._told or len(self._alone) < self._size or (self._has_joined() and not in_vain):
            return ""
        self._told = True
        cure = _CURES.get(said.imported, "call ringreduce.init()")
        if self._members and not said.in_vain:
            cure = "let ringrun start the ranks, in place of torchrun, mp.spawn and notebook_launcher"
        if said.in_vain and said.imported == "torch":
            return f"the {counted(self._size, 'rank')} {_EACH_ITS_OWN}"
        when = "" if said.ends else "after a minute "
        return f"{when}the {counted(self._size, 'rank')} are not connected: each is running alone; {cure}"

    def _has_joined(self) -> bool:
        """Whether some rank has joined another: by init(), or in a group that has members in other ranks."""
        return self._is_initialized or any(len(each) < size for (_, size), each in self._members.items())
