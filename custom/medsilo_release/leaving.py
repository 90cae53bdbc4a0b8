"""A study as if one of its hospitals, or some of a hospital's patients, had never joined.

It goes on from the last round before that hospital came. Where that is not kept, it is the whole study again. What is
the same in both are plan and seeds, so the models are those, bit for bit, of a study that never knew it.
"""

import hashlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from medsilo.extend import (
    MedsiloError,
    Plan,
    Round,
    Section,
    SiteSettings,
    finished_run,
    inprocess,
    load_facts,
    load_plan,
    load_tensors,
    paths,
    read_rounds,
    save_tensors,
    signed,
    signing,
    simulator,
    write_bytes,
)
from medsilo_release.release_folder import Hash, Word

CERTIFICATE = "leaving.json"
MODELS = "*.safetensors"
MOST = 10_000  # files of models
PathName = Annotated[str, Field(max_length=1000)]
Files = Annotated[dict[PathName, Hash], Field(max_length=MOST)]


class LeavingCertificate(Section):
    """leaving.json: who left, and what was made instead of what."""

    hospital: Word
    patients: bool  # whether it is some of its patients
    plan_before: Hash
    plan: Hash
    begun_after: Annotated[int, Field(ge=0, le=10**6)]  # the round from which the new study went on
    rounds: Hash  # of rounds.jsonl
    models: Files
    copies: Files  # of the old models, that are known of


