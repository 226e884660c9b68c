"""Cases of a pure function in one test: each takes microseconds, while a test of pytest's takes milliseconds."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def in_a_loop(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but one test, which prints the case that fails.

    Fixtures are made once, for all cases.
    """
    names = tuple(names.replace(",", " ").split()) if isinstance(names, str) else names
    cases = [dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**others: Any) -> None:
            for case in cases:
                try:
                    test(**case, **others)
                except BaseException:
                    print(f"in the case of {case}")
                    raise

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in names]
        loop.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return loop

    return decorate
