"""The run tree: what a study leaves on the server's disk, in files that other programs may rely on."""

import json
import os
import secrets
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field
from torch import Tensor

from medsilo.core import model_folders, optional
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
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.provenance import write_provenance
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round, Turns
from medsilo.runs.schema import Summary

LET_GO = 60.0  # seconds that a job which is ending has to let go of its study


def new_study(plan: Plan) -> str:
    """A name for a new run: method, task and time, and a few letters that tell apart what starts in one second."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{plan.algorithm.name}-{plan.task.name}-{stamp}-{secrets.token_hex(2)}"


@contextmanager
def alone(path: Path, told: str, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock as long as this process lives and is inside; raise this where another process has it for so long."""
    make_folder(path.parent)
    try:
        held: AbstractContextManager = FileLock(path).acquire(timeout=wait)
    except Timeout as error:
        raise MedsiloError(told, str(path)) from error
    except OSError:  # a file system without locks
        held = nullcontext()
    with held:
        yield


class Best(BaseModel):
    """The best round so far in a checkpoint's facts."""

    round: int = Field(ge=0)
    scores: dict[str, float]


class CheckpointFacts(BaseModel):
    """The facts of a checkpoint beside its tensors; the mixers' part is checked by those who take it over."""

    plan: str
    sites: list[str]
    best: Best | None
    settled: dict[str, list[str]]
    details: dict[str, Any]
    mixers: dict[str, Any]
    round: int = Field(ge=0)


