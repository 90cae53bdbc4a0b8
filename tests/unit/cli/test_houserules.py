"""Test rules for medsilo's source code: allowed imports and forbidden calls."""

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

import networkx as nx
import pytest
from importlinter.cli import lint_imports

import medsilo
from medsilo import extend
from medsilo.core import errors
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
from tests.rooms import BENEATH, DOCUMENT, PLUGINS, ROOMS, document, layers
from tests.sources import tree_of

# all tests of this group run in one process, so that each file is read once
pytestmark = pytest.mark.xdist_group("house rules")

PACKAGE = Path(medsilo.__file__).parent

CLASS_IN_TEXT = re.compile(r"(medsilo(?:\.\w+)+):(\w+)")
# modules that load other modules by names that are not constants in the source code
LOADERS = {
    "registry": "a class in the registry's table, or an entry point of an installed package",
    "federation.process.worker": "the participant's class, which the parent process chooses",
    "extend": "a public name, when it is first used",
    "nvflare_reliability.compatibility": "an NVFlare module that a patch changes",
    "medsilo_lab.extend": "a public name, when it is first used",
    "medsilo_lab.jobs": "a class that a job names",
    "medsilo_lab.recipes": "the class of a model, on the lead's machine",
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
    return tuple(imports_in(tree_of(path), path))


def imports_in(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: use an absolute import"
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
    loading = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and loads_a_module(node)]
    return any(not isinstance(node.args[0], ast.Constant) for node in loading)


def test_who_may_import_whom(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All imports follow the import contracts in pyproject.toml, including imports inside functions; each medsilo
    package belongs to a contract.
    """
    monkeypatch.syspath_prepend(root)
    assert lint_imports(str(root / "pyproject.toml"), no_cache=True) == 0
    assert {name for layer in layers() for name in layer} == ROOMS.keys() - {"extend"}


def test_modules_are_loaded_by_name_in_few_places_only() -> None:
    found = {module_of(path).removeprefix("medsilo.") for path in everything() if loads_by_name(tree_of(path))}
    assert found == {*LOADERS}


def test_the_course_knows_no_method() -> None:
    """The packages schedule, learning and mixing contain no name of a method, because each method declares its
    needs.
    """
    for path in sources():
        if part_of(path) in ("schedule", "learning", "mixing"):
            texts = {node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)}
            assert texts & {*METHODS} == set(), path


# ------------------------------------------------------------------------------------------------------------- plug-ins

# developers may lower the limits MOST_NAMES, MOST_OF_METHODS and MOST_OF_NETWORKS, but may not raise the limits
MOST_NAMES, MOST_OF_METHODS, MOST_OF_NETWORKS = 34, 59, 4
FURTHER = {"methods": extend_methods, "networks": extend_networks}


def test_the_plugins_are_those_of_this_folder() -> None:
    there = {path.name for path in PLACE.glob("medsilo_*") if list(path.glob("*.py"))}
    assert there == PLUGINS.keys()
    settings = tomllib.loads((PLACE.parent / "pyproject.toml").read_text("utf-8"))
    scripts = {"benchmarks", "provisioning", "results"}
    assert set(settings["tool"]["mypy"]["packages"]) == {"medsilo", *scripts, *BENEATH, *PLUGINS}
    assert set(settings["tool"]["importlinter"]["root_packages"]) == {"medsilo", *BENEATH, *PLUGINS}


def test_extend_gives_few_names_and_loads_them_when_they_are_used() -> None:
    assert len(extend.PLACES) < MOST_NAMES and len(extend_methods.__all__) <= MOST_OF_METHODS
    assert len(extend_networks.__all__) <= MOST_OF_NETWORKS
    places = (extend, *FURTHER.values())
    assert len({name for place in places for name in place.__all__}) == sum(len(place.__all__) for place in places)
    for place in places:
        assert all(getattr(place, name) is not None for name in place.__all__)
    code = "import sys, medsilo.extend; from medsilo.extend import Command, Console; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PLACE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        extend.Nothing  # noqa: B018


def test_a_task_is_three_things_and_overrides_none() -> None:
    """A task consists of a source, an objective and an inference object, which have no attribute names in common.

    No subclass overrides a method by a method with an incompatible signature.
    """

    def members(kind: type) -> set[str]:
        own = {*vars(kind), *inspect.get_annotations(kind)}
        return {name for name in own if not name.startswith(("_", "model_"))}

    assert not members(Task) & (members(Objective) | members(Inference))
    paths = [*plugin_sources(), *(path for path in sources() if part_of(path) == "tasks")]
    assert not [path for path in paths if "ignore[override]" in path.read_text("utf-8")]


def test_contributing_tells_the_rooms() -> None:
    assert DOCUMENT.read_text("utf-8") == document(), "run: python -m tests.rooms"


def test_no_text_stands_alone() -> None:
    """A string that is a statement has no effect, such as half of a message after the closing parenthesis."""
    alone = []
    for path in everything():
        for node in ast.walk(tree_of(path)):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    own = inner[1:] if name == "body" else inner
                    alone += [f"{path.name}:{one.lineno}" for one in own if is_text(one)]
    assert alone == []


def is_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.JoinedStr) or isinstance(getattr(node.value, "value", None), str)


# ----------------------------------------------------------------------------------------------------- circular imports
def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_files(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    found = {}
    for module, path in paths.items():
        names = [name for name, _ in imports_of(path)]
        files = {next((m for m in (name, name.rpartition(".")[0]) if m in paths), module) for name in names}
        found[module] = files - {module}
    return found


MOST_IN_CIRCLE = 3  # the largest number of files in an import cycle


def test_files_have_small_circles_within_a_folder_and_folders_none() -> None:
    known = {module_of(path): path for path in [PACKAGE / "__init__.py", *everything()]}
    uses = imported_files(known)
    assert len(uses) > 100 and "medsilo.core.errors" in uses["medsilo.deploy.supermodel"]
    graph = nx.DiGraph((one, other) for one, others in uses.items() for other in others)
    for circle in nx.strongly_connected_components(graph):
        assert len(circle) <= MOST_IN_CIRCLE, sorted(circle)
        assert len({name.rpartition(".")[0] for name in circle}) == 1, sorted(circle)


def test_folders_of_other_packages_have_no_circles() -> None:
    """The test searches for import cycles between folders, and between modules that are directly in a package, such as
    medsilo_lab.api.
    """
    known = {module_of(path): path for path in everything()}
    folders = {name.rpartition(".")[0] for name in known}

    def place(module: str) -> str:
        folder = module if module in folders else module.rpartition(".")[0]
        return folder if folder.count(".") else module

    uses = [(place(one), place(other)) for one, others in imported_files(known).items() for other in others]
    graph = nx.DiGraph((one, other) for one, other in uses if one != other and not one.startswith("medsilo."))
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert [circle for circle in circles if folders & {*circle}] == []


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------------------------------------------- few imports
def modules_after(root: Path, *commands: list[str], code: int = 0) -> set[str]:
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
    assert "medsilo_lab.cli.running" in loaded
    assert loaded & {*heavy} == set()


def test_methods_are_listed_without_torch(root: Path) -> None:
    """Without importing torch, `medsilo list` and the error for a mistyped command take half a second."""
    assert modules_after(root, ["list"]) & {"torch", "monai", "numpy", "scipy", "nvflare", "medsilo.plan"} == set()
    assert (
        modules_after(root, ["lsit"], ["run", "--hlep"], code=2) & {"torch", "monai", "numpy", "scipy", "nvflare"}
        == set()
    )


def test_a_lead_s_command_loads_nothing_that_trains(root: Path) -> None:
    """Commands that only send requests to a server do not import torch, because the import would take four fifths of
    their processor time.
    """
    commands = (["status"], ["status", "job", "--watch"], ["cancel", "job"], ["download", "job"])
    loaded = modules_after(root, *([*command, "--kit", str(root)] for command in commands), code=1)
    assert "medsilo_lab.consortium.lead" in loaded
    assert loaded & {"torch", "monai", "numpy", "scipy", "medsilo.plan", "medsilo_server.flare.controller"} == set()


def test_a_lead_s_command_looks_for_no_garbage_among_nvflare_s_modules(root: Path) -> None:
    """A lead's command excludes NVFlare's modules from garbage collection, which saves a tenth of the command's
    processor time.
    """
    program = (
        "import gc\nfrom medsilo.cli import main\n"
        f"main(['status', '--kit', {str(root)!r}])\n"
        "print(gc.get_freeze_count(), int(gc.isenabled()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    frozen, looks = map(int, done.stdout.split())
    assert frozen > 40_000 and looks


def test_what_reads_a_hospital_s_files_loads_nothing_that_trains(root: Path, tmp_path: Path) -> None:
    """Commands that only read a hospital's files import no package for training, and take half a second of processor
    time.
    """
    kit = ["--kit", str(tmp_path)]
    commands = (["approve", *kit], ["ledger", *kit], ["prune", str(tmp_path / "none")])
    loaded = modules_after(root, *commands, code=1)
    assert loaded & {"torch", "monai", "scipy", "nvflare", "medsilo.plan"} == set()


def test_a_plan_is_read_without_torch_s_compiler(root: Path) -> None:
    """Reading a plan imports neither torch's compiler, which takes a second, nor MONAI, which takes three seconds."""
    loaded = modules_after(root, ["disclosure", str(root / "jobs/fedavg")])
    assert "medsilo.plan" in loaded and loaded & {"torch._dynamo", "sympy", "monai", "scipy.stats", "nvflare"} == set()


@pytest.mark.slow
def test_a_site_trains_without_torch_s_compiler(root: Path, tmp_path: Path) -> None:
    """A training process does not import torch's compiler, which would take a second and 70 MB of memory."""
    sizes = (
        "task={name: synthetic-activity, persons: 6, windows: 6, steps: 32}",
        "training={rounds: 1, batch_size: 8}",
    )
    rest = ["--engine", "inprocess", "-o", str(tmp_path), *(part for size in sizes for part in ("--set", size))]
    loaded = modules_after(root, *(["run", method, *rest] for method in ("fedavg", "harmofl", "fedsm", "fedawa")))
    assert "torch.optim" in loaded and loaded & {"torch._dynamo", "sympy"} == set()
    assert not any(name.startswith("medsilo_secagg") for name in loaded)


# ----------------------------------------------------------------------------------------------------------- documented
def test_every_fault_of_the_page_has_tests_that_exist(root: Path) -> None:
    page = (root / "docs/trust/reliability.md").read_text("utf-8").partition("\n## Faults")[2].partition("\n## ")[0]
    faults = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    named = {one["fault"]: one["tests"] for one in load_yaml((root / "tests/faults.yaml").read_text("utf-8"))}
    assert [fault for fault in faults if fault != "fault" and not fault.startswith("**")] == [*named]
    assert len(named) > 20 and all(named.values())
    tests = [path.read_text("utf-8") for path in (root / "tests").rglob("test_*.py")]
    there = {name for text in tests for name in re.findall(r"def (test_\w+)", text)}
    assert {name for names in named.values() for name in names} - there == set()


# ---------------------------------------------------------------------------------------------------------- small rules
def test_nothing_is_committed_that_git_ignores(root: Path) -> None:
    assert "medsilo-check-private.txt" in (root / ".gitignore").read_text().splitlines()
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout


def test_every_error_of_ours_is_a_medsilo_error() -> None:
    """The package raises only subclasses of MedsiloError, which the command line prints as one line."""
    allowed = {"ValueError", "TypeError", "typer.BadParameter", "PydanticCustomError", "KeyError", "AttributeError"}
    allowed |= {"SkipTest", "AssertionError"}
    # Exceptions: ImportError reports a missing package, and nvflare_reliability prints Rejected as one line.
    allowed |= {"ImportError", "Rejected"}
    allowed |= {"UnsafeComponentError"}  # NVFlare's start ends only if a component raises UnsafeComponentError
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    own_errors = {name for name, kind in kinds.items() if issubclass(kind, MedsiloError)}
    paths = [*sources(), *plugin_sources()]
    for path in paths:
        classes = (node for node in tree_of(path).body if isinstance(node, ast.ClassDef))
        own_errors |= {own.name for own in classes if own_errors & {*map(dotted, own.bases)}}
    allowed |= own_errors
    for path in paths:
        made = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef) and node.returns)
        allowed |= {f"self.{own.name}" for own in made if dotted(own.returns) in own_errors}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = dotted(node.exc.func)
                ours = getattr(importlib.import_module("medsilo.core.errors"), name.split(".")[-1], None)
                known = ours is not None and issubclass(ours, MedsiloError)
                assert known or name in allowed or name.startswith("yaml."), f"{path}:{node.lineno}: raises {name}"


def test_names_of_methods_and_tasks_may_become_folders() -> None:
    from medsilo.registry import METHODS, TASKS

    assert all(is_safe_name(name) for name in [*METHODS, *TASKS])
