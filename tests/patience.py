"""How long a test waits for what is promised within some seconds: other programs may have the cores."""

import os


def patient(seconds: float) -> float:
    """So many seconds on a machine of one's own, as many more as there are programs that want a core."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
