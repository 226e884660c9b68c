"""ringreduce on Dask: ranks on the machines that Dask has.

    losses = ringreduce.dask.run(train, args=(0.1,), client=client)        ranks beside the workers
    model = ringreduce.dask.map(train, x, y)[0]                            ranks that are the workers, on their data

Nothing of Dask is imported before a function here is called.
"""

from .chunks import map
from .tasks import run

__all__ = ["map", "run"]
