"""The ratchet of sizes and the table of seats: what there is to read and to trust grows with a reason only."""

import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.core.lazy import places_in
from tests import seats
from tests.conftest import make_plan, slow_but
from tests.seats import SEATS, modules, stale
from tests.sizes import ROUND_FILES, from_a_run, from_the_source, reached, table
from tests.unit.test_approvals import make_kit

pytestmark = pytest.mark.xdist_group("house rules")  # which read the same files


# ---------------------------------------------------------------------------------------------------- sizes
def test_no_size_has_risen() -> None:
    assert [*table().risen(from_the_source())] == []


@pytest.mark.long
def test_no_round_runs_more_of_us() -> None:
    sizes = from_a_run()
    assert sizes[ROUND_FILES] > 20
    assert [*table().risen(sizes)] == []


def test_each_reason_is_of_a_measure() -> None:
    assert {own.measure for own in SEATS.grown} <= table().most.keys()


STUDY = """
import sys
from pathlib import Path
from medsilo.federation.inprocess import run
from medsilo.plan import load_plan
run(load_plan("plan.yaml"), folder=Path("runs/study"))
print(*sys.modules, sep="\\n")
"""
JOIN = """
import sys
from pathlib import Path
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.plan import load_plan
from medsilo.runs.messages import StudyMessage
workspace, context = Workspace("kit", site_name="a"), FLContext()
place = Path(workspace.get_app_config_dir("job"), "plan.yaml")
place.parent.mkdir(parents=True)
Path("plan.yaml").rename(place)
given = {FLContextKey.WORKSPACE_OBJECT: workspace, ReservedKey.RUN_NUM: "job", ReservedKey.IDENTITY_NAME: "a"}
for name, value in given.items():
    context.set_prop(name, value)
plan = load_plan(place)
told = {"task": "join", "round": 0, "study": "s", "plan": plan.hash, "sites": ["a", "b"], "packages": plan.code}
executor = MedsiloExecutor()
reply = to_parcel(executor.execute("medsilo", to_shareable(StudyMessage(facts=told)), context, Signal()))
executor.give_back()
assert reply.facts["cases"], reply.facts
print(*sys.modules, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "needs"),
    [
        (STUDY, {"medsilo.mixing.mixers", "medsilo.federation.participant"}),
        (JOIN, {"medsilo.site.accepted_settings", "medsilo.federation.permission"}),
    ],
    ids=["in one process", "at a hospital with a kit"],
)
def test_a_plain_study_loads_nothing_that_is_optional(
    root: Path, tmp_path: Path, program: str, needs: set[str]
) -> None:
    """What core/optional.py names counts for neither side's reach, so it must not run in a study that needs none."""
    known = modules()
    sides = reached("medsilo.flare.executor", known) | reached("medsilo.flare.controller", known)
    named = places_in(str(root / "custom/medsilo/core/optional.py")).items()
    optional = {place if f"{place}.{name}" not in known else f"{place}.{name}" for name, place in named}
    make_kit(tmp_path / "kit", "a")
    (tmp_path / "kit/local/medsilo.yaml").write_text("device: cpu\napproval: none\n")
    (tmp_path / "plan.yaml").write_text(make_plan("fedavg", "participation.sites=[a, b]").to_yaml())
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert len(optional) > 15 and needs <= loaded
    assert optional & loaded <= sides


SERVER = """
import sys
import medsilo.flare.controller
from medsilo.federation.bounds import answer_bounds
from medsilo.plan import parse_plan
plan = parse_plan({"algorithm": {"name": "fedavg"}, "participation": {"sites": ["a", "b"]}, **eval(sys.argv[1])})
assert answer_bounds(plan) and plan.code and plan.parameters and plan.to_yaml() and plan.task.goal.layout
print(*sys.modules, sep="\\n")
"""
TASKS = ["synthetic-activity", "synthetic-prostate", "image-folder", "nifti-folder", "table"]
READING = {"cache", "case_index", "headers", "scans", "site_data", "sources", "splits", "survey", "table_reader"}
READING |= {"own.augmentation", "own.image_patches", "own.image_reading", "own.reading", "own.table_rows"}


@pytest.mark.parametrize("task", slow_but((), TASKS, ["table"]))
def test_a_server_reads_what_a_plan_says_and_loads_nothing_that_reads_cases(task: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, repr({"task": {"name": task}})], capture_output=True, text=True
    )
    loaded = {name.removeprefix("medsilo.tasks.") for name in done.stdout.split()}
    assert done.returncode == 0 and "task" in loaded, done.stderr
    assert not loaded & READING and not loaded & {"medsilo.federation.participant", "medsilo.learning.loop"}


# ---------------------------------------------------------------------------------------------------- seats
def test_everything_has_one_seat() -> None:
    assert seats.problems() == []


def test_contributing_tells_the_seats() -> None:
    assert not stale(seats.DOCUMENT.read_text("utf-8"), seats.document()), "run: python -m tests.seats"
