"""The packages that are installed: version, licence, and a hash over what each says of its own files."""

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.package import package_facts
from medsilo.core.text import plain

OWN = "medsilo"
UNKNOWN = "not stated"
LONGEST_LICENCE = 60  # characters; a longer text is the licence itself
SBOM, SBOM_TOOL = "sbom.cdx.json", "cyclonedx_py"
SBOM_LIMIT = 600  # seconds


@dataclass(frozen=True)
class Installed:
    """One installed package."""

    name: str
    version: str
    licence: str
    hash: str  # SHA-256 over its RECORD, which has the SHA-256 of each of its files


def installed() -> list[Installed]:
    """Return all packages of this Python, in the order of their names; of two of a name the one that is imported."""
    found: dict[str, Installed] = {}
    for own in metadata.distributions():
        name = own.metadata["Name"]
        if name and name.lower() not in found:
            found[name.lower()] = Installed(name, own.version, licence_of(own.metadata), _hash(own, name))
    return [found[name] for name in sorted(found)]


def licence_of(facts: metadata.PackageMetadata) -> str:
    """Return a package's licence, as it states it in any of three ways."""
    stated, short = ("".join(facts.get_all(key) or ()) for key in ("License-Expression", "License"))
    classes = [line.rpartition("::")[2].strip() for line in facts.get_all("Classifier") or () if "License ::" in line]
    if not stated and short and len(short) <= LONGEST_LICENCE and short.upper() != "UNKNOWN":
        stated = short
    return plain(stated or ", ".join(classes) or UNKNOWN)


def _hash(own: metadata.Distribution, name: str) -> str:
    if name.lower() == OWN:
        return package_facts()["hash"]
    record = own.read_text("RECORD")
    return hashlib.sha256(record.encode()).hexdigest() if record else UNKNOWN


def without_licence(packages: list[Installed]) -> Iterator[str]:
    """Yield the packages that state no licence."""
    yield from (own.name for own in packages if own.licence == UNKNOWN)


def write_sbom(path: Path) -> None:
    """Write the CycloneDX list of this Python's packages, which its own tool makes and checks."""
    if importlib.util.find_spec(SBOM_TOOL) is None:
        raise MedsiloError("the list of packages (SBOM) needs a package: pip install 'medsilo[evidence]'")
    command = [sys.executable, "-m", SBOM_TOOL, "environment", "--output-reproducible", "--output-format", "JSON"]
    done = subprocess.run(
        [*command, "--output-file", str(path), sys.executable],
        capture_output=True,
        text=True,
        timeout=SBOM_LIMIT,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise MedsiloError(f"cyclonedx-py could not list the packages: {plain(said[-1])}", private=done.stderr)
