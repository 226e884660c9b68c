"""What the adapters of all frameworks, which stand above, have in common; no framework is imported here.

registry      whose an optimizer is, and which adapter works with it
common        the names that each adapter exports as they are
collective    the gradient rules of the collectives
not_there     Horovod's names that ringreduce does not have, and what to use instead
torch_backend what `import torch` calls: the backend "ring" is known, and whose "gloo" means it
"""
