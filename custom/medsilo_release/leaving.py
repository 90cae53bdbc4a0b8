"""A study as if one of its hospitals, or some of a hospital's patients, had never joined, and its certificate.

It goes on from the last round before that hospital came. Where that is not kept, it is the whole study again. What is
the same in both are plan and seeds, so the models are those, bit for bit, of a study that never knew it.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from medsilo.core import shelf
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_facts, load_tensors, save_tensors, write_bytes
from medsilo.core.section import Section
from medsilo.core.text import counted, duration
from medsilo.federation import inprocess
from medsilo.flare import simulator
from medsilo.flare.jobs import plan_of
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.reading import read_rounds
from medsilo.runs.schema import Round
from medsilo.sealing import signed, signing
from medsilo.site.owner import ALL_MINE
from medsilo.site.settings import SiteSettings
from medsilo.study import judging
from medsilo_release.release_folder import Hash, Word

CERTIFICATE, MODELS = "leaving.json", "*.safetensors"
MOST = 10_000  # files of models
Files = Annotated[dict[Annotated[str, Field(max_length=1000)], Hash], Field(max_length=MOST)]


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
        summary, before = judging.finished_run(study), load_plan(study / paths.PLAN)
        rounds = read_rounds(study)
        first = next((line.round for line in rounds if hospital in line.answered), None)
        if first is None:
            known = ", ".join(sorted({site for line in rounds for site in line.answered}))
            raise MedsiloError(
                f"{hospital} answered no round, so that nothing of it is in the models; who did: {known}"
            )
        others = [site for site in summary.agreed.sites if site != hospital]
        if not others:
            raise MedsiloError(f"{hospital} is the only hospital of this study; remove its models instead")
        least = before.participation.minimum
        most = len(others) - (before.participation.when_missing == "continue")  # where all need not be there
        fewer = [f"participation.minimum={max(1, min(least, most))}"] if least else []
        changes = [f"participation.sites=[{','.join(others)}]", *fewer]
        plan = before if patients else before.with_changes(changes)
        return cls(study, hospital, patients, before, plan, rounds, first)

    @property
    def kept(self) -> Path | None:
        """The study's state before the hospital came; None where it is not kept, or sites have states of their own."""
        folder = self.study / paths.CHECKPOINTS / paths.BEFORE.replace("*", str(self.first - 1))
        last = [max(own.glob(paths.STATE_FILES), key=_round_of, default=None) for own in self._folders()]
        alone = all(path and not load_tensors(path)[0] and load_facts(path)["best"] is None for path in last)
        return folder if folder.is_dir() and alone and not self._depends_on_sites() else None

    def _depends_on_sites(self) -> bool:
        """Return whether rounds before the hospital came would have been others without it in the plan."""
        plan = self.before
        dealt = plan.task.synthetic or plan.task.deals or plan.training.truncate
        shared = plan.transport.sealed or plan.mixing != type(plan.mixing)()
        return bool(dealt or shared or any(phase.turn or phase.before for phase in plan.course.phases))

    def _folders(self) -> list[Path]:
        return [paths.site_folder(self.study, site) for site in self.plan.participation.sites]

    @property
    def begun_after(self) -> int:
        """The round from which the new study goes on."""
        return self.first - 1 if self.kept else 0

    def begun_in(self, out: Path) -> int:
        """Return the round from which a finished run without who left went on; 0 where it is the whole study again."""
        return self.begun_after if read_rounds(out)[: self.first - 1] == self._lines() else 0

    def price(self, anew: bool = False) -> str:
        """Return the price: rounds, and measured seconds. anew: in a consortium, which goes on from no state."""
        begun = 0 if anew else self.begun_after
        again = self.before.rounds - begun
        measured = [line.seconds for line in self.rounds[begun:] if line.seconds is not None]
        seconds = statistics.fmean(measured) * again if measured else 0.0
        whole = f"the study from round {self.first} on" if begun else "the whole study"
        if self.first > 1 and not begun:
            whole += f", though {self.hospital} came in round {self.first} (no state of before can be gone on from),"
        return f"{whole} again: {counted(again, 'round')}, {duration(seconds)} as measured then"

    # ------------------------------------------------------------------ the study again
    def run(self, out: Path, settings: SiteSettings) -> None:
        """Run the study without who left, as it was run before; from a kept state in this process."""
        settings = settings.changed(ALL_MINE, "the study again")
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
        lines = [line.model_dump_json(exclude_unset=True) for line in self._lines()]
        write_bytes(out / paths.ROUNDS, "".join(f"{line}\n" for line in lines).encode())
        for old in self._folders():
            new = paths.site_folder(out, old.name)
            state = max(old.glob(paths.STATE_FILES), key=_round_of)
            write_bytes(new / paths.STATE_FILES.replace("*", str(done)), state.read_bytes())
            if (old / paths.METRICS).exists():
                write_bytes(new / paths.METRICS, (old / paths.METRICS).read_bytes())

    def _lines(self) -> list[Round]:
        """Return the rounds before the hospital came, as a study that goes on from there has them."""
        gone = self.hospital if not self.patients else ""
        before = []
        for line in self.rounds[: self.first - 1]:
            others = [site for site in line.asked if site != gone]
            refused, lost = (
                {site: why for site, why in one.items() if site != gone} for one in (line.refused, line.lost)
            )
            before.append(line.model_copy(update={"asked": others, "refused": refused, "lost": lost}))
        return before


def _round_of(state: Path) -> int:
    return int(state.stem.removeprefix("state-"))


def models_in(folder: Path) -> list[Path]:
    """Return the files of models, and of states that hold one, below a folder."""
    return sorted(path for path in folder.rglob(MODELS) if path.is_file() and not path.is_symlink())[:MOST]


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


def certify(gone: Departure, out: Path, key: signing.PrivateKey) -> LeavingCertificate:
    """Write and return what was made instead of what; raises MedsiloError where a run is not of this study."""
    judging.finished_run(out)
    if plan_of(out / paths.PLAN).hash != gone.plan.hash:
        raise MedsiloError("the run is not of this study without who left; run 'medsilo leave' into a new folder")
    if (rounds := shelf.hash_of_file(out / paths.ROUNDS)) == shelf.hash_of_file(gone.study / paths.ROUNDS):
        raise MedsiloError("that run is the study itself; name another one with -o")
    told = LeavingCertificate(
        hospital=gone.hospital,
        patients=gone.patients,
        plan_before=gone.before.hash,
        plan=gone.plan.hash,
        begun_after=gone.begun_in(out),
        rounds=rounds,
        models={path.relative_to(out).as_posix(): shelf.hash_of_file(path) for path in models_in(out)},
        copies=dict(_copies(gone, out)),
    )
    signed.write_signed(out / CERTIFICATE, told, key)
    return told


def _copies(gone: Departure, out: Path) -> Iterator[tuple[str, str]]:
    """Yield each copy of an old model below the folder of runs: the study's own, and where it was copied to."""
    root = gone.study.resolve().parent
    own = {shelf.hash_of_file(path) for path in models_in(gone.study)}
    for path in models_in(root):
        inside = path.resolve().is_relative_to(out.resolve())
        if not inside and (digest := shelf.hash_of_file(path)) in own:
            yield path.relative_to(root).as_posix(), digest