@dataclass(frozen=True)
class Departure:
    """A finished study, and what it takes to have it without a hospital, or without patients of it."""

    study: Path
    hospital: str
    patients: bool
    before: Plan
    plan: Plan
    rounds: list[Round]
    first: int  # round in which the hospital's numbers were used

    @classmethod
    def of(cls, study: Path, hospital: str, patients: bool) -> Self:
        """Return the departure; raises MedsiloError where nothing of the hospital is in the models."""
        summary, before = finished_run(study), load_plan(study / paths.PLAN)
        rounds = read_rounds(study)
        first = next((line.round for line in rounds if hospital in line.answered), None)
        if first is None:
            raise MedsiloError(f"{hospital} answered no round of this study, so that nothing of it is in its models")
        others = [site for site in summary.agreed.sites if site != hospital]
        if not others:
            raise MedsiloError(f"{hospital} is the only hospital of this study; remove its models instead")
        least = before.participation.minimum
        fewer = [f"participation.minimum={min(least, len(others))}"] if least else []
        if fewer and least and before.participation.when_missing == "continue" and least >= len(others):
            fewer = [f"participation.minimum={max(1, len(others) - 1)}"]
        changes = [f"participation.sites=[{','.join(others)}]", *fewer]
        plan = before if patients else before.with_changes(changes)
        return cls(study, hospital, patients, before, plan, rounds, first)

    @property
    def kept(self) -> Path | None:
        """The study's state before the hospital came; None where it is not kept, or sites have states of their own."""
        folder = self.study / paths.CHECKPOINTS / paths.BEFORE.replace("*", str(self.first - 1))
        last = [max(own.glob(paths.STATE_FILES), key=_round_of, default=None) for own in self._folders()]
        alone = all(path and not load_tensors(path)[0] and load_facts(path)["best"] is None for path in last)
        return folder if folder.is_dir() and alone else None

    def _folders(self) -> list[Path]:
        return [paths.site_folder(self.study, site) for site in self.plan.participation.sites]

    @property
    def begun_after(self) -> int:
        """The round from which the new study goes on."""
        return self.first - 1 if self.kept else 0

    @property
    def price(self) -> str:
        """The price in words: rounds, and measured seconds."""
        again = self.before.rounds - self.begun_after
        measured = [line.seconds for line in self.rounds[self.begun_after :] if line.seconds is not None]
        seconds = statistics.fmean(measured) * again if measured else 0.0
        whole = "the whole study" if not self.begun_after else f"the study from round {self.first} on"
        return f"{whole} again: {again} rounds, {seconds:.0f} seconds as they were measured"

    # ------------------------------------------------------------------ the study again
    def run(self, out: Path, settings: SiteSettings) -> None:
        """Run the study without who left, as it was run before; from a kept state in this process."""
        sites = getattr(settings, "sites", {})  # of those on this machine that have settings of their own
        left = {site: own for site, own in sites.items() if site in self.plan.participation.everyone}
        settings = settings.model_copy(update={"sites": left}) if sites else settings
        if kept := self.kept:
            self._prepare(out, kept)
            inprocess.run(self.plan, folder=out, resume=True, settings=settings)
        elif (self.study / paths.JOB).is_dir():
            simulator.run(self.plan, out, settings)
        else:
            inprocess.run(self.plan, folder=out, settings=settings)

    def _prepare(self, out: Path, kept: Path) -> None:
        """Write what a study goes on from after the last round before the hospital came."""
        done = self.first - 1
        write_bytes(out / paths.PLAN, self.plan.to_yaml().encode())
        write_bytes(out / paths.PROVENANCE, (self.study / paths.PROVENANCE).read_bytes())
        names = list(self.plan.participation.sites)
        for path in sorted(kept.glob(MODELS)):
            tensors, facts = load_tensors(path)
            facts |= {"plan": self.plan.hash, "sites": names}
            facts["settled"] = {site: own for site, own in facts["settled"].items() if site in names}
            save_tensors(out / paths.CHECKPOINTS / path.name, tensors, facts)
        lines = [self._without(line).model_dump_json(exclude_unset=True) for line in self.rounds[:done]]
        write_bytes(out / paths.ROUNDS, "".join(f"{line}\n" for line in lines).encode())
        for old in self._folders():
            new = paths.site_folder(out, old.name)
            state = max(old.glob(paths.STATE_FILES), key=_round_of)
            write_bytes(new / paths.STATE_FILES.replace("*", str(done)), state.read_bytes())
            if (old / paths.METRICS).exists():
                write_bytes(new / paths.METRICS, (old / paths.METRICS).read_bytes())

    def _without(self, line: Round) -> Round:
        gone = self.hospital if not self.patients else ""
        fewer: dict[str, Any] = {
            "asked": [site for site in line.asked if site != gone],
            "refused": {site: why for site, why in line.refused.items() if site != gone},
            "lost": {site: why for site, why in line.lost.items() if site != gone},
        }
        return line.model_copy(update=fewer)

    # ------------------------------------------------------------------ the certificate
    def certify(self, out: Path, key: signing.PrivateKey) -> LeavingCertificate:
        """Write and return what was made instead of what; raises MedsiloError where a run is not of this study."""
        finished_run(out)
        if load_plan(out / paths.PLAN).hash != self.plan.hash:
            raise MedsiloError("the run is not of this study without who left; run 'medsilo leave' into a new folder")
        gone = LeavingCertificate(
            hospital=self.hospital,
            patients=self.patients,
            plan_before=self.before.hash,
            plan=self.plan.hash,
            begun_after=self.begun_after,
            rounds=_hash(out / paths.ROUNDS),
            models={path.relative_to(out).as_posix(): _hash(path) for path in _models(out)},
            copies=dict(self.copies(out)),
        )
        signed.write_signed(out / CERTIFICATE, gone, key)
        return gone

    def copies(self, out: Path) -> Iterator[tuple[str, str]]:
        """Yield each copy of an old model below the folder of runs: the study's own, and where it was copied to."""
        root = self.study.resolve().parent
        own = {_hash(path): path for path in _models(self.study)}
        for path in _models(root):
            if path.resolve().is_relative_to(out.resolve()):
                continue
            if (digest := _hash(path)) in own or path.is_relative_to(self.study.resolve()):
                yield path.relative_to(root).as_posix(), digest


def _models(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob(MODELS) if path.is_file() and not path.is_symlink())[:MOST]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _round_of(state: Path) -> int:
    return int(state.stem.removeprefix("state-"))
