"""A released model: a signed folder that any hospital can test on its own patients, without a kit or a network."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator

from medsilo.extend import (
    MedsiloError,
    Section,
    Source,
    answering_together,
    card_facts,
    copy_model,
    open_source,
    package_facts,
    signed,
    signing,
    write_card,
)

MANIFEST, CHANGES = "release.json", "CHANGES.md"
MOST_FILES, MOST_HOSPITALS = 2000, 4096
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Share = Annotated[float, Field(ge=0, le=1)]


class PackageFacts(Section):
    """The medsilo that did it."""

    version: Word
    hash: Hash


class Scored(Section):
    """A hospital's score in the study, as it told it."""

    score: Share
    cases: Annotated[int, Field(ge=0, le=10**9)] | None = None


class ReleaseManifest(Section):
    """release.json: what the folder holds, and what the model was in its study."""

    form: Literal[1] = 1
    made: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    task: Word
    title: Word
    method: Word
    metric: Word
    plan_hash: Hash
    package: PackageFacts
    expects: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=20)]
    models: Annotated[tuple[Annotated[str, Field(pattern=r"^model-\d{1,2}$")], ...], Field(min_length=1, max_length=16)]
    files: Annotated[dict[Word, Hash], Field(min_length=1, max_length=MOST_FILES)]
    study: Annotated[dict[Word, Scored], Field(max_length=MOST_HOSPITALS)]
    after: Hash | None = None  # the release that this one takes the place of

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError("it names a file outside of the folder")
        return files


@dataclass(frozen=True)
class Release:
    """A release that was verified."""

    folder: Path
    manifest: ReleaseManifest
    lead: str  # the public key that signed it

    @classmethod
    def open(cls, folder: Path, lead: str = "") -> Self:
        """Return a release whose files are those that were signed. lead: the fingerprint that its key must have."""
        manifest, key = signed.read_signed(folder / MANIFEST, ReleaseManifest)
        if lead and signed.fingerprint(key) != lead.strip().lower():
            raise MedsiloError(
                f"the release is signed by {signed.fingerprint(key)}, not by {lead}; ask the lead which is right"
            )
        signed.check_files(folder, manifest.files, MANIFEST)
        return cls(folder, manifest, key)

    @property
    def hash(self) -> str:
        """Return what receipts name it by."""
        return signed.digest_of(self.manifest)

    def source(self) -> Source:
        """Return the model that answers, or several that answer together."""
        folders = [self.folder / name for name in self.manifest.models]
        return answering_together([replace(open_source(folder), own=folder) for folder in folders])


def write_release(
    runs: Sequence[Path], site: str, out: Path, key: signing.PrivateKey, after: Release | None = None
) -> Release:
    """Write the folder, and return it as a hospital reads it. site: whose own model, where each hospital has one."""
    if out.exists():
        raise MedsiloError(f"{out.name} is there already; name another folder with -o", str(out))
    if after and after.lead != signing.public_text(key):
        raise MedsiloError("--after: that release was signed with another key; give its key with --key")
    sources = [open_source(run, site) for run in runs]
    committee = answering_together(sources)
    facts = [card_facts(source) for source in sources]
    try:
        names = [f"model-{number}" for number in range(1, len(runs) + 1)]
        for name, run, source in zip(names, runs, sources, strict=True):
            copy_model(run, source, out / name)
            write_card(source, out / name)
        if after:
            (out / CHANGES).write_text("\n".join(changes(after, committee, facts[0])) + "\n", "utf-8")
        manifest = ReleaseManifest(
            made=f"{datetime.now(UTC):%Y-%m-%d}",
            task=committee.plan.task.name,
            title=committee.plan.task.title,
            method=" and ".join(dict.fromkeys(fact["method_title"] for fact in facts)),
            metric=facts[0]["metric"],
            plan_hash=sources[0].plan.hash,
            package=PackageFacts(**package_facts()),
            expects=tuple(_expects(committee)),
            models=tuple(names),
            files=dict(signed.hashes_in(out, MANIFEST)),
            study=_scores(facts[0]) if len(facts) == 1 else {},
            after=after.hash if after else None,
        )
        signed.write_signed(out / MANIFEST, manifest, key)
        return Release.open(out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _scores(facts: dict[str, Any]) -> dict[str, Scored]:
    told = {site: own for site, own in facts["scores"].items() if own and own["score"] is not None}
    return {site: Scored(score=own["score"], cases=own["cases"]) for site, own in told.items()}


def _expects(source: Source) -> Iterator[str]:
    """Yield what a hospital's cases have to be."""
    task, goal = source.plan.task, source.plan.task.goal
    yield f"{task.title}: task {task.name}, {task.channels} channels or columns"
    if goal.label_names:
        yield f"labels, in order: {', '.join(goal.label_names)}"
    if source.spacing:
        yield "spacing of training images in mm: " + ", ".join(f"{low:g} to {high:g}" for low, high in source.spacing)


def changes(old: Release, source: Source, facts: dict[str, Any]) -> Iterator[str]:
    """Yield what is different from an earlier release, as people read it."""
    before = old.source()
    yield f"# What changed after release {old.hash[:12]} of {old.manifest.made}"
    yield ""
    mine, theirs = (dict(_flat(one.plan.resolved())) for one in (source, before))
    moved = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    yield from (f"- `{key}`: {theirs.get(key, 'not there')} before, {mine.get(key, 'not there')} now" for key in moved)
    if not moved:
        yield "- The plan is the same."
    now, then = _scores(facts), old.manifest.study
    for site in sorted(now.keys() | then.keys()):
        told = [f"{own[site].score:.3f}" if site in own else "not told" for own in (then, now)]
        yield f"- {site}: test {old.manifest.metric} {told[0]} before, {told[1]} now"


def _flat(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{name}.{key}" if name else key)
    else:
        yield name, values
