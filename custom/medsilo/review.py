"""A folder that a hospital can review: what is installed, and what leaves under each job."""

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from medsilo.check.leaks import describe, leaks, told_besides
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json, write_text
from medsilo.core.package import package_facts
from medsilo.core.text import plain, size_text
from medsilo.plan import Plan
from medsilo.report.findings import Answer, Notice
from medsilo.report.template import fill, save
from medsilo.runs.paths import PUBLISHED
from medsilo.site.settings import SiteSettings

PAGE, PACKAGES, REPORTS = "index.html", "packages.json", "leak-reports"
LIMITS = (
    "NVFlare, PyTorch and all packages in the list are trusted; sbom.cdx.json is for your own scanner.",
    "Whoever administers a machine reads all that lies on it.",
    "What a hospital's own settings allow is not in this folder: medsilo check and medsilo leak-report --kit say it.",
)
OWN = "medsilo"
UNKNOWN = "not stated"
LONGEST_LICENCE = 60  # characters; a longer text is the licence itself
SBOM, SBOM_TOOL = "sbom.cdx.json", "cyclonedx_py"
SBOM_LIMIT = 600  # seconds


@dataclass(frozen=True)
class InstalledPackage:
    """One installed package."""

    name: str
    version: str
    licence: str
    hash: str  # SHA-256 over its RECORD, which has the SHA-256 of each of its files


def installed() -> list[InstalledPackage]:
    """Return all packages of this Python, in the order of their names; of two of a name the one that is imported."""
    found: dict[str, InstalledPackage] = {}
    for own in metadata.distributions():
        name = own.metadata["Name"]
        if name and name.lower() not in found:
            found[name.lower()] = InstalledPackage(name, own.version, licence_of(own.metadata), _hash(own, name))
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


def without_licence(packages: list[InstalledPackage]) -> Iterator[str]:
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


# ---------------------------------------------------------------------------------------------------- what travels
@dataclass(frozen=True)
class Flow:
    """One thing that a party sends to another under a job."""

    job: str
    sender: str
    receiver: str
    what: str
    when: str
    bytes: int | None

    @property
    def size(self) -> str:
        """Return the bytes a round in words, where they are known."""
        return "" if self.bytes is None else f"{size_text(self.bytes)} a round"


def flows(plans: Mapping[str, Plan]) -> list[Flow]:
    """Return who sends what to whom, from the list by which hospitals send."""
    found = []
    for name, plan in plans.items():
        for leak in leaks(plan):
            found.append(Flow(name, "hospital", "server", leak.group, f"rounds {leak.when}", leak.bytes))
        for stretch in plan.course.stretches():
            rounds = f"rounds {stretch.first} to {stretch.last}"
            found += (Flow(name, "server", "hospital", group.name, rounds, None) for group in stretch.phase.given)
        delivered = [group.name for group in plan.course.delivery.given]
        found += (Flow(name, "server", "hospital", group, "at the end", None) for group in delivered)
        found += (Flow(name, "hospital", "server", line, "see the report", None) for line in told_besides(plan))
    if plans:
        numbers = "cases of each part, losses, scores and counts, seconds, memory, medsilo's version and hash"
        found.append(Flow("every job", "hospital", "server", numbers, "every round and at the end", None))
        found.append(Flow("every job", "server", "lead", ", ".join(PUBLISHED), "when the job ends", None))
    return found


# ---------------------------------------------------------------------------------------------------- the folder
def write_evidence(folder: Path, plans: Mapping[str, Plan]) -> Path:
    """Write the list of packages, the leak report of each plan, and a page about both; return where the page is."""
    packages, build = installed(), package_facts()
    write_json(folder / PACKAGES, [vars(own) for own in packages])
    for name, plan in plans.items():
        unknown = dict.fromkeys(plan.participation.sites, "no data were read")
        write_text(folder / REPORTS / f"{name}.txt", "\n".join(describe(plan, unknown, SiteSettings())) + "\n")
    page = fill(
        "evidence.html",
        f"Evidence for a review of medsilo {build['version']}",
        context=f"Build {build['hash']}",
        answer=Answer(
            f"{len(plans)} jobs: what leaves a hospital under each, and the {len(packages)} packages it runs."
        ),
        notices=_notices(plans, list(without_licence(packages))),
        checks=[],
        limits=LIMITS,
        flows=flows(plans),
        reports={name: f"{REPORTS}/{name}.txt" for name in plans},
        packages=[(own.name, own.version, own.licence, own.hash) for own in packages],
    )
    return save(page, folder / PAGE)


def _notices(plans: Mapping[str, Plan], unlicensed: Sequence[str]) -> list[Notice]:
    found = []
    if not plans:
        found.append(
            Notice("missing", "No job was given", "So nothing is said of what leaves. Give jobs to the command.")
        )
    if unlicensed:
        found.append(Notice("caution", "No licence stated", ", ".join(unlicensed)))
    return found
