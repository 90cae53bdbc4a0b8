"""Receipts: what a hospital says of a released model, in its own steps, signed with its own key."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from medsilo.core.errors import MedsiloError
from medsilo.core.package import package_facts
from medsilo.core.section import Section
from medsilo.sealing import signed, signing
from medsilo_release.release_folder import Hash, PackageFacts, Release, Share, Word, today

MOST_RECEIPTS = 4096
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
    kept: Share | None = None  # how far promises were kept
    # That the model was at work; without one it is a validation
    month: Annotated[str, Field(pattern=r"^(\d{4}-(0[1-9]|1[0-2]))?$")] = ""
    alarms: Annotated[tuple[Word, ...], Field(max_length=64)] = ()


@dataclass
class Merged:
    """The receipts that count, by hospital, and those that don't, each with the reason."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    months: dict[str, dict[str, Receipt]] = field(default_factory=dict)  # by hospital and month
    keys: dict[str, str] = field(default_factory=dict)  # the fingerprint by hospital
    refused: dict[str, str] = field(default_factory=dict)  # by the file


def receipt_path(release: Release, hospital: str, folder: Path, month: str = "") -> Path:
    """Return where a receipt lies."""
    return folder / f"{'-'.join(filter(None, (hospital, release.hash[:12], month)))}.receipt"


def write_receipt(release: Release, hospital: str, path: Path, key: signing.PrivateKey, **told: Any) -> Path:
    """Write what a hospital tells of a release, and return where."""
    metric, package = release.manifest.metric, PackageFacts(**package_facts())
    receipt = Receipt(release=release.hash, hospital=hospital, made=today(), package=package, metric=metric, **told)
    signed.write_signed(path, receipt, key)
    return path


def merged(release: Release, files: Sequence[Path], known: Mapping[str, str] | None = None) -> Merged:
    """Read the receipts of a release. known: the fingerprint that each hospital's key must have; others are refused."""
    if len(files) > MOST_RECEIPTS:
        raise MedsiloError(f"{len(files)} receipts; give {MOST_RECEIPTS} at most")
    result, seen = Merged(), set[str]()
    by_hospital = defaultdict[tuple[str, str], list[tuple[str, Receipt, str]]](list)
    for path in sorted(files, key=lambda path: (path.name, path)):
        try:
            receipt, key = signed.read_signed(path, Receipt)
            told, by = signed.digest_of(receipt), signed.fingerprint(key)
            if receipt.release != release.hash:
                raise MedsiloError(f"it is of another release ({receipt.release[:12]})")
            if receipt.metric != release.manifest.metric:
                raise MedsiloError(f"it tells {receipt.metric[:40]}, and the release is measured by another")
            if known is not None and known.get(receipt.hospital) != by:
                raise MedsiloError(f"its key {by} is not the one that is known of {receipt.hospital}")
            if told in seen:
                raise MedsiloError("it is there twice")
            seen.add(told)
            by_hospital[receipt.hospital, receipt.month].append((str(path), receipt, by))
        except MedsiloError as error:
            result.refused[str(path)] = str(error)
    for (hospital, month), several in sorted(by_hospital.items()):
        if len(several) > 1:
            of = f" of {month}" if month else ""
            why = f"{hospital} has {len(several)} different receipts{of}; ask it which counts, and leave the others out"
            result.refused |= {path: why for path, _, _ in several}
        else:
            [(_, receipt, result.keys[f"{hospital} {month}".strip()])] = several
            (result.months.setdefault(hospital, {}) if month else result.receipts)[month or hospital] = receipt
    return result


def known_keys(path: Path) -> dict[str, str]:
    """Return the fingerprint of each hospital's key from lines "hospital fingerprint"."""
    try:
        lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"--keys cannot be read ({type(error).__name__})", str(path)) from error
    if wrong := next((number for number, line in enumerate(lines, 1) if len(line) != 2), None):
        raise MedsiloError(f"--keys: line {wrong} is not 'hospital fingerprint'", str(path))
    return {hospital: told.lower() for hospital, told in lines}
