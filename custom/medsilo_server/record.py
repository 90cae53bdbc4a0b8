"""Write a study's files to the run folder on the server. Other programs may rely on the run folder's layout."""

import json
import os
import secrets
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field

from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import (
    append_line,
    load_tensors,
    make_folder,
    save_tensors,
    sweep,
    sync_names,
    write_bytes,
    write_json,
    write_passing,
    write_text,
)
from medsilo.runs import paths
from medsilo.runs.provenance import write_provenance
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import RequestStatus, Round
from medsilo.runs.schema import Summary

if TYPE_CHECKING:  # these modules import PyTorch; without PyTorch, the server's parent process starts in half the time
    from torch import Tensor

    from medsilo.plan import Plan

LET_GO = 60.0  # seconds to wait for another job to release the study


def new_study(plan: "Plan") -> str:
    """Return a name for a new run: the method, the task, the time, and random letters.

    The random letters distinguish runs that start in the same second.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{plan.algorithm.name}-{plan.task.name}-{stamp}-{secrets.token_hex(2)}"


@contextmanager
def alone(path: Path, text: str, wait: float = 0.0) -> Iterator[None]:
    """Within the context, hold a file lock. If this process ends, the operating system releases the lock.

    Args:
        path: The lock file.
        text: The message of the MedsiloError that is raised if another process holds the lock.
        wait: The seconds to wait for the lock.
    """
    make_folder(path.parent)
    try:
        held: AbstractContextManager = FileLock(path).acquire(timeout=wait)
    except Timeout as error:
        raise MedsiloError(text, str(path)) from error
    except OSError:
        held = nullcontext()
    with held:
        yield


class Best(BaseModel):
    round: int = Field(ge=0)
    scores: dict[str, float]


class CheckpointFacts(BaseModel):
    """The values in a checkpoint that are not tensors. The values under `mixers` are validated by the aggregators."""

    plan: str
    sites: list[str]
    best: Best | None
    settled: dict[str, list[str]]
    details: dict[str, Any]
    mixers: dict[str, Any]
    round: int = Field(ge=0)


class Record:
    """Reads and writes the files of a run folder: plan, provenance, rounds, checkpoints and summary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model_folders.look_in(folder / model_folders.FOLDER)

    def begin(self, plan: "Plan") -> None:
        """Write the files that must exist before the first round.

        Raise MedsiloError if the folder contains a run that has begun to train.
        """
        if not self.make_way():
            raise MedsiloError(f"run folder {self.folder.name} exists; choose another name, or resume that run")
        if plan.network.files:
            from medsilo.core import weight_cache

            weight_cache.keep_beside(plan.network.files, self.folder / model_folders.FOLDER)
        write_text(self.folder / paths.PLAN, plan.to_yaml())
        write_provenance(self.folder, plan)

    def make_way(self) -> bool:
        """Return True if a study can begin in this folder.

        If the folder contains a study that never trained, this study's files are deleted. Logs and sites' files are
        kept.
        """
        if not (self.folder / paths.PLAN).exists():
            return True
        summary = self.summary()
        if summary is None or not summary.never_began or self.rounds():
            return False
        for name in (paths.CHECKPOINTS, paths.JOB, paths.NVFLARE):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (paths.PROVENANCE, paths.ROUNDS, paths.SUMMARY, paths.PLAN):
            (self.folder / name).unlink(missing_ok=True)
        return True

    # ------------------------------------------------------------------ NVFlare's jobs
    @contextmanager
    def led_by(self, job: str) -> Iterator[None]:
        """Within the context, hold the lock that lets only one job lead the study. If the job's process dies, the
        system releases the lock.
        """
        told = f"another job leads {self.folder.name} now; 'medsilo status' lists jobs"
        with alone(self.folder / paths.LOCK, told, LET_GO):
            append_line(self.folder / paths.JOBS, job)
            yield

    def claim(self, lead: str | None, resume: bool) -> None:
        """Record which user owns the study.

        Raise MedsiloError if the study belongs to another user, or if the job continues a finished study.

        Args:
            lead: The name of the user who submitted the job, or None in a simulation.
        """
        path = self.folder / paths.LEAD
        if resume or path.exists():
            self.check_owner(lead)
        if resume:
            self.check_unfinished()
        if lead and not path.exists():
            write_text(path, lead)

    def check_owner(self, lead: str | None) -> None:
        path = self.folder / paths.LEAD
        if path.exists() and path.read_text(encoding="utf-8") != (lead or ""):
            raise MedsiloError(f"study {self.folder.name} belongs to another lead; choose another name")
        if lead and self.folder.exists() and not path.exists():
            raise MedsiloError(f"study {self.folder.name} has no recorded owner; start it again")

    @staticmethod
    def of_job(studies: Path, job: str) -> "Record | None":
        found = (path.parent for path in studies.glob(f"*/{paths.JOBS}") if job in path.read_text().split())
        return next((Record(folder) for folder in found), None)

    # ------------------------------------------------------------------ rounds
    def rounds(self) -> list[Round]:
        """Return the recorded rounds. If a crash left an incomplete last line in the file of rounds, this line is
        ignored.
        """
        return read_rounds(self.folder, growing=True)

    def tell_now(self, turns: RequestStatus | None) -> None:
        """Write the state of the current request into a file for status displays on this machine. After the end of the
        study, there is no current request, and the file is deleted.
        """
        if turns is None:
            with suppress(OSError):
                (self.folder / paths.NOW).unlink(missing_ok=True)
        else:
            write_passing(self.folder / paths.NOW, turns.as_json())

    def add_round(self, line: Round) -> None:
        append_line(self.folder / paths.ROUNDS, _line(line).removesuffix("\n"))

    def forget_after(self, round_number: int) -> list[Round]:
        """Delete the records of all rounds after a given round, because these rounds are repeated.

        Return the remaining records.
        """
        kept = [line for line in self.rounds() if line.round <= round_number]
        write_text(self.folder / paths.ROUNDS, "".join(map(_line, kept)))
        return kept

    # ------------------------------------------------------------------ checkpoints
    @property
    def checkpoints(self) -> Path:
        return self.folder / paths.CHECKPOINTS

    def _checkpoint(self, round_number: int) -> Path:
        return self.checkpoints / paths.ROUND_FILES.replace("*", str(round_number))

    def save_checkpoint(
        self, round_number: int, tensors: dict[str, "Tensor"], facts: dict[str, Any], before: int | None = None
    ) -> None:
        """Save the server's state after a round.

        Args:
            before: An earlier round whose checkpoint is kept. All other old checkpoints are deleted as soon as the new
                checkpoint is complete.
        """
        save_tensors(self._checkpoint(round_number), tensors, {**facts, "round": round_number})
        for path in self.checkpoints.glob(paths.ROUND_FILES):
            if self._round_of(path) not in (round_number, before):
                path.unlink()
        best = facts["best"] and self._best(facts["best"]["round"])
        for path in self.checkpoints.glob(paths.BEST_FILES):
            if path != best:
                path.unlink()

    def sweep(self) -> None:
        """Delete the incomplete files that a killed server left, except those in sites' folders."""
        sweep(self.folder, *(self.folder / name for name in (paths.CHECKPOINTS, *paths.SHARED_FOLDERS)))

    def load_checkpoint(self, round_number: int | None = None) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
        """Return the tensors and the other values of a round's checkpoint, by default of the newest checkpoint."""
        with reading(f"the checkpoint of run {self.folder.name}"):
            path = max(self.checkpoints.glob(paths.ROUND_FILES), key=self._round_of, default=None)
            path = path if round_number is None else self._checkpoint(round_number)
            if path is None:
                raise MedsiloError(f"run {self.folder.name} has no checkpoint to resume from; start it again")
            tensors, facts = load_tensors(path)
            if CheckpointFacts.model_validate(facts, strict=True).round != self._round_of(path):
                raise ValueError("its name and its content state different rounds")
        return tensors, facts

    @staticmethod
    def _round_of(checkpoint: Path) -> int:
        return int(checkpoint.stem.removeprefix("round-"))

    def keep_as_best(self, round_number: int) -> None:
        """Keep the checkpoint of the best round so far under a second name.

        The second name is a hard link if the file system supports hard links, and otherwise a copy.
        """
        if self._best(round_number).exists():  # a resumed study may repeat a round whose checkpoint was already kept
            return
        temporary = self.checkpoints / ".best.part"
        temporary.unlink(missing_ok=True)
        try:
            os.link(self._checkpoint(round_number), temporary)
        except OSError:
            write_bytes(temporary, self._checkpoint(round_number).read_bytes())
        temporary.replace(self._best(round_number))
        sync_names(self.checkpoints)

    def _best(self, round_number: int) -> Path:
        return self.checkpoints / paths.BEST_FILES.replace("*", str(round_number))

    def load_best(self, round_number: int) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
        return load_tensors(self._best(round_number))

    def check_unfinished(self) -> None:
        if self.finished():
            raise MedsiloError(f"{self.folder.name} is finished; there is nothing to resume")

    def can_go_on(self) -> bool:
        return not self.finished() and any(self.checkpoints.glob(paths.ROUND_FILES))

    def finished(self) -> Summary | None:
        """Return the study's summary if the study is finished, or None if the study failed or has not ended."""
        summary = self.summary()
        return summary if summary and summary.finished else None

    # ------------------------------------------------------------------ results
    def save_global(self, file: str, model: dict[str, "Tensor"], facts: dict[str, Any]) -> None:
        """Save the global model.

        Args:
            file: The file's name: `paths.BEST` or `paths.LAST`.
        """
        save_tensors(self.folder / paths.GLOBAL / file, model, facts)

    def write_summary(self, summary: Summary) -> None:
        write_json(self.folder / paths.SUMMARY, summary.as_json())

    def summary(self) -> Summary | None:
        return read_summary(self.folder) if (self.folder / paths.SUMMARY).exists() else None


def new_rounds(rounds: Sequence[Round], after: int, size: int) -> list[Round]:
    """Return the rounds that are later than the round `after`.

    Args:
        size: The maximum bytes of all returned rounds. If the first round alone has more bytes, only this round is
            returned.
    """
    told: list[Round] = []
    for line in rounds[bisect_right(rounds, after, key=lambda line: line.round) :]:
        size -= len(_line(line))
        if told and size < 0:
            break
        told.append(line)
    return told


def _line(line: Round) -> str:
    return json.dumps(line.as_json(), allow_nan=False) + "\n"
