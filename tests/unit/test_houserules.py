"""Rules of the house, read from the package's source: what is never called, what is documented."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import medsilo
from medsilo import extend
from medsilo.core.errors import MedsiloError
from medsilo.core.package import PLACE
from medsilo.core.text import is_safe_name
from medsilo.core.yaml_text import load_yaml
from medsilo.extend import methods as extend_methods
from medsilo.extend import networks as extend_networks
from medsilo.registry import METHODS
from medsilo.tasks.inference import Inference
from medsilo.tasks.objective import Objective
from medsilo.tasks.task import Task
from tests import sizes
from tests.rooms import BENEATH, DOCUMENT, PLUGINS, ROOMS, document, layers
from tests.sizes import tree_of

pytestmark = pytest.mark.xdist_group("house rules")  # one process reads each file once

PACKAGE = Path(medsilo.__file__).parent

CLASS_IN_TEXT = re.compile(r"(medsilo(?:\.\w+)+):(\w+)")  # as the registry writes classes, for all rooms above it
# Modules that are loaded by a name that no reader of the source can know, and whose name it is.
LOADERS = {
    "registry": "one of its own table, or an installed package's entry point",
    "federation.process.worker": "the participant's class, by the process that started this one",
    "core.lazy": "one of those that its caller lists",
    "nvflare_reliability.compatibility": "NVFlare's, whose code a part was made for",
    "flare.jobs": "the classes that a job names",
    "recipes": "the class of a model, on the lead's own machine",
}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def plugin_sources() -> list[Path]:
    return sorted(path for name in PLUGINS for path in (PLACE / name).rglob("*.py"))


def reliability_sources() -> list[Path]:
    return sorted(path for name in BENEATH for path in (PLACE / name).rglob("*.py"))


def everything() -> list[Path]:
    return [*sources(), *plugin_sources(), *reliability_sources()]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module that a file imports, anywhere in it, as a dotted name, with the line."""
    return tuple(imports_in(tree_of(path), path))


def imports_in(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports say the whole name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        if isinstance(node, ast.Call) and loads_a_module(node) and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value, node.lineno
        text = node.value if isinstance(node, ast.Constant) and path != PACKAGE / "registry.py" else None
        if isinstance(text, str) and (named := CLASS_IN_TEXT.fullmatch(text)):
            yield ".".join(named.groups()), node.lineno


def loads_a_module(call: ast.Call) -> bool:
    return dotted(call.func).rpartition(".")[2] in ("import_module", "__import__")


def loads_by_name(tree: ast.AST) -> bool:
    """Return whether modules are loaded whose name is no text that stands there."""
    loading = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and loads_a_module(node)]
    return any(not isinstance(node.args[0], ast.Constant) for node in loading)


