"""Each package has a hash, which an approval covers and which a site compares when joining a study.

A change to a package that the plan uses invalidates the approval and prevents joining; other packages have no effect.
"""

import importlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from medsilo.core import package
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.package import ALWAYS, ENGINE, PLACE, in_words, is_ours, name_that_differs
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from tests.conftest import SITES, make_plan
from tests.unit.site.test_approvals import Home

SMALL = ("task.patients=4", "task.slices=3", "training.batch_size=2")
USED = {*ALWAYS, "medsilo_pretrained"}  # the packages of a plan that uses a network of medsilo_pretrained


def plan_with_a_plug_in() -> Plan:
    return make_plan("fedavg", "task.name=synthetic-prostate", *SMALL, "network.name=basic-unet")


# ------------------------------------------------------------------------------------------------------ another process
def joining(home: Home, code: dict[str, dict[str, str]]) -> str:
    kit = Workspace(str(home.folder), site_name=SITES[0])
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, kit)
    context.set_prop(ReservedKey.RUN_NUM, "job")
    context.set_prop(ReservedKey.IDENTITY_NAME, SITES[0])
    told = {"task": "join", "round": 0, "study": "study", "plan": home.plan.hash, "sites": SITES, "packages": code}
    try:
        to_parcel(MedsiloExecutor().execute("medsilo", to_shareable(StudyMessage(facts=told)), context, Signal()))
    except Refused as error:
        return str(error)
    return ""


