"""native.c, compiled: sums, copies and waits without the GIL; None where no compiler was there for the installation.

Then NumPy's passes do the same, to the same bits: ranks with the module and ranks without it may work together.
"""

from __future__ import annotations

import importlib
from typing import Any

MOST_PARTS = 256  # of a sum, so also ranks of a host, as in native.c
module: Any
try:
    module = importlib.import_module("ringreduce.kernels._native")
except ImportError:
    module = None
