"""Lists the packages, and the compiled module; all metadata stands in setup.cfg.

`launcher/` is installed under the import name `ringrun`, which `packages = find:` cannot express. Without a compiler
the module is left out, and NumPy does its work: `optional`. `pip install -e` puts a folder with links to both packages
on the path: setuptools would install an import hook instead, which type checkers cannot follow.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

# Python's stable ABI has buffers from 3.11 on, and none for builds without a GIL: one wheel serves all that have one
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
NATIVE = Extension(
    "ringreduce.kernels._native",
    ["ringreduce/kernels/native.c"],
    # sums are NumPy's bits; compilers would make calls of memcpy of loops that are no memcpy on purpose
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-tree-loop-distribute-patterns"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
    py_limited_api=STABLE,
    optional=True,
)


class Wheel(bdist_wheel):
    """Names a wheel without the compiled module as what it is, one for any machine."""

    def run(self):
        self.run_command("build_ext")
        if not Path(self.get_finalized_command("build_ext").get_ext_fullpath(NATIVE.name)).exists():
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


FOLDERS = {"ringreduce": "ringreduce", "ringrun": "launcher"}
LINKS = Path(".editable")
IS_EDITABLE = "editable_wheel" in sys.argv
if IS_EDITABLE:
    LINKS.mkdir(exist_ok=True)
    for name, folder in FOLDERS.items():
        if not (LINKS / name).is_symlink():
            (LINKS / name).symlink_to(Path("..", folder))

setup(
    packages=[
        *find_packages(include=["ringreduce", "ringreduce.*"]),
        "ringrun",
        *(f"ringrun.{name}" for name in find_packages("launcher")),
    ],
    package_dir={"": str(LINKS)} if IS_EDITABLE else FOLDERS,
    ext_modules=[NATIVE],
    cmdclass={"bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