class Record:
    """One run's folder: plan, provenance, rounds, checkpoints, summary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model_folders.look_in(folder / model_folders.FOLDER)

    def begin(self, plan: Plan) -> None:
        """Write what is known before the first round. A run never writes over another that had begun to train."""
        if not self.make_way():
            raise MedsiloError(f"run folder {self.folder.name} exists; choose another name, or resume that run")
        if plan.network.files:
            optional.weight_cache.keep_beside(plan.network.files, self.folder / model_folders.FOLDER)
        write_text(self.folder / paths.PLAN, plan.to_yaml())
        write_provenance(self.folder, plan)

    def make_way(self) -> bool:
        """Return whether a study can begin here. One that no site had to train for goes; logs and sites' files stay."""
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

    # ------------------------------------------------------------------ NVFlare's jobs that led it
    @contextmanager
    def led_by(self, job: str) -> Iterator[None]:
        """While one job leads a study no other may; the system lets go of a dead process's hold."""
        told = f"another job leads {self.folder.name} now; 'medsilo status' lists jobs"
        with alone(self.folder / paths.LOCK, told, LET_GO):
            append_line(self.folder / paths.JOBS, job)
            yield

    def claim(self, lead: str | None, resume: bool) -> None:
        """Bind the study to who submitted its job; raises if it is another's, or over. lead: None in simulations"""
        path = self.folder / paths.LEAD
        if resume or path.exists():
            self.check_owner(lead)
        if resume:
            self.check_unfinished()
        if lead and not path.exists():
            write_text(path, lead)

    def check_owner(self, lead: str | None) -> None:
        """Raise unless a study that is there belongs to who submitted this job."""
        path = self.folder / paths.LEAD
        if path.exists() and path.read_text(encoding="utf-8") != (lead or ""):
            raise MedsiloError(f"study {self.folder.name} is another lead's; choose another name")
        if lead and self.folder.exists() and not path.exists():
            raise MedsiloError(f"study {self.folder.name} does not say whose it is; start it again")

    @staticmethod
    def of_job(studies: Path, job: str) -> "Record | None":
        """The study among these that an NVFlare job led."""
        found = (path.parent for path in studies.glob(f"*/{paths.JOBS}") if job in path.read_text().split())
        return next((Record(folder) for folder in found), None)

    # ------------------------------------------------------------------ rounds
    def rounds(self) -> list[Round]:
        """Return the rounds written so far; a line that a crash cut short doesn't count."""
        return read_rounds(self.folder, growing=True)

    def tell_now(self, turns: Turns | None) -> None:
        """Say who is being asked, for people who watch the run on this machine; None when the study has ended."""
        if turns is None:
            with suppress(OSError):
                (self.folder / paths.NOW).unlink(missing_ok=True)
        else:
            write_passing(self.folder / paths.NOW, turns.as_json())

    def add_round(self, line: Round) -> None:
        """Append one line to rounds.jsonl."""
        append_line(self.folder / paths.ROUNDS, _line(line).removesuffix("\n"))

    def forget_after(self, round_number: int) -> list[Round]:
        """Drop the lines of rounds that will be repeated; returns those that stay."""
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
        self, round_number: int, tensors: dict[str, Tensor], facts: dict[str, Any], before: int | None = None
    ) -> None:
        """The server's state after a round; others go only when this one is whole, but for that after `before`."""
        save_tensors(self._checkpoint(round_number), tensors, {**facts, "round": round_number})
        for path in self.checkpoints.glob(paths.ROUND_FILES):
            if self._round_of(path) not in (round_number, before):
                path.unlink()
        best = facts["best"] and self._best(facts["best"]["round"])
        for path in self.checkpoints.glob(paths.BEST_FILES):
            if path != best:
                path.unlink()

    def sweep(self) -> None:
        """Remove what the server left half-written when it was killed. The sites see to their own folders."""
        sweep(self.folder, *(self.folder / name for name in (paths.CHECKPOINTS, *paths.SHARED_FOLDERS)))

    def load_checkpoint(self, round_number: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest checkpoint, or that after a round."""
        with reading(f"the checkpoint of run {self.folder.name}"):
            path = max(self.checkpoints.glob(paths.ROUND_FILES), key=self._round_of, default=None)
            path = path if round_number is None else self._checkpoint(round_number)
            if path is None:
                raise MedsiloError(f"run {self.folder.name} has no checkpoint to resume from; start it again")
            tensors, facts = load_tensors(path)
            if CheckpointFacts.model_validate(facts, strict=True).round != self._round_of(path):
                raise ValueError("its name and its content have different rounds")
        return tensors, facts

    @staticmethod
    def _round_of(checkpoint: Path) -> int:
        return int(checkpoint.stem.removeprefix("round-"))

    def keep_as_best(self, round_number: int) -> None:
        """Keep a round's checkpoint beyond the next. A second name for the same file, so it costs no copy."""
        if self._best(round_number).exists():  # the same round again, after a resume
            return
        temporary = self.checkpoints / ".best.part"
        temporary.unlink(missing_ok=True)
        try:
            os.link(self._checkpoint(round_number), temporary)
        except OSError:  # a file system without links
            write_bytes(temporary, self._checkpoint(round_number).read_bytes())
        temporary.replace(self._best(round_number))
        sync_names(self.checkpoints)

    def _best(self, round_number: int) -> Path:
        return self.checkpoints / paths.BEST_FILES.replace("*", str(round_number))

    def load_best(self, round_number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The checkpoint of a round that was kept as the best."""
        return load_tensors(self._best(round_number))

    def check_unfinished(self) -> None:
        """Raises if the study has ended well."""
        if self.finished():
            raise MedsiloError(f"{self.folder.name} is finished; there is nothing to resume")

    def can_go_on(self) -> bool:
        """Return whether the study has not ended, and there is something to go on from."""
        return not self.finished() and any(self.checkpoints.glob(paths.ROUND_FILES))

    def finished(self) -> Summary | None:
        """Return the outcome of a study that has ended well."""
        summary = self.summary()
        return summary if summary and summary.finished else None

    # ------------------------------------------------------------------ the end
    def save_global(self, file: str, model: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Keep the model that all sites share, where the method has one, as `paths.BEST` or `paths.LAST`."""
        save_tensors(self.folder / paths.GLOBAL / file, model, facts)

    def write_summary(self, summary: Summary) -> None:
        """Write the run's outcome, success or failure."""
        write_json(self.folder / paths.SUMMARY, summary.as_json())

    def summary(self) -> Summary | None:
        """Return the run's outcome; None while there is none."""
        return read_summary(self.folder) if (self.folder / paths.SUMMARY).exists() else None


def new_rounds(rounds: Sequence[Round], after: int, size: int) -> list[Round]:
    """Return the first rounds after this one that take no more than `size` bytes, and the very first whatever its
    size."""
    told: list[Round] = []
    for line in rounds[bisect_right(rounds, after, key=lambda line: line.round) :]:
        size -= len(_line(line))
        if told and size < 0:
            break
        told.append(line)
    return told


def _line(line: Round) -> str:
    return json.dumps(line.as_json(), allow_nan=False) + "\n"
