"""Receipts: what a hospital says of a released model, in its own steps, signed with its own key."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from medsilo.core.package import ENGINE, facts_of
from medsilo.core.section import Section
from medsilo.site import signed, signing
from medsilo_lab.release.release_folder import Hash, PackageFacts, Release, Share, Word, today

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
Hospital = Annotated[str, Field(pattern=NAME)]
Count = Annotated[int, Field(ge=0, le=10**9)]


class Receipt(Section):
    """One hospital's word on one release."""

    release: Hash
    hospital: Hospital
    made: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    package: PackageFacts  # that tested it
    metric: Word
    score: Share | None  # None: fewer test cases than the hospital tells a score of
    cases: Count | None  # in the hospital's steps


def receipt_path(release: Release, hospital: str, folder: Path) -> Path:
    """Return where a receipt lies."""
    return folder / f"{hospital}-{release.hash[:12]}.receipt"


def write_receipt(release: Release, hospital: str, path: Path, key: signing.PrivateKey, **told: Any) -> Path:
    """Write what a hospital tells of a release, and return where."""
    metric, package = release.manifest.metric, PackageFacts(**facts_of(ENGINE))
    receipt = Receipt(release=release.hash, hospital=hospital, made=today(), package=package, metric=metric, **told)
    signed.write_signed(path, receipt, key)
    return path
