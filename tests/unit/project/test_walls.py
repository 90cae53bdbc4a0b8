"""The import contracts in pyproject.toml detect each kind of violation; a test also checks strings that name a
module.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.core.package import PLACE
from tests.sources import modules, tree_of

pytestmark = pytest.mark.xdist_group("house rules")  # one process reads each file once

# a string that names a module or a class that the code loads
NAMED = re.compile(r"(medsilo\w*(?:\.\w+)+)(?::\w+)?")


def layers_of_parties() -> list[list[str]]:
    """Return the packages by layer, from the lowest layer; packages of one layer are independent."""
    rules = tomllib.loads((PLACE.parent / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    [own] = [rule["layers"] for rule in rules if rule["id"] == "parties"]
    return [layer.split(" | ") for layer in reversed(own)]


def breaches_in_texts(place: Path) -> Iterator[str]:
    level = {package: number for number, layer in enumerate(layers_of_parties()) for package in layer}
    for package in level:
        for path in sorted((place / package).rglob("*.py")):
            for node in ast.walk(tree_of(path)):
                text = node.value if isinstance(node, ast.Constant) else None
                named = NAMED.fullmatch(text) if isinstance(text, str) else None
                other = named[1].partition(".")[0] if named else package
                above = named and other != package and other in level and level[other] >= level[package]
                if named and above and {named[1], named[1].rpartition(".")[0]} & modules().keys():
                    yield f"{path.relative_to(place)}:{node.lineno}: {text}"


def broken(place: Path) -> bool:
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"]
    done = subprocess.run(command, cwd=place.parent, capture_output=True, text=True, env={"PYTHONPATH": str(place)})
    assert "Analyzed" in done.stdout, done.stdout + done.stderr
    return done.returncode != 0


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walls")
    shutil.copytree(PLACE, folder / "custom", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(PLACE.parent / "pyproject.toml", folder / "pyproject.toml")
    assert not broken(folder / "custom")
    return folder / "custom"


AT_TOP = "from medsilo_server.requests import Retry\n"
BREACHES = {
    "top": AT_TOP,
    "late": f"\n\ndef _late() -> None:\n    {AT_TOP}",
    "typed": f"\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    {AT_TOP}",
}


@pytest.mark.parametrize("kind", BREACHES)
def test_an_import_over_a_wall_breaks_a_contract(copy: Path, kind: str) -> None:
    file = copy / "medsilo/federation/site_state.py"
    whole = file.read_text("utf-8")
    file.write_text(whole + BREACHES[kind], "utf-8")
    try:
        assert broken(copy)
    finally:
        file.write_text(whole, "utf-8")


@pytest.mark.slow
def test_a_name_in_a_text_over_a_wall_is_seen(copy: Path) -> None:
    assert list(breaches_in_texts(copy)) == []
    file = copy / "medsilo/site/kit.py"
    tree_of.cache_clear()
    file.write_text(f'{file.read_text("utf-8")}\n\nPLACE = "medsilo_server.requests:Retry"\n', "utf-8")
    [found] = breaches_in_texts(copy)
    tree_of.cache_clear()
    assert found.startswith("medsilo/site/kit.py:") and found.endswith("medsilo_server.requests:Retry")


# ---------------------------------------------------------------------------------------------------- privates

# names with a leading underscore that belong to other projects
OF_OTHERS = {
    "_foreach_": "torch's operations over many tensors at once",
    "_BatchNorm": "torch's classes of layers, over their dimensions",
    "_InstanceNorm": "the same",
    "_ConvNd": "the same",
    "_ConvTransposeNd": "the same",
    "_parameters": "torch's tables of a layer, for layers that are put together by hand",
    "_buffers": "the same",
    "_non_persistent_buffers_set": "the same",
    "_C": "torch's switch for a subclass of Tensor",
    "_disabled_torch_function_impl": "the same",
    "_exit": "os._exit, by which a forked process ends without what its parent registered",
    "_replace": "public, of named tuples",
    "_asdict": "the same",
    "_fields": "the same",
    "_job": "the job of NVFlare's recipes",
    "_get_deep_supervision_scales": "nnU-Net's own trainer, whose plans are to be met exactly",
    "_build_loss": "the same",
    "_sample_foreground_locations": "the same",
}
DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# functions in this package that replace functions of NVFlare, and therefore have the names of NVFlare's functions
PATCHES = "nvflare_reliability"
# names that a class offers to its subclasses in the same package
FOR_SUBCLASSES = {"medsilo/mixing": "the rooms and steps of an aggregator, of which each mixer changes one"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def privates_of_others(place: Path) -> Iterator[str]:
    """Yield the names with a leading underscore that a file uses without defining, except other projects' names."""
    for path in sorted(place.rglob("*.py")):
        nodes, room = list(ast.walk(tree_of(path))), path.parent.relative_to(place).as_posix()
        own = {node.name for node in nodes if isinstance(node, DEFINED)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        own |= {text for node in nodes if isinstance(node, ast.Constant) and isinstance(text := node.value, str)}
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            inherited = False
            if isinstance(node, ast.Attribute):
                names = [node.attr] if node.attr not in own else []
                inherited = isinstance(node.value, ast.Name) and node.value.id == "self" and room in FOR_SUBCLASSES
            for name in filter(is_private, names):
                if not inherited and not any(name.startswith(other) for other in OF_OTHERS):
                    yield f"{path.relative_to(place)}:{node.lineno}: {name}"


@pytest.mark.slow
def test_no_module_uses_another_s_private_names(copy: Path) -> None:
    assert [found for found in privates_of_others(PLACE) if not found.startswith(PATCHES)] == []
    (copy / "medsilo/site/breach.py").write_text(
        "from medsilo.site.kit import _hidden\n\nfrom medsilo.site import kit\n\nkit._other()\n", "utf-8"
    )
    found = [one for one in privates_of_others(copy) if not one.startswith(PATCHES)]
    (copy / "medsilo/site/breach.py").unlink()
    assert [one.rpartition(": ")[2] for one in found] == ["_hidden", "_other"]
