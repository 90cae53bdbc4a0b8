"""One hash for each package: what a plan uses voids an approval and a join when it changes, and nothing else does."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from medsilo.core import package
from medsilo.core.errors import Refused
from medsilo.core.package import ALWAYS, ENGINE, PLACE, in_words, is_ours, name_that_differs
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from tests.conftest import SITES, make_plan
from tests.unit.test_approvals import Home

SMALL = ("task.patients=4", "task.slices=3", "training.batch_size=2")
USED = {*ALWAYS, "medsilo_papers"}  # by a plan with a network of medsilo_papers


def plan_with_a_plug_in() -> Plan:
    return make_plan("fedavg", "task.name=synthetic-prostate", *SMALL, "network.name=basic-unet")


# ---------------------------------------------------------------------------------------------------- another process
def joining(home: Home, code: dict[str, dict[str, str]]) -> str:
    """Return what the hospital's executor refuses of a study whose server runs this code; nothing where it joins."""
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
    """Yield, for packages beside this medsilo with one byte more, what the join and the approval say to it."""
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


# ---------------------------------------------------------------------------------------------------- what is held
@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """By the package that changed: the refusals of a join and of an approval."""
    folder = tmp_path_factory.mktemp("changed")
    tree = shutil.copytree(PLACE, folder / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    for name in USED:
        (tree / name).mkdir(exist_ok=True)
        (tree / name / "__init__.py").touch()
    ask = "import json, sys; from tests.unit.test_packages import Path, walk; walked = [*walk(Path(sys.argv[1]))]"
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
    """Those of the entry points that bring its names, and those that the classes of its parts come from."""
    plain, own = make_plan("fedavg"), plan_with_a_plug_in()
    assert {"medsilo"} == plain.code.keys() - {"nvflare_reliability"}
    assert own.code.keys() - plain.code.keys() == {"medsilo_papers"}
    assert all(own.code[name] == facts for name, facts in plain.code.items())
    assert plain.hash == make_plan("fedavg").hash and "packages" in plain.resolved()


def test_the_first_difference_is_medsilos_own() -> None:
    one = {"a": {"version": "1", "hash": "x"}, ENGINE: {"version": "1", "hash": "y"}}
    assert name_that_differs(one, dict(one)) is None
    assert name_that_differs(one, {}) == ENGINE and name_that_differs(one, {ENGINE: one[ENGINE]}) == "a"
    assert name_that_differs(one, {**one, 7: None, "b": {}}) in ("7", "b")
    assert in_words(one["a"]) == "1 (x)" and in_words(None) == "no such package"
    assert is_ours("medsilo_dicom") and is_ours("nvflare_reliability") and not is_ours("medsilox")
