"""ringreduce on Dask: ranks on the machines that Dask has.

    import ringreduce.dask

Nothing of Dask is imported before a function here is called.
"""

from __future__ import annotations

__all__: list[str] = []
