"""Lists the packages; all metadata stands in setup.cfg.

`launcher/` is installed under the import name `ringrun`, which `packages = find:` cannot express.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["ringreduce", "ringreduce.*"]),
        "ringrun",
        *(f"ringrun.{name}" for name in find_packages("launcher")),
    ],
    package_dir={"ringrun": "launcher"},
)
