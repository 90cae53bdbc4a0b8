"""Read and write a release: a signed folder with a model. A hospital can test the model without a startup kit and
without a network connection.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import not_
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator

from medsilo.core.errors import MedsiloError
from medsilo.core.package import ENGINE, facts_of
from medsilo.core.section import Section
from medsilo.flare.jobs import plan_of
from medsilo.runs import paths
from medsilo.runs.score import Score
from medsilo.site import signed, signing
from medsilo_lab.deploy import model_card
from medsilo_lab.deploy.source import Source

MANIFEST = "release.json"
MOST_FILES, MOST_HOSPITALS = 2000, 4096
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Share = Annotated[float, Field(ge=0, le=1)]


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


class PackageFacts(Section):
    """The version and hash of the medsilo package that wrote the release."""

    version: Word
    hash: Hash


class Scored(Section):
    score: Share
    cases: Annotated[int, Field(ge=0, le=10**9)] | None = None
    step: Share = Field(0.0, exclude_if=not_)

    @property
    def told(self) -> Score:
        return Score.told(self.score, self.cases, self.step)


class ReleaseManifest(Section):
    """The contents of release.json: a list of the release's files, and the results of the model in its study."""

    made: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    task: Word
    title: Word
    metric: Word
    plan_hash: Hash
    package: PackageFacts
    expects: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=20)]
    models: Annotated[tuple[Annotated[str, Field(pattern=r"^model-\d{1,2}$")], ...], Field(min_length=1, max_length=16)]
    files: Annotated[dict[Word, Hash], Field(min_length=1, max_length=MOST_FILES)]
    study: Annotated[dict[Word, Scored], Field(max_length=MOST_HOSPITALS)]

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError("the list of files contains a file outside the folder")
        return files


@dataclass(frozen=True)
class Release:
    folder: Path
    manifest: ReleaseManifest
    lead: str  # fingerprint of the public key that signed the release

    @classmethod
    def open(cls, folder: Path, leads: Collection[str] | None = None) -> Self:
        """Open a release, and verify that its files have not changed since they were signed.

        leads: Fingerprints of the accepted keys. If `leads` is None, every key is accepted; only the person who made
        the release may use None.
        """
        manifest, key = signed.read_signed(folder / MANIFEST, ReleaseManifest)
        by = signed.fingerprint(key)
        if leads is not None and by not in (lead.strip().lower() for lead in leads):
            raise MedsiloError(
                f"the release is signed by {by}, not by {', '.join(leads)}; ask the lead for the right fingerprint"
            )
        check_files(folder, manifest.files, MANIFEST)
        return cls(folder, manifest, key)

    @property
    def hash(self) -> str:
        return signed.digest_of(self.manifest)

    def source(self, packages: Collection[str] = ("*",)) -> Source:
        """Return the model of the release, or an ensemble if the release contains several models. The plan in the
        release may import code only from `packages`.
        """
        folders = [self.folder / name for name in self.manifest.models]
        for folder in folders:
            plan_of(folder / paths.PLAN, allowed=packages)  # the allowed packages are checked before any import
        sources = [Source.open(folder) for folder in folders]
        plan, told = sources[0].plan, self.manifest
        if (plan.hash, plan.task.name, plan.task.goal.metric) != (told.plan_hash, told.task, told.metric):
            raise MedsiloError(
                f"{MANIFEST} describes another model than the folder contains; ask the lead for the release again"
            )
        return Source.together(sources)


def write_release(runs: Sequence[Path], site: str, out: Path, key: signing.PrivateKey) -> Release:
    """Write a release, then read and return it. If each hospital has a personal model, release the personal model of
    the hospital `site`.
    """
    if out.exists():
        raise MedsiloError(f"{out.name} already exists; choose another folder with -o", str(out))
    sources = [Source.open(run, site) for run in runs]
    if raw := [run for run, source in zip(runs, sources, strict=True) if source.round == 0]:
        raise MedsiloError(
            "the best model is the untrained model of round 0: no later model scored better; "
            "repeat the study with model_selection.keep=last, or with more patients",
            str(raw[0]),
        )
    task = Source.together(sources).plan.task
    facts = [model_card.card_facts(source) for source in sources]
    names = [f"model-{number}" for number in range(1, len(runs) + 1)]
    labels = [f"labels, in order: {', '.join(task.goal.label_names)}"] if task.goal.label_names else []
    told = {site: own for site, own in facts[0]["scores"].items() if own and own["score"] is not None}
    study = {
        site: Scored(score=own["score"], cases=own["cases"], step=own["step"] or 0.0) for site, own in told.items()
    }
    try:
        for name, source in zip(names, sources, strict=True):
            source.copy(out / name)
            model_card.write_card(source, out / name)
        manifest = ReleaseManifest(
            made=today(),
            task=task.name,
            title=task.title,
            metric=facts[0]["metric"],
            plan_hash=sources[0].plan.hash,
            package=PackageFacts(**facts_of(ENGINE)),
            expects=(f"{task.title}: task {task.name}, {task.channels} channels or columns", *labels),
            models=tuple(names),
            files=dict(signed.hashes_in(out, MANIFEST)),
            study=study if len(facts) == 1 else {},
        )
        signed.write_signed(out / MANIFEST, manifest, key)
        return Release.open(out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def check_files(folder: Path, files: Mapping[str, str], but: str) -> None:
    """Raise MedsiloError unless a folder contains exactly the signed files, with unchanged contents. `but` is the name
    of the file that lists the signed files.
    """
    there = dict(signed.hashes_in(folder, but))
    if wrong := sorted(name for name in there.keys() | files.keys() if there.get(name) != files.get(name)):
        kind = "is missing" if wrong[0] not in there else "was changed after it was signed"
        kind, other = (kind, "") if wrong[0] in files else ("is not signed", "move it elsewhere, or ")
        raise MedsiloError(
            f"{wrong[0]} {kind} ({len(wrong)} such files); {other}get the folder again from who signed it", str(folder)
        )
