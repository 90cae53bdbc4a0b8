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
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

import medsilo
from medsilo import client, extend, recipes
from medsilo.core.package import PLACE
from medsilo.extend import methods as extend_methods
from medsilo.extend import networks as extend_networks
from medsilo_lab import extend as extend_lab
from medsilo_lab import testing

PLACES = (medsilo, extend, extend_lab)
# further names that plug-ins often use
USUAL = {
    extend_methods: ("Aggregator", "FedAvg", "network", "pull_back", "seed_for"),
    testing: ("MethodTester", "NetworkTester", "TaskTester"),
}
NAMES = [f"{place.__name__}.{name}" for place in PLACES for name in place.__all__ if name != "__version__"]
NAMES += [f"{place.__name__}.{name}" for place, names in USUAL.items() for name in names]
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


# a function, and the docstrings that may describe its arguments: its docstring, then those of the methods it overrides
Described = tuple[Callable[..., Any], list[str]]


def methods_of(kind: type) -> dict[str, Described]:
    bases = [base for base in kind.__mro__ if base.__module__.startswith("medsilo")]
    # comments in the class describe the functions that are fields of a dataclass
    fields = {name for base in bases for name in vars(base).get("__annotations__", ())}
    found: dict[str, Described] = {}
    for name in {name for base in bases for name in vars(base)} - fields:
        if name[0] == "_" and name != "__init__":
            continue
        definers = [base for base in bases if name in vars(base)]
        methods = [inspect.unwrap(getattr(vars(base)[name], "__func__", vars(base)[name])) for base in definers]
        # the code of a method that a dataclass or a protocol generates is not in a file of medsilo
        if inspect.isfunction(methods[0]) and Path(methods[0].__code__.co_filename).is_relative_to(PLACE):
            documented = definers[:1] + methods[:1] if name == "__init__" else methods
            found[f"{kind.__name__}.{name}"] = methods[0], [item.__doc__ or "" for item in documented]
    return found


def functions_in(module: ModuleType) -> dict[str, Described]:
    functions = {name: item for name, item in vars(module).items() if inspect.isfunction(item) and name[0] != "_"}
    owned = {name: item for name, item in functions.items() if item.__module__ == module.__name__}
    return {f"{module.__name__}.{name}": (item, [item.__doc__ or ""]) for name, item in owned.items()}


def for_plugins() -> dict[str, Described]:
    found: dict[str, Described] = {}
    for place in (extend, extend_methods, extend_networks):
        for name in place.__all__:
            item = inspect.unwrap(getattr(place, name))
            if inspect.isclass(item):
                found |= methods_of(item)
            elif inspect.ismodule(item):
                found |= functions_in(item)
            elif inspect.isfunction(item):
                found[name] = item, [item.__doc__ or ""]
    return found


def test_each_argument_of_a_name_for_plug_ins_is_described_if_there_are_several() -> None:
    public = for_plugins()
    expected = {"Algorithm.make_optimizer", "Classification.__init__", "Objective.loss", "classification"}
    assert expected | {"medsilo.core.files.write_csv", "Segmentation.loss", "Scan.check_size"} <= set(public)
    odd = {}
    for name, (function, docstrings) in public.items():
        taken = set(inspect.signature(function).parameters) - {"self", "cls"}
        known = set().union(*map(described, docstrings))
        if (len(taken) > 1 and not taken <= known) or not described(docstrings[0]) <= taken:
            odd[name] = sorted(taken ^ known)
    assert not odd
