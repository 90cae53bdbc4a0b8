"""Continue a finished run after its last round, as a new run."""

from collections.abc import Iterator
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors, write_bytes, write_text
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo_server.record import Record

KEPT = (paths.STATE_FILES, paths.METRICS, paths.BEST)  # files of each site that a continued run needs


class Longer:
    def __init__(self, run: Path, more: int) -> None:
        self.run, self.record, name = run, Record(run), run.resolve().name
        if not (run / paths.PLAN).is_file() or not (summary := self.record.finished()):
            raise MedsiloError(
                f"--more: {run} is not a finished run; give a finished run, or continue this run: medsilo resume {run}"
            )
        self.before = load_plan(run / paths.PLAN)
        if not any(self.record.checkpoints.glob(paths.ROUND_FILES)):
            raise MedsiloError(f"--more: {name} has no checkpoint; start a new run with training.rounds set")
        longer = self.before.training.rounds + more
        self.plan = self.before.with_changes([f"training.rounds={longer}"])
        self.done = summary.rounds.done
        if why := next(self._obstacles(), None):
            raise MedsiloError(
                f"--more: {name} can't go on: {why}; start a new run with --set training.rounds={longer}"
            )

    def _obstacles(self) -> Iterator[str]:
        """Yield the reasons why the finished rounds cannot be the first rounds of a longer study."""
        if self.before.privacy:
            yield "its noise was chosen for so many rounds"
        if self.before.sealed:
            yield "hospitals' sealed sums are of its own study"
        first, now = self.before.course, self.plan.course
        for number in range(1, self.done + 1):
            if first.place_of(number) != now.place_of(number):
                was, would = first.phase_of(number).name, now.phase_of(number).name
                yield f"round {number} of {self.before.algorithm.title} is of phase '{was}', and of '{would}' if longer"

    @property
    def difference(self) -> str:
        """The reason why a continued run gives a different result from an uninterrupted run of the same length. If both
        runs give the same result, the text is empty.
        """
        rounds = self.before.rounds
        if self.before.training.paced:
            return f"learning rates of its first {rounds} rounds fell by training.schedule as in a study of {rounds}"
        if self.before.algorithm.paced:
            return f"{self.before.algorithm.title}'s steps in its first {rounds} rounds fell as in a study of {rounds}"
        if self.before.validates(rounds) != self.plan.validates(rounds):
            return f"the model of round {rounds} was validated, and may be the best one"
        return ""

    def begin(self, folder: Path) -> None:
        """Copy the state of the finished run into the folder of the new run, which continues from this state."""
        record = Record(folder)
        record.begin(self.plan)
        for path in self.record.checkpoints.glob("*.safetensors"):
            tensors, facts = load_tensors(path)
            if self.difference and path.match(paths.ROUND_FILES):
                told = f"trained further than {self.run.resolve().name}: {self.difference}"
                facts["details"]["warnings"] = [*facts["details"].get("warnings", []), told]
            save_tensors(record.checkpoints / path.name, tensors, facts | {"plan": self.plan.hash})
        write_bytes(folder / paths.ROUNDS, (self.run / paths.ROUNDS).read_bytes())
        for own in (self.run / paths.SITES).iterdir():
            site = paths.site_folder(folder, own.name)
            for path in (path for name in KEPT for path in own.glob(name)):
                write_bytes(site / path.name, path.read_bytes())
            if (site / paths.BEST).exists():
                tensors, facts = load_tensors(site / paths.BEST)
                save_tensors(site / paths.BEST, tensors, facts | {"plan_hash": self.plan.hash})
                write_text(site / paths.PLAN, self.plan.to_yaml())
