"""The numbers in TensorBoard: those of the rounds, of the server and each site, and nothing else."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medsilo.federation import inprocess
from medsilo.federation.tracking import Point, Tracker
from medsilo.runs.reading import read_summary
from medsilo.runs.record import Record
from medsilo.runs.schema import Round
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32"]
Curves = dict[str, dict[str, list[tuple[int, float]]]]  # by site (or server), by name: (step, value)


def curves_of(run: Path) -> Curves:
    """All that TensorBoard would draw of a run, but times."""
    found: Curves = {}
    for folder in sorted((run / "tensorboard").iterdir()):
        events = EventAccumulator(str(folder))
        events.Reload()
        assert all(not names for kind, names in events.Tags().items() if kind != "scalars" and names is not False)
        found[folder.name] = {
            name: [(point.step, point.value) for point in events.Scalars(name)]
            for name in events.Tags()["scalars"]
            if name != "seconds"
        }
    return found


def test_event_files_hold_the_rounds(tmp_path: Path) -> None:
    inprocess.run(make_plan("fedavg", *SMALL), folder=tmp_path / "run")
    found = curves_of(tmp_path / "run")
    rounds = Record(tmp_path / "run").rounds()
    summary = read_summary(tmp_path / "run")
    assert sorted(found) == [*SITES, "server"]
    for site in SITES:
        assert set(found[site]) == {"train_loss", "validation", "validation_loss", "test", "test_loss"}
        losses = [(line.round, pytest.approx(line.sites[site].train_loss)) for line in rounds]
        assert found[site]["train_loss"] == losses
        scores = list(enumerate(map(pytest.approx, summary.sites[site].validation)))
        assert found[site]["validation"] == scores
        score = summary.sites[site].test["accuracy"]
        assert [value for _, value in found[site]["test"]] == [pytest.approx(score)]
    assert [step for step, _ in found["server"]["bytes_up"]] == [1, 2]
    assert found["server"]["sites"] == [(1, 3.0), (2, 3.0)]


def test_what_a_site_withholds_is_not_tracked(tmp_path: Path) -> None:
    settings = SiteSettings(device="cpu", smallest_metric=10_000)
    inprocess.run(make_plan("local", *SMALL), folder=tmp_path / "run", settings=settings)
    found = curves_of(tmp_path / "run")
    assert all(set(found[site]) == {"train_loss"} for site in SITES)


def test_a_tracker_that_fails_ends_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Tracker, who: str, own: list[Point]) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Tracker, "_write", full)
    assert inprocess.run(make_plan("local", *SMALL), folder=tmp_path / "run").summary.finished
    assert caplog.text.count("can't be written (OSError) and stop here") == 1


def test_a_run_that_goes_on_is_tracked_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    plan = make_plan("fedbn", *SMALL, "training.rounds=3")
    inprocess.run(plan, folder=tmp_path / "whole")

    def stop(line: Round) -> None:
        if line.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inprocess.run(plan, folder=tmp_path / "stopped", on_round=stop)
    assert [step for step, _ in curves_of(tmp_path / "stopped")["server"]["sites"]] == [1, 2]
    inprocess.run(plan, folder=tmp_path / "stopped", resume=True)
    assert curves_of(tmp_path / "stopped") == curves_of(tmp_path / "whole")
