"""A record as it is filed: of a study at one hospital, by the key of its kit or one made beside its medsilo.yaml."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import Field

from medsilo.check import demands
from medsilo.check.at_home import KitAtHome
from medsilo.cli import options
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_bytes
from medsilo.core.section import Section
from medsilo.flare.jobs import plan_of, scope_of
from medsilo.plan import Plan
from medsilo.sealing import signed, signing
from medsilo.site.policy import Policy
from medsilo.site.settings import SiteSettings
from medsilo_record import bom, linked, officer_pages, outcomes
from medsilo_record.comparing import FILE, Filed
from medsilo_record.facts import Case, RecordEntry, record_of

OWN_KEY = "record.key"  # beside the medsilo.yaml of a hospital without a kit
SIGNATURE = "signature.json"


def on_page(kit: Path, plan: str) -> dict[str, bytes]:
    """Return all files of the record of a plan that asked, and one that has them all."""
    case, signer = case_of(plan, [], None, kit, "")
    entries = record_of(case)
    with TemporaryDirectory() as place:
        write_signed(Path(place), files_in(case, entries, Filed.of(case, entries), None), signer)
        files = {path.name: path.read_bytes() for path in sorted(Path(place).iterdir())}
    return {"record.zip": officer_pages.undated_zip(files), **files}


def files_in(case: Case, entries: Sequence[RecordEntry], filed: Filed, run: Path | None) -> dict[str, bytes]:
    """Return all files of a record by name. run: of the plan."""
    texts = {
        "record.html": officer_pages.as_html(case, entries),
        "record.jsonld": linked.as_jsonld(case, entries),
        "model.cdx.json": bom.as_cyclonedx(case, run),
        "outcomes.csv": outcomes.outcomes_csv(case.lacks),
        "record.json": filed.written(),
    }
    try:
        texts["dataset.ttl"], document = linked.as_turtle(case, entries), officer_pages.as_docx(case, entries)
    except ImportError as error:
        raise MedsiloError("a record needs more packages: pip install 'medsilo[record]'") from error
    return {**{name: text.encode() for name, text in texts.items()}, "record.docx": document}


def case_of(
    plan: str, changes: list[str], local: Path | None, kit: Path | None, site: str
) -> tuple[Case, signing.PrivateKey | signing.UseKey]:
    """Return the study at this hospital, and the key that signs."""
    if bool(local) == bool(kit) or (kit and site):
        raise MedsiloError("whose record? give --kit KIT, or --settings FOLDER with --site SITE")
    if kit:
        home = KitAtHome.read(kit)
        asked = home.approvals.asked(plan.lower()) if len(plan) >= 8 else []
        study, scope = (home.plan_of(asked[0]), None) if asked else _plan(plan, changes, home.settings)
        key: signing.PrivateKey | signing.UseKey = home.files.key_for("record")
        policy = Policy.read(home.local, scope)
        case = Case(study, home.settings, policy, home.kit.name, home)
    else:
        folder = options.folder_of_settings(local.parent if local and local.is_file() else local)
        assert folder
        settings = SiteSettings.read(folder)
        study, scope = _plan(plan, changes, settings)
        key = signing.own_key(folder / OWN_KEY, "this hospital's records")
        case = Case(study, settings, Policy.read(folder, scope), site)
    everyone = study.participation.everyone
    if case.site and everyone and case.site not in everyone:
        raise MedsiloError(f"{case.site} is not in this plan, which names {', '.join(everyone)}")
    return replace(case, counts=_counts(case)), key


def _plan(given: str, changes: list[str], settings: SiteSettings) -> tuple[Plan, str | None]:
    """Return a plan, and the privacy scope that its job asks for."""
    plan = plan_of(given, changes, allowed=settings.packages)
    return plan, None if Path(given).is_file() else scope_of(given)


def _counts(case: Case) -> dict[str, int]:
    """Return the hospital's cases and patients, all parts together; nothing where they can't be read."""
    plan, source = case.plan, demands.source_of(case.plan, case.settings, None)
    if source and not case.synthetic:
        with suppress(MedsiloError):
            parts = plan.task.survey(case.site, plan.participation.everyone, plan.seed, source).parts.values()
            return {what: sum(getattr(part, what) for part in parts) for what in ("cases", "patients")}
    return {}


def old_record(case: Case, given: str) -> Filed:
    """Return an earlier record, or that of another plan at this hospital."""
    if (Path(given) / FILE).is_file():
        return Filed.read(Path(given))
    other = replace(case, plan=_plan(given, [], case.settings)[0])
    return Filed.of(other, record_of(other))


# ---------------------------------------------------------------------------------------------------- the signature
class RecordFiles(Section):
    """The SHA-256 of each file of a record."""

    files: dict[Annotated[str, Field(pattern=r"^[a-z][a-z.]{0,40}$")], str]


def write_signed(folder: Path, files: Mapping[str, bytes], key: signing.PrivateKey | signing.UseKey) -> str:
    """Write files and the signature over them, and return the key's fingerprint."""
    for name, content in files.items():
        write_bytes(folder / name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    return signed.write_signed(folder / SIGNATURE, RecordFiles(files=digests), key)


def verify(folder: Path, expected: str) -> int:
    """Return how many files are as this key signed them; raises MedsiloError with what is wrong."""
    told, key = signed.read_signed(folder / SIGNATURE, RecordFiles)
    signed.check_files(folder, told.files, SIGNATURE)
    if (signer := signed.fingerprint(key)) != expected.strip().lower():
        whose = "it is not the one given; " if expected else ""
        raise MedsiloError(f"the key {signer} signed it; {whose}ask the hospital for its key, and give that with --key")
    return len(told.files)
