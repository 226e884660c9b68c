"""ringreduce on Ray: ranks on the machines that Ray has.

    import ringreduce.ray

Nothing of Ray is imported before a function here is called.
"""

from __future__ import annotations

__all__: list[str] = []
