"""What the adapters of all frameworks, which stand above, have in common; no framework is imported here.

registry      whose an optimizer is, and which adapter works with it
common        the names that each adapter exports as they are
collective    the gradient rules of the collectives
horovod       all names of Horovod, and what to use in place of those that ringreduce does not have
stand_in      what `import horovod` gives in jobs of `ringrun --horovod`
not_there     optimizers that have no adapter, and what to use instead
torch_backend what `import torch` calls: the backend "ring" is known, and whose "gloo" means it
"""