def walk(folder: Path) -> Iterator[tuple[str, str, str]]:
    home = Home(folder)
    home.plan = plan_with_a_plug_in()
    config = Path(Workspace(str(folder), site_name=SITES[0]).get_app_config_dir("job"))
    config.mkdir(parents=True)
    (config / "plan.yaml").write_text(home.plan.to_yaml())
    (folder / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\napproval: required\n")
    before = home.plan.code
    home.approve()
    others = sorted({path.parent.name for path in PLACE.glob("*/__init__.py")} - USED)
    for changed in ["", *sorted(USED), *others[:2]]:
        file = PLACE / (changed or ENGINE) / "__init__.py"
        content = file.read_bytes()
        file.write_bytes(content + (b"\n" if changed else b""))
        package.facts_of.cache_clear()
        yield changed, joining(home, before), joining(home, home.plan.code)
        file.write_bytes(content)


# ---------------------------------------------------------------------------------------------------- required packages
@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("changed")
    tree = shutil.copytree(PLACE, folder / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    for name in USED:
        (tree / name).mkdir(exist_ok=True)
        (tree / name / "__init__.py").touch()
    ask = "import json, sys; from tests.unit.flare.test_packages import Path, walk; walked = [*walk(Path(sys.argv[1]))]"
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    answer = subprocess.run(
        [sys.executable, "-c", f"{ask}; print(json.dumps(walked))", str(folder / "kit")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    assert answer.returncode == 0
    return {changed: (join, approval) for changed, join, approval in json.loads(answer.stdout.splitlines()[-1])}


@pytest.mark.slow
def test_a_byte_in_another_package_voids_nothing(told: dict[str, tuple[str, str]]) -> None:
    assert told.keys() > {"", *USED}
    assert {name: told[name] for name in told.keys() - USED} == dict.fromkeys(told.keys() - USED, ("", ""))


@pytest.mark.slow
def test_a_byte_in_a_package_that_the_plan_uses_voids_approval_and_join(told: dict[str, tuple[str, str]]) -> None:
    for name in USED:
        join, approval = told[name]
        assert f"runs {name} 0." in join and "install the same package at both" in join, join
        assert f" with {name} 0." in approval and "medsilo approve" in approval, approval
        assert "\n" not in join + approval


def test_a_plan_names_the_packages_of_its_parts() -> None:
    """A plan lists the packages that define its method, its task and its network."""
    plain, own = make_plan("fedavg"), plan_with_a_plug_in()
    assert {"medsilo"} == plain.code.keys() - {"nvflare_reliability"}
    assert own.code.keys() - plain.code.keys() == {"medsilo_pretrained"}
    assert all(own.code[name] == facts for name, facts in plain.code.items())
    assert plain.hash == make_plan("fedavg").hash and "packages" in plain.resolved()


def test_the_first_difference_is_medsilos_own() -> None:
    one = {"a": {"version": "1", "hash": "x"}, ENGINE: {"version": "1", "hash": "y"}}
    assert name_that_differs(one, dict(one)) is None
    assert name_that_differs(one, {}) == ENGINE and name_that_differs(one, {ENGINE: one[ENGINE]}) == "a"
    assert name_that_differs(one, {**one, 7: None, "b": {}}) in ("7", "b")
    assert in_words(one["a"]) == "1 (x)" and in_words(None) == "no such package"
    assert is_ours("medsilo_dicom") and is_ours("nvflare_reliability") and not is_ours("medsilox")


# ------------------------------------------------------------------------------------------------------- loaded modules
@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "medsilo_spare"
    folder.mkdir()
    for name, text in (("__init__.py", ""), ("rule.py", "LIMIT = 5\n"), ("page.js", "//"), ("page.css", "p {}")):
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    yield folder
    package.facts_of.cache_clear()
    for name in ("medsilo_spare", "medsilo_spare.rule"):
        sys.modules.pop(name, None)


def hash_now(name: str = "medsilo_spare") -> str:
    package.facts_of.cache_clear()
    importlib.invalidate_caches()
    return package.facts_of(name)["hash"]


def test_what_python_or_a_browser_loads_is_in_the_hash(spare: Path) -> None:
    """A package's hash includes machine code, bytecode without a source, and files of web pages."""
    before = hash_now()
    for name in (f"rule{EXTENSION_SUFFIXES[0]}", "more.so", "more.pyd", "more.pyc", "page.js", "page.css"):
        file = spare / name
        was = file.read_bytes() if file.exists() else None
        file.write_bytes(b"other")
        assert hash_now() != before, name
        file.unlink() if was is None else file.write_bytes(was)
        assert hash_now() == before


def test_bytecode_of_something_else_is_refused(spare: Path) -> None:
    """medsilo rejects bytecode that does not belong to its source, because Python would run the bytecode instead of the
    source.
    """
    source = spare / "rule.py"
    true, before = Path(cache_from_source(str(source))), hash_now()
    (spare.parent / "rule.py").write_text("LIMIT = 500\n")
    other = Path(py_compile.compile(str(spare.parent / "rule.py"), doraise=True)).read_bytes()[16:]
    for mode in PycInvalidationMode:
        py_compile.compile(str(source), invalidation_mode=mode, doraise=True)
        assert hash_now() == before
        good = true.read_bytes()
        bad = good[:16] + other
        true.write_bytes(bad)
        sys.modules.pop("medsilo_spare.rule", None)
        importlib.invalidate_caches()
        assert importlib.import_module("medsilo_spare.rule").LIMIT == 500
        with pytest.raises(MedsiloError, match=r"bytecode of medsilo_spare/rule.py"):
            hash_now()
        true.write_bytes(good[:20])
        with pytest.raises(MedsiloError, match="bytecode"):
            hash_now()
        true.write_bytes(b"\0\0\0\0" + bad[4:])
        assert hash_now() == before
        true.unlink()
    py_compile.compile(str(source), doraise=True)
    # Python compiles the source again, because the source is newer than the bytecode
    true.write_bytes(true.read_bytes()[:8] + b"\0" * 8 + other)
    assert hash_now() == before


def test_what_hides_a_source_of_another_package_is_in_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of a package outside of medsilo includes a compiled module or a folder that Python would import instead
    of a source file.
    """
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/rule.py").write_text("LIMIT = 5\n")
    (tmp_path / "acme_gait-1.0.dist-info").mkdir()
    (tmp_path / "acme_gait-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: acme-gait\nVersion: 1.0\n")
    (tmp_path / "acme_gait-1.0.dist-info/RECORD").write_text("acme/rule.py,,\nacme_gait-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = hash_now("acme-gait")
    for name in (f"rule{EXTENSION_SUFFIXES[0]}", "rule/__init__.py"):
        (tmp_path / "acme" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "acme" / name).write_text("LIMIT = 500\n")
        assert hash_now("acme-gait") != before, name
        (tmp_path / "acme" / name).unlink()
    assert hash_now("acme-gait") == before
    package.facts_of.cache_clear()
