"""ringreduce on Ray: ranks on the machines that Ray has.

    losses = ringreduce.ray.run(train, args=(0.1,), np=8, gpus=1)                            ranks beside its workers
    executor = ringreduce.ray.RayExecutor(num_workers=8, use_gpu=True)                       ranks that are its actors

Nothing of Ray is imported before a function here is called.
"""

from .elastic import ElasticRayExecutor
from .executor import RayExecutor
from .tasks import run

__all__ = ["ElasticRayExecutor", "RayExecutor", "run"]
