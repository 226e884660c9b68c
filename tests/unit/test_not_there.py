import importlib
import subprocess
import sys

import pytest

import ringreduce as rr

MODULES = ["ringreduce", "ringreduce.torch"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run_elastic", "is not supported yet; start an elastic script with `ringrun --elastic -np N"),
        ("spark", "is not supported yet; start your script with `ringrun -np N"),
        ("callbacks", "is not supported yet; they are for Keras"),
        ("no_such_thing", "has no attribute 'no_such_thing'$"),
    ],
)
def test_what_is_not_there_yet_says_so(module, name, says):
    package = pytest.importorskip(module) if module.endswith("torch") else importlib.import_module(module)
    assert not hasattr(package, name)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'.*{says}|{says}"):
        getattr(package, name)


def test_without_jax_its_adapter_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(rr.MissingExtraError, match=r"needs JAX; install it with: pip install 'ringreduce\[jax\]'"):
        importlib.import_module("ringreduce.jax")
    assert "ringreduce.jax" not in sys.modules


def test_importing_ringreduce_imports_no_framework():
    program = "import sys, ringreduce; print({'jax', 'optax', 'torch', 'cupy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
