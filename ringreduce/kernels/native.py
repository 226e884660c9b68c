"""native.c, compiled: sums, copies and waits without the GIL; None where no compiler was there for the installation.

Then NumPy's passes do the same, to the same bits: ranks with the module and ranks without it may work together.
"""

from __future__ import annotations

import importlib
from typing import Any

MOST_PARTS = 256  # of a sum, so also ranks of a host, as in native.c
module: Any
MISSING = ""
"""Why there is no module."""
try:
    module = importlib.import_module("ringreduce.kernels._native")
except ModuleNotFoundError:
    module, MISSING = None, "it was not compiled; pip does that where it finds a C compiler and Python's headers"
except ImportError as error:
    module, MISSING = None, f"it cannot be loaded: {error}"
