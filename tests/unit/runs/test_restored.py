"""A server is restored from a backup, while its hospitals have already trained in later rounds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medsilo.core.files import load_tensors
from medsilo.federation.site_state import is_kept, kept_states
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.rounds import Round
from medsilo_lab.engines import inprocess
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.sites import CPU

ROUNDS, KILLED = 15, 14
SMALL = ["task.persons=6", "task.windows=6", "task.steps=32", f"training.rounds={ROUNDS}"]


class Killed(BaseException):
    """End a run without a summary, as the end of the process would."""


def plan_of(method: str) -> Plan:
    return make_plan(method, *SMALL)


@contextmanager
def killed(after: int, run: Path, backup: Path | None = None) -> Iterator:
    def follow(line: Round) -> None:
        if line.round == after:
            if backup:
                shutil.copytree(run, backup, ignore=shutil.ignore_patterns(paths.SITES))
            raise Killed

    with pytest.raises(Killed):
        yield follow
    (run / paths.SUMMARY).unlink(missing_ok=True)


def restored(method: str, backed_up: int, run: Path, backup: Path) -> None:
    plan = plan_of(method)
    with killed(backed_up + 1, run, backup) as follow:
        inprocess.run(plan, folder=run, settings=CPU, on_round=follow)
    with killed(KILLED, run) as follow:
        inprocess.run(plan, folder=run, settings=CPU, on_round=follow, resume=True)
    for place in run.iterdir():
        if place.name != paths.SITES:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    shutil.copytree(backup, run, dirs_exist_ok=True)
    (run / paths.SUMMARY).unlink(missing_ok=True)
    inprocess.run(plan, folder=run, settings=CPU, resume=True)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fedsm", "adafed")]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", *SLOW])
def test_the_numbers_are_the_undisturbed_ones_where_the_state_is_there(method: str, tmp_path: Path) -> None:
    """The restored study gives the same models as an uninterrupted study, because hospitals return to their state of
    round 10.
    """
    inprocess.run(plan_of(method), folder=tmp_path / "whole", settings=CPU)
    restored(method, 10, tmp_path / "run", tmp_path / "backup")
    assert_same_outcome(tmp_path / "whole", tmp_path / "run")
    for site in SITES:
        (words,) = read_summary(tmp_path / "run").sites[site].warnings["11"]
        assert "went back to round 10" in words and "had done 14" in words and "after round 10" in words


@pytest.mark.slow
@pytest.mark.parametrize(("backed_up", "nearest"), [(11, 10), (3, 10)])
def test_a_hospital_goes_on_from_its_nearest_state_and_says_which(backed_up: int, nearest: int, tmp_path: Path) -> None:
    restored("fedbn", backed_up, tmp_path / "run", tmp_path / "backup")
    summary = read_summary(tmp_path / "run")
    assert summary.finished and summary.rounds.done == ROUNDS
    for site in SITES:
        (words,) = summary.sites[site].warnings[str(backed_up + 1)]
        assert f"went back to round {backed_up}" in words and f"after round {nearest}" in words


def test_states_that_stay_are_the_last_ones_and_every_tenth(tmp_path: Path) -> None:
    inprocess.run(plan_of("fedbn"), folder=tmp_path / "run", settings=CPU)
    for site in SITES:
        folder = paths.site_folder(tmp_path / "run", site)
        assert {path.name for path in folder.glob(paths.STATE_FILES)} == {
            f"state-{number}.safetensors" for number in (10, 13, 14, 15)
        }
        assert any("momentum_buffer" in name for name in load_tensors(folder / "state-10.safetensors")[0])


def test_states_do_not_fill_the_disk() -> None:
    assert [number for number in range(1, 1001) if is_kept(number, 1000)] == [
        *(100, 200, 300, 400, 500, 600, 700, 800, 900),
        *(910, 920, 930, 940, 950, 960, 970, 980, 990),
        *(998, 999, 1000),
    ]
    assert kept_states(3) == 3 and kept_states(10_000) < 40
