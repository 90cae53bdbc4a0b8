"""The examples of the names that `import medsilo` and `medsilo.extend` give."""

import doctest
import inspect
from pathlib import Path

import pytest

import medsilo
from medsilo import extend

NAMES = [f"{place.__name__}.{name}" for place in (medsilo, extend) for name in place.__all__ if name != "__version__"]
# Types without a docstring of their own, which docs/research/extend.md describes; and one that a model makes.
WITHOUT = {"Modules", "Outgoing", "Receive", "Stop", "Tensors", "predict_all"}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    own = name.rpartition(".")[2]
    found = getattr(medsilo if name.count(".") == 1 else extend, own)
    place = vars(inspect.getmodule(found) or medsilo)
    tests = doctest.DocTestFinder(recurse=False).find(found, name, globs=dict(place))
    assert own in WITHOUT or any(test.examples for test in tests)
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0
