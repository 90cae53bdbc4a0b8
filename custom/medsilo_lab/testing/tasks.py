"""Tests that the author of a task runs with pytest, in a class derived from TaskTester."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch.utils.data import Dataset

from medsilo.core.errors import MedsiloError
from medsilo.learning.sampling import Draw
from medsilo.plan import Plan, parse_plan
from medsilo.runs.reading import read_summary
from medsilo.site.settings import ALL_MINE, SiteSettings, make_settings, of_each
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import SiteData, patients_of
from medsilo_lab.engines import inprocess
from medsilo_lab.testing.methods import SITES, TRAINING, assert_read_again

DAMAGES = {"empty": b"", "cut": None, "of other bytes": b"\x00\xff\x13" * 400}
MOST_DAMAGED = 3


class TaskTester:
    """Tests for a task of medsilo. The author of the task derives a class, and pytest runs all tests in the derived
    class.

    The derived class may define these attributes:
        task: the task's section of a plan, with the name first
        changes: changes KEY=VALUE to the default values
    If the task reads files, the derived class also needs the method `write`.

    >>> class TestActivity(TaskTester):
    ...     task = {"name": "synthetic-activity", "persons": 8, "windows": 10, "steps": 32}
    >>> TestActivity().plan().task.name
    'synthetic-activity'
    """

    task: ClassVar[Mapping[str, Any]]
    changes: ClassVar[Sequence[str]] = ()

    def write(self, folder: Path, site: str) -> Any:
        """Write the data of a hospital into a folder; the hospital must have at least ten patients.

        Args:
            folder: the empty folder for the data
            site: the name of the hospital

        Returns:
            the value of `data` for the hospital's medsilo.yaml, or None if the task generates its cases
        """
        return None

    def plan(self, *changes: str) -> Plan:
        """Return a plan with which two small hospitals train the task."""
        values = {
            "algorithm": {"name": "fedavg"},
            "task": dict(self.task),
            "training": {**TRAINING, "rounds": 1, "batch_size": 4, "learning_rate": 0.001},
            "participation": {"sites": SITES[:2], "timeout": 120},
        }
        return parse_plan(values, [*self.changes, *changes])

    def settings(self, folder: Path) -> SiteSettings:
        """Write the data of both hospitals into subfolders of `folder`. Return settings that name the subfolders."""
        common, own = make_settings({**ALL_MINE, "device": "cpu"}, "the tests' settings"), {}
        for site in SITES[:2]:
            (folder / site).mkdir(parents=True)
            own[site] = common.changed({"data": self.write(folder / site, site)}, "the tests' settings")
        return of_each(common, own)

    def read(self, settings: SiteSettings, *changes: str, site: str = SITES[0]) -> SiteData:
        """Read the data of a hospital as a study reads them."""
        plan = self._plan_once(*changes)
        return plan.task.site_data(site, SITES[:2], plan.seed, settings.of(site).data)

    def _plan_once(self, *changes: str) -> Plan:
        """Return a cached plan, because checking a plan takes longer than reading a small data set."""
        known: dict[tuple[str, ...], Plan] = vars(self).setdefault("_plans", {})
        if changes not in known:
            known[changes] = self.plan(*changes)
        return known[changes]

    # ------------------------------------------------------------------ the tests
    def test_its_plan_is_the_same_when_it_was_written(self, tmp_path: Path) -> None:
        assert_read_again(self.plan(), tmp_path)

    def test_the_same_cases_are_read_twice(self, tmp_path: Path) -> None:
        """If a hospital's data are read twice, the cases are equal and in the same order.

        Reading data does not use the global random generators and does not change files.
        """
        settings = self.settings(tmp_path)
        files, random = _contents(tmp_path), torch.get_rng_state()
        first = _bits(self.read(settings))
        assert first == _bits(self.read(settings)), "a second reading gives other cases"
        assert torch.equal(random, torch.get_rng_state()), "reading changes torch's global random generator"
        assert files == _contents(tmp_path), "reading changes the hospital's files"

    def test_no_patient_is_in_two_parts(self, tmp_path: Path) -> None:
        settings = self.settings(tmp_path)
        for changes in ((), ("seed=1",)):
            if self._plan_once(*changes).task.mixes_patients:
                raise SkipTest("the task allows the cases of a patient in several parts")
            parts = [set(patients_of(getattr(self.read(settings, *changes), part))) for part in PARTS]
            assert sum(map(len, parts)) == len(set().union(*parts)), "a patient is in two parts"
            assert parts[0], "the training part is empty"

    def test_a_case_fits_the_objective_and_the_network(self, tmp_path: Path) -> None:
        plan, data = self.plan(), self.read(self.settings(tmp_path))
        inputs, targets = _first(data.train, plan.task.piece)
        assert inputs.isfinite().all(), "an input is not finite"
        assert float(inputs.abs().max()) <= plan.task.largest_input, "an input is above largest_input"
        assert plan.task.shape is None or tuple(inputs.shape[1:]) == plan.task.shape, (
            f"a case has the shape {list(inputs.shape[1:])}, but the task declares {plan.task.shape}"
        )
        model, goal = plan.build_networks()["model"].train(), plan.task.goal
        output = model(inputs)
        losses, scores = goal.case_losses(output, targets), goal.case_scores(output, targets)
        assert len(losses) == len(inputs) and losses.isfinite().all(), "a case's loss is not finite"
        assert len(scores) == len(inputs), "not every case has a score"

    def test_a_hospital_without_its_data_has_one_line(self, tmp_path: Path) -> None:
        """If a hospital's data are missing, the error message has one line and contains no path and no file name."""
        settings = self.settings(tmp_path)
        if settings.of(SITES[0]).data is None:
            raise SkipTest("the task makes its cases up")
        for file in (tmp_path / SITES[0]).rglob("*.*"):
            if file.is_file():
                file.unlink()
        said = self._fault(settings, ())
        assert said is not None, "reading a folder without files raises no error"

    def test_a_damaged_file_is_left_out_or_named_in_one_line(self, tmp_path: Path) -> None:
        """A damaged file is skipped, or causes a MedsiloError whose message has one line and contains no file name."""
        settings = self.settings(tmp_path)
        if settings.of(SITES[0]).data is None:
            raise SkipTest("the task makes its cases up")
        files = sorted(path for path in (tmp_path / SITES[0]).rglob("*") if path.is_file())
        for file in files[:: -(-len(files) // MOST_DAMAGED)]:
            whole = file.read_bytes()
            for damage, instead in DAMAGES.items():
                file.write_bytes(whole[: len(whole) // 2] if instead is None else instead)
                try:
                    self._fault(settings, [file])
                except Exception as error:
                    raise AssertionError(f"{file.name}, {damage}: {type(error).__name__}: {error}") from error
            file.write_bytes(whole)

    def test_hospitals_learn_it(self, tmp_path: Path) -> None:
        inprocess.run(self.plan(), folder=tmp_path / "run", settings=self.settings(tmp_path / "data"))
        summary = read_summary(tmp_path / "run")
        assert summary.status == "finished" and all(site.test for site in summary.sites.values())

    def _fault(self, settings: SiteSettings, files: Sequence[Path]) -> str | None:
        try:
            data = self.read(settings)
            for part in PARTS:
                cases = getattr(data, part)
                for place in range(len(cases)):
                    cases[place]
        except MedsiloError as error:
            said, source = str(error), settings.of(SITES[0]).data
            assert "\n" not in said, f"the error message has several lines: {said}"
            hidden = [*(path.name for path in files), *(str(path) for path in [source and source.folder] if path)]
            assert not [name for name in hidden if name in said], (
                f"the error message contains the name of a file or folder: {said}"
            )
            return said
        return None


def _first(data: Dataset, piece: Draw | None, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = [data[place] for place in range(min(count, len(data)))]  # type: ignore[arg-type]
    if piece:
        chosen = [piece(own, seed) for seed, own in enumerate(chosen)]
    inputs, targets = (torch.stack([torch.as_tensor(own[part]) for own in chosen]) for part in range(2))
    return inputs, targets


def _bits(data: SiteData) -> str:
    """Return a hash of all inputs, targets and patients in a hospital's data. The hash depends on the order of the
    cases.
    """
    found = hashlib.sha256()
    for part in PARTS:
        cases = getattr(data, part)
        found.update("\x1f".join(patients_of(cases)).encode() + b"\x1e")
        for place in range(len(cases)):
            for own in cases[place][:2]:
                tensor = torch.as_tensor(own).contiguous()
                found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