def test_who_may_import_whom(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the contracts in pyproject.toml, which see imports inside functions, too; each room stands in one of them."""
    monkeypatch.syspath_prepend(root)
    assert lint_imports(str(root / "pyproject.toml"), no_cache=True) == 0
    assert {name for layer in layers() for name in layer} == ROOMS.keys() - {"extend"}


def test_modules_are_loaded_by_name_in_few_places_only() -> None:
    found = {module_of(path).removeprefix("medsilo.") for path in everything() if loads_by_name(tree_of(path))}
    assert found == {*LOADERS}


def test_the_course_knows_no_method() -> None:
    """Neither by import nor by name: what a method is able to do, it says itself."""
    for path in sources():
        if part_of(path) in ("schedule", "learning", "mixing"):
            texts = {node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)}
            assert texts & {*METHODS} == set(), path


# ---------------------------------------------------------------------------------------------------- plug-ins
MOST_NAMES, MOST_OF_METHODS, MOST_OF_NETWORKS = 34, 59, 4  # may become fewer only
FURTHER = {"methods": extend_methods, "networks": extend_networks}


def test_the_plugins_are_those_of_this_folder() -> None:
    there = {path.name for path in PLACE.glob("medsilo_*") if list(path.glob("*.py"))}
    assert there == PLUGINS.keys()
    settings = tomllib.loads((PLACE.parent / "pyproject.toml").read_text("utf-8"))
    scripts = {"benchmarks", "provisioning", "results"}
    assert set(settings["tool"]["mypy"]["packages"]) == {"medsilo", *scripts, *BENEATH, *PLUGINS}
    assert set(settings["tool"]["importlinter"]["root_packages"]) == {"medsilo", *BENEATH, *PLUGINS}


def test_extend_gives_few_names_and_loads_them_when_they_are_used() -> None:
    assert len(extend.NAMES) <= MOST_NAMES and len(extend_methods.NAMES) <= MOST_OF_METHODS
    assert len(extend_networks.NAMES) <= MOST_OF_NETWORKS
    assert len({*extend.NAMES, *extend_methods.NAMES, *extend_networks.NAMES}) == len(extend.NAMES) + sum(
        len(place.NAMES) for place in FURTHER.values()
    )
    for place in (extend, *FURTHER.values()):
        assert all(getattr(place, name) is not None for name in place.NAMES)
    code = "import sys, medsilo.extend; from medsilo.extend import Command, Console; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PLACE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        extend.Nothing  # noqa: B018


def test_a_task_is_three_things_and_overrides_none() -> None:
    """Source, goal and use: none of them grows into the others, and no subclass breaks what its base says."""

    def members(kind: type) -> set[str]:
        own = {*vars(kind), *inspect.get_annotations(kind)}
        return {name for name in own if not name.startswith(("_", "model_"))}

    assert [len(members(part)) for part in (Task, Objective, Inference)] == [32, 27, 3]
    assert not members(Task) & (members(Objective) | members(Inference))
    paths = [*plugin_sources(), *(path for path in sources() if part_of(path) == "tasks")]
    assert not [path for path in paths if "ignore[override]" in path.read_text("utf-8")]


def test_contributing_tells_the_rooms() -> None:
    assert DOCUMENT.read_text("utf-8") == document(), "run: python -m tests.rooms"


def test_no_text_stands_alone() -> None:
    """A second line of a message that is no part of it is a statement, which does nothing."""
    alone = []
    for path in everything():
        for node in ast.walk(tree_of(path)):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    own = inner[1:] if name == "body" else inner  # the first may be a docstring
                    alone += [f"{path.name}:{one.lineno}" for one in own if is_text(one)]
    assert alone == []


def is_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.JoinedStr) or isinstance(getattr(node.value, "value", None), str)


# ---------------------------------------------------------------------------------------------------- circles
def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_files(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module the modules whose files it names, inside functions and under `if TYPE_CHECKING`, too."""
    found = {}
    for module, path in paths.items():
        names = [name for name, _ in imports_of(path)]
        files = {next((m for m in (name, name.rpartition(".")[0]) if m in paths), module) for name in names}
        found[module] = files - {module}
    return found


def circle_in(uses: Mapping[str, set[str]]) -> set[str]:
    """The modules that are left when all are gone that use none of those left, or that none of those left use."""
    left = {module: set(used) for module, used in uses.items()}
    while True:
        used = {name for names in left.values() for name in names}
        kept = {module for module in left if module in used and left[module] & left.keys()}
        if kept == left.keys():
            return kept
        left = {module: left[module] & kept for module in kept}


def test_files_have_no_circle() -> None:
    """What only types need does not count: it runs nowhere."""
    known, runs = {module_of(path): path for path in everything()}, sizes.modules()
    uses = {module: files & sizes.imported_by(module, runs) for module, files in imported_files(known).items()}
    assert len(uses) > 100 and "medsilo.core.errors" in uses["medsilo.deploy.supermodel"]
    assert circle_in(uses) == set()


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------------------------------------- light
def modules_after(root: Path, *commands: list[str], code: int = 0) -> set[str]:
    """Return what one process has loaded after these commands, each of which ends with this code."""
    program = (
        "import json, runpy, sys\n"
        f"for arguments in {list(commands)!r}:\n"
        "    sys.argv, code = ['medsilo', *arguments], 0\n"
        "    try:\n        runpy.run_module('medsilo', run_name='__main__')\n"
        "    except SystemExit as end:\n        code = end.code or 0\n"
        f"    assert code == {code}, (arguments, code)\n"
        "print('MODULES', json.dumps(sorted(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root / "custom")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.rpartition("MODULES")[2]))


def test_help_answers_at_once(root: Path) -> None:
    """Without what takes seconds to import."""
    heavy = [
        "torch",
        "nvflare",
        "pydantic",
        "monai",
        "numpy",
        "yaml",
        "safetensors",
        "rich",
        "scipy",
        "PIL",
        "filelock",
        "starlette",
        "uvicorn",
    ]
    asked = [[*command.split(), "--help"] for command in ("", "run", "predict", "check", "approve")]
    loaded = modules_after(root, *asked, ["--version"])
    assert "medsilo.cli.running" in loaded
    assert loaded & {*heavy} == set()


def test_methods_are_listed_without_torch(root: Path) -> None:
    """Their titles are read from the source; the list, and a mistyped command, answer in half a second."""
    assert modules_after(root, ["list"]) & {"torch", "monai", "numpy", "scipy", "nvflare", "medsilo.plan"} == set()
    assert (
        modules_after(root, ["lsit"], ["run", "--hlep"], code=2) & {"torch", "monai", "numpy", "scipy", "nvflare"}
        == set()
    )


def test_a_lead_s_command_loads_nothing_that_trains(root: Path) -> None:
    """`medsilo status` and its like talk to a server: a fifth of the processor time without torch."""
    commands = (["status"], ["status", "job", "--watch"], ["cancel", "job"], ["download", "job"])
    loaded = modules_after(root, *([*command, "--kit", str(root)] for command in commands), code=1)
    assert "medsilo_lab.consortium.lead" in loaded
    assert loaded & {"torch", "monai", "numpy", "scipy", "medsilo.plan", "medsilo.flare.controller"} == set()


def test_a_lead_s_command_looks_for_no_garbage_among_nvflare_s_modules(root: Path) -> None:
    """That was a tenth of the processor's time of a poll. It looks again afterwards."""
    program = (
        "import gc\nfrom medsilo.cli import main\n"
        f"main(['status', '--kit', {str(root)!r}])\n"
        "print(gc.get_freeze_count(), int(gc.isenabled()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    frozen, looks = map(int, done.stdout.split())
    assert frozen > 40_000 and looks


def test_what_reads_a_hospital_s_files_loads_nothing_that_trains(root: Path, tmp_path: Path) -> None:
    """A command that waits for no server answers within half a second of the processor."""
    kit = ["--kit", str(tmp_path)]
    commands = (["approve", *kit], ["ledger", *kit], ["prune", str(tmp_path / "none")])
    loaded = modules_after(root, *commands, code=1)
    assert loaded & {"torch", "monai", "scipy", "nvflare", "medsilo.plan"} == set()


def test_a_plan_is_read_without_torch_s_compiler(root: Path) -> None:
    """It costs a second, and MONAI three."""
    loaded = modules_after(root, ["disclosure", str(root / "jobs/fedavg")])
    assert "medsilo.plan" in loaded and loaded & {"torch._dynamo", "sympy", "monai", "scipy.stats", "nvflare"} == set()


@pytest.mark.slow
def test_a_site_trains_without_torch_s_compiler(root: Path, tmp_path: Path) -> None:
    """It costs every process that trains a second and 70 MB."""
    sizes = (
        "task={name: synthetic-activity, persons: 6, windows: 6, steps: 32}",
        "training={rounds: 1, batch_size: 8}",
    )
    rest = ["--engine", "inprocess", "-o", str(tmp_path), *(part for size in sizes for part in ("--set", size))]
    loaded = modules_after(root, *(["run", method, *rest] for method in ("fedavg", "harmofl", "fedsm", "fedawa")))
    assert "torch.optim" in loaded and loaded & {"torch._dynamo", "sympy"} == set()
    assert not any(name.startswith("medsilo_secagg") for name in loaded)  # nothing is sealed


# ---------------------------------------------------------------------------------------------------- documented
def test_every_fault_of_the_page_has_tests_that_exist(root: Path) -> None:
    page = (root / "docs/trust/reliability.md").read_text("utf-8").partition("\n## Faults")[2].partition("\n## ")[0]
    faults = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    named = {one["fault"]: one["tests"] for one in load_yaml((root / "tests/faults.yaml").read_text("utf-8"))}
    assert [fault for fault in faults if fault != "fault" and not fault.startswith("**")] == [*named]
    assert len(named) > 20 and all(named.values())
    tests = [path.read_text("utf-8") for path in (root / "tests").rglob("test_*.py")]
    there = {name for text in tests for name in re.findall(r"def (test_\w+)", text)}
    assert {name for names in named.values() for name in names} - there == set()


# ---------------------------------------------------------------------------------------------------- small rules
def test_nothing_is_committed_that_git_ignores(root: Path) -> None:
    """Such as what `medsilo check` writes for one hospital alone."""
    assert "medsilo-check-private.txt" in (root / ".gitignore").read_text().splitlines()
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout


def test_every_error_of_ours_is_a_medsilo_error() -> None:
    """Anything that the package raises on purpose can be shown as one line."""
    allowed = {"ValueError", "TypeError", "typer.BadParameter", "PydanticCustomError", "KeyError", "AttributeError"}
    allowed |= {"ImportError", "Rejected"}  # where a package is absent; nvflare_reliability makes one line of it, too
    for path in [*sources(), *plugin_sources()]:
        classes = (node for node in tree_of(path).body if isinstance(node, ast.ClassDef))
        allowed |= {own.name for own in classes if "MedsiloError" in map(dotted, own.bases)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = dotted(node.exc.func)
                ours = getattr(importlib.import_module("medsilo.core.errors"), name.split(".")[-1], None)
                known = ours is not None and issubclass(ours, MedsiloError)
                assert known or name in allowed or name.startswith("yaml."), f"{path}:{node.lineno}: raises {name}"


def test_names_of_methods_and_tasks_may_become_folders() -> None:
    from medsilo.registry import METHODS, TASKS

    assert all(is_safe_name(name) for name in [*METHODS, *TASKS])
