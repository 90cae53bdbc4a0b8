"""Training a finished run for more rounds gives the same tensors as one long run."""

from pathlib import Path

import pytest

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess, simulator
from medsilo_lab.engines.continuation import Longer
from tests.conftest import METHODS, SITES, make_plan, over_all
from tests.federation.test_simulator import assert_same_outcome
from tests.unit.federation.test_participant import SMALL

CPU = SiteSettings(device="cpu", public_data=True)
# methods whose phases depend on the total number of rounds
DIVIDED = {"f-adafed", "fedsm-extra", "fedsm-ensemble"}
ONE_OF_EACH = ["fedavg", "ditto", "adafed", "fedsm", "scaffold"]
IMAGES = ["task.name=synthetic-histology", "network.name=small-cnn", "task.patients=4"]


def small(method: str, *changes: str) -> Plan:
    own = IMAGES if method == "fedrdn" else SMALL
    return make_plan(method, *own, "training.rounds=2", *changes, sites=SITES[:2])


def further(run: Path, more: int = 2) -> tuple[Path, Longer]:
    longer, folder = Longer(run, more), run.with_name("further")
    longer.begin(folder)
    inprocess.run(longer.plan, folder=folder, resume=True, settings=CPU)
    return folder, longer


def equals_so_many_at_once(method: str, folder: Path, *changes: str) -> None:
    inprocess.run(small(method, *changes), folder=folder / "run", settings=CPU)
    found, longer = further(folder / "run")
    assert longer.difference == ""
    inprocess.run(longer.plan, folder=folder / "at-once", settings=CPU)
    assert_same_outcome(folder / "at-once", found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE_OF_EACH)
def test_a_longer_run_is_that_of_so_many_rounds_at_once(method: str, tmp_path: Path) -> None:
    equals_so_many_at_once(method, tmp_path)


@pytest.mark.long
@over_all("method", sorted({*METHODS} - {*ONE_OF_EACH, *DIVIDED, "feddg-ga"}))
def test_every_methods_longer_run_is(method: str, tmp_path: Path) -> None:
    equals_so_many_at_once(method, tmp_path / method)


def test_warm_up_and_adams_memory_go_on(tmp_path: Path) -> None:
    changes = ["training.optimizer=adamw", "training.momentum=0", "training.learning_rate=0.01", "training.warmup=1"]
    equals_so_many_at_once("fedbn", tmp_path, *changes)


@pytest.mark.parametrize(
    ("method", "changes", "told"),
    [
        ("fedavg", ["training.schedule=cosine"], "training.schedule"),
        ("feddg-ga", [], "FedDG-GA's steps"),
        ("fedavg", ["model_selection.validate_every=3"], "round 2 was validated"),
    ],
)
def test_a_longer_run_says_where_it_is_another(method: str, changes: list[str], told: str, tmp_path: Path) -> None:
    inprocess.run(small(method, *changes), folder=tmp_path / "run", settings=CPU)
    found, longer = further(tmp_path / "run")
    cautions = read_summary(found).details.warnings
    assert told in longer.difference and any(told in line for line in cautions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes", "why"),
    [
        ("f-adafed", [], "is of phase 'measure'"),
        ("fedsm-extra", [], "is of phase 'select'"),
        ("fedavg", ["secure_aggregation.mode=pairwise", "participation.sites=[a,b,c]"], "sealed sums"),
    ],
)
def test_what_cannot_go_on_is_refused(method: str, changes: list[str], why: str, tmp_path: Path) -> None:
    inprocess.run(small(method, *changes), folder=tmp_path / "run", settings=CPU)
    with pytest.raises(MedsiloError, match=f"run can't go on: .*{why}.* new run with --set training.rounds=4"):
        Longer(tmp_path / "run", 2)


def test_a_run_is_trained_further_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, out = tmp_path / "run", ["--out", str(tmp_path), "--device", "cpu"]
    inprocess.run(small("fedavg"), folder=run, settings=CPU)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(["run", str(run), "--more", "3", *out]) == 0
    assert "goes on after round 2" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    found = tmp_path / "run-to-5"
    assert load_plan(found / paths.PLAN).rounds == 5 and (found / paths.REPORT).exists()
    assert [line.round for line in simulator.Record(found).rounds()] == [1, 2, 3, 4, 5]
    for words, told in (
        ([str(run), "--more", "3"], "exists"),
        ([str(run), "--more", "3", "--set", "seed=3"], "leave out --plan and --set"),
        ([str(tmp_path), "--more", "3"], "is not a finished run"),
        (["fedavg", "--more", "3"], "is not a finished run"),
        ([str(run)], f"medsilo run {run} --more 20"),
    ):
        assert cli.main(["run", *words, *out]) == 1
        assert told in capsys.readouterr().err


@pytest.mark.long
def test_nvflares_run_is_trained_further_by_nvflare(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = small("fedbn")
    simulator.run(plan, tmp_path / "run", CPU)
    out = ["--out", str(tmp_path), "--name", "further", "--device", "cpu"]
    assert cli.main(["run", str(tmp_path / "run"), "--more", "2", *out]) == 0
    assert "starting NVFlare" in capsys.readouterr().out
    inprocess.run(plan.with_changes(["training.rounds=4"]), folder=tmp_path / "at-once", settings=CPU)
    assert_same_outcome(tmp_path / "at-once", tmp_path / "further")
