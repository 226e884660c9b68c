"""How ringrun starts a Python for a module of its own."""

import sys


def run_module(module: str, version: tuple[int, int] = sys.version_info[:2]) -> list[str]:
    """Return what makes a Python of this version run `module`, as `-m` does, whose arguments follow.

    The current folder must not be on its path: a file of the user's may be called like a module that is imported.
    """
    if version >= (3, 11):
        return ["-P", "-m", module]
    return ["-c", f"import runpy, sys; del sys.path[0]; runpy.run_module({module!r}, run_name='__main__')"]
