"""Public names of medsilo, of its client, of its recipes and of `extend` have examples and documented arguments."""

import ast
import doctest
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import medsilo
from medsilo import client, extend, recipes
from medsilo_lab import extend as extend_lab

PLACES = (medsilo, extend, extend_lab)
NAMES = [f"{place.__name__}.{name}" for place in PLACES for name in place.__all__ if name != "__version__"]
# types without a docstring, because docs/research/extend.md describes them or because a model creates them
WITHOUT = {"Modules", "Outgoing", "Receive", "Stop", "Tensors", "predict_all"}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    place, _, own = name.rpartition(".")
    found = getattr(import_module(place), own)
    known = vars(inspect.getmodule(found) or medsilo)
    tests = doctest.DocTestFinder(recurse=False).find(found, name, globs=dict(known))
    assert own in WITHOUT or any(test.examples for test in tests)
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


# the files in an example of NVFlare's repository
FORM = {"README.md", "client.py", "job.py", "model.py", "requirements.txt"}


def imported(folder: Path) -> set[str]:
    trees = [ast.parse(path.read_text("utf-8")) for path in folder.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    known = sys.stdlib_module_names | {path.stem for path in folder.glob("*.py")}
    return {name.partition(".")[0] for name in names} - known


def test_an_example_names_what_its_scripts_import(root: Path) -> None:
    own = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    brought = {Requirement(line).name.lower() for line in own}
    found = packages_distributions()
    folders = [path for path in (root / "examples").iterdir() if (path / "job.py").exists()]
    assert len(folders) == 4
    for folder in folders:
        assert {path.name for path in folder.iterdir()} >= FORM
        named = {Requirement(line).name.lower() for line in (folder / "requirements.txt").read_text().splitlines()}
        assert {"medsilo", "medsilo-lab"} <= named
        for package in imported(folder):
            distributions = {name.lower() for name in found[package]}
            assert distributions & (named | brought), (folder.name, package)


def described(text: str | None) -> set[str]:
    _, _, block = inspect.cleandoc(text or "").partition("\nArgs:\n")
    lines = block.partition("\n\n")[0]
    return {name for names in re.findall(r"^    (\w+(?:, \w+)*): \S", lines, re.M) for name in names.split(", ")}


def callables() -> dict[str, tuple[Callable[..., Any], str]]:
    found: dict[str, tuple[Callable[..., Any], str]] = {}
    for name in medsilo.__all__:
        own = getattr(medsilo, name)
        if inspect.isfunction(own):
            found[name] = own, own.__doc__ or ""
        elif inspect.isclass(own) and "__init__" in vars(own):
            found[name] = own.__init__, f"{own.__init__.__doc__ if name in ('Run', 'Comparison') else own.__doc__}"
    for kind in (medsilo.Run, medsilo.Comparison):
        methods = {name: own for name, own in vars(kind).items() if inspect.isfunction(own) and name[0] != "_"}
        found |= {f"{kind.__name__}.{name}": (own, own.__doc__ or "") for name, own in methods.items()}
    for name in import_module("medsilo_script.client").__all__:
        found[f"client.{name}"] = getattr(client, name), getattr(client, name).__doc__ or ""
    recipe = recipes.MethodRecipe.__init__
    return found | {"recipes.MethodRecipe": (recipe, recipe.__doc__ or "")}


def test_each_argument_of_a_public_name_is_described() -> None:
    public = callables()
    assert {"run", "compare", "data", "SuperModel", "Run.predict", "client.join", "recipes.MethodRecipe"} <= set(public)
    odd = {}
    for name, (does, text) in public.items():
        taken = set(inspect.signature(does).parameters) - {"self"}
        if taken != described(text) or re.search(r"\b(?:told|what is)\b", text):
            odd[name] = sorted(taken ^ described(text))
    assert not odd
