import importlib

import pytest

MODULES = ["ringreduce", "ringreduce.torch"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("elastic", "is not there yet; `ringrun --restarts N` goes on after a failure"),
        ("run", "is not there yet; start a script of yours with `ringrun -np N"),
        ("callbacks", "is not there yet; they are for Keras"),
        ("no_such_thing", "has no attribute 'no_such_thing'$"),
    ],
)
def test_what_is_not_there_yet_says_so(module, name, says):
    package = pytest.importorskip(module) if module.endswith("torch") else importlib.import_module(module)
    assert not hasattr(package, name)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'.*{says}|{says}"):
        getattr(package, name)
