import importlib

import pytest

MODULES = ["ringreduce", "ringreduce.torch"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("elastic", "is not supported yet; `ringrun --restarts N` restarts a job after a failure"),
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
