"""ringreduce on Spark: ranks on the machines that Spark has.

    import ringreduce.spark

Nothing of Spark is imported before a function here is called.
"""

from __future__ import annotations

__all__: list[str] = []
