"""The run tree: what a study leaves on the server's disk, in files that other programs may rely on."""

import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, Field
from torch import Tensor

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import (
    load_tensors,
    make_folder,
    newest,
    save_tensors,
    sweep,
    write_bytes,
    write_json,
    write_text,
)
from medsilo.core.package import package_facts
from medsilo.core.spill import Kept
from medsilo.plan import Plan

AMPLITUDE = "figures/amplitude.png"  # of the server, where the method has one
JOBS = "jobs.txt"  # the ids of the NVFlare jobs that led the study, the last one last
LET_GO = 60.0  # seconds that a job which is ending has to let go of its study
PACKAGES = ("nvflare", "torch", "monai", "numpy", "nibabel", "SimpleITK", "pydantic", "safetensors")


def now() -> str:
    """The time of day, UTC, as it stands in files."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_study(plan: Plan) -> str:
    """A name for a new run: method, task and time, and a few letters that tell apart what starts in one second."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{plan.algorithm.name}-{plan.task.name}-{stamp}-{secrets.token_hex(2)}"


def _held(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _of_kind(value: Any, keys: dict[str, type]) -> dict[str, Any]:
    """A JSON object that has these keys with values of their kinds; what else it holds, who uses it checks."""
    if not isinstance(value, dict):
        raise TypeError("no object")
    for key, kind in keys.items():
        if not isinstance(value[key], kind):
            raise TypeError(f"{key} is no {kind.__name__}")
    return value


class Best(BaseModel):
    """The best round so far in a checkpoint's facts."""

    round: int = Field(ge=0)
    scores: dict[str, float]


class Facts(BaseModel):
    """What every checkpoint says beside its tensors; the mixers' part is checked by those who take it over."""

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

    def begin(self, plan: Plan) -> None:
        """Write what is known before the first round. A run never writes over another."""
        if (self.folder / "plan.yaml").exists():
            raise MedsiloError(f"run folder {self.folder.name} exists; choose another name, or resume that run")
        write_text(self.folder / "plan.yaml", plan.to_yaml())
        provenance = {
            "package": package_facts(),
            "plan_hash": plan.hash,
            "seed": plan.seed,
            "protocol": plan.protocol,
            "started": now(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
        write_json(self.folder / "provenance.json", provenance)

    # ------------------------------------------------------------------ NVFlare's jobs that led it
    @contextmanager
    def led_by(self, job: str) -> Iterator[None]:
        """While one job leads a study no other may; the system lets go of a dead process's hold."""
        make_folder(self.folder)
        with (self.folder / JOBS).open("a") as file:
            deadline = time.monotonic() + LET_GO
            while not _held(file):
                if time.monotonic() > deadline:
                    raise MedsiloError(f"another job leads {self.folder.name} now; 'medsilo status' lists jobs")
                time.sleep(0.5)
            file.write(job + "\n")
            file.flush()
            yield

    @staticmethod
    def of_job(studies: Path, job: str) -> "Record | None":
        """The study among these that an NVFlare job led."""
        found = (path.parent for path in studies.glob(f"*/{JOBS}") if job in path.read_text().split())
        return next((Record(folder) for folder in found), None)

    # ------------------------------------------------------------------ rounds
    def rounds(self) -> list[dict[str, Any]]:
        """The rounds written so far; a line that a crash cut short doesn't count."""
        path = self.folder / "rounds.jsonl"
        if not path.exists():
            return []
        with reading(f"rounds.jsonl of run {self.folder.name}"):
            lines = [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
            return [_of_kind(json.loads(line), {"round": int}) for line in lines]

    def add_round(self, record: dict[str, Any]) -> None:
        """Append one line to rounds.jsonl."""
        line = json.dumps(record, allow_nan=False)
        try:
            with (self.folder / "rounds.jsonl").open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            message = "rounds.jsonl could not be written (is the disk full?); free space, then resume"
            raise MedsiloError(message, private=str(error)) from error

    def forget_after(self, round_number: int) -> list[dict[str, Any]]:
        """Drop the lines of rounds that will be repeated; returns those that stay."""
        kept = [record for record in self.rounds() if record["round"] <= round_number]
        write_text(self.folder / "rounds.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    # ------------------------------------------------------------------ checkpoints
    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _checkpoint(self, round_number: int) -> Path:
        return self.checkpoints / f"round-{round_number}.safetensors"

    def save_checkpoint(self, round_number: int, tensors: dict[str, Kept], facts: dict[str, Any]) -> None:
        """The server's state after a round; the one before goes only when this one is whole."""
        save_tensors(self._checkpoint(round_number), tensors, {**facts, "round": round_number})
        for path in self.checkpoints.glob("round-*.safetensors"):
            if path != self._checkpoint(round_number):
                path.unlink()
        best = facts["best"] and self._best(facts["best"]["round"])
        for path in self.checkpoints.glob("best-*.safetensors"):
            if path != best:
                path.unlink()

    def sweep(self) -> None:
        """Remove what the server left half-written when it was killed. The sites see to their own folders."""
        sweep(self.folder, *(self.folder / name for name in ("checkpoints", "global", "supermodel", "figures")))

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest checkpoint."""
        with reading(f"the checkpoint of run {self.folder.name}"):
            path = newest(self.checkpoints, "round-*.safetensors", self._round_of)
            if path is None:
                raise MedsiloError(f"run {self.folder.name} has no checkpoint to resume from; start it anew")
            tensors, facts = load_tensors(path)
            if Facts.model_validate(facts, strict=True).round != self._round_of(path):
                raise ValueError("its name and its content tell different rounds")
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

    def _best(self, round_number: int) -> Path:
        return self.checkpoints / f"best-{round_number}.safetensors"

    def load_best(self, round_number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The checkpoint of a round that was kept as the best."""
        return load_tensors(self._best(round_number))

    def check_unfinished(self) -> None:
        """Raises if the study has ended well."""
        if self.summary().get("status") == "finished":
            raise MedsiloError(f"{self.folder.name} is finished; there is nothing to resume")

    def can_go_on(self) -> bool:
        """Whether the study has not ended, and there is something to go on from."""
        return self.summary().get("status") != "finished" and any(self.checkpoints.glob("round-*.safetensors"))

    # ------------------------------------------------------------------ the end
    def save_global(self, which: str, model: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """The model that all sites share, where the method has one."""
        save_tensors(self.folder / "global" / f"{which}.safetensors", model, facts)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """The run's outcome, success or failure."""
        write_json(self.folder / "summary.json", summary)

    def summary(self) -> dict[str, Any]:
        """The run's outcome; an empty dict while there is none."""
        path = self.folder / "summary.json"
        if not path.exists():
            return {}
        with reading(f"summary.json of run {self.folder.name}"):
            return _of_kind(json.loads(path.read_text("utf-8")), {"status": str})
