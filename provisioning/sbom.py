"""The software of the container image: the licence of each package in the lock files, and a bill of materials in
CycloneDX.

    python provisioning/sbom.py licences REPORT LICENCES      # make lock; REPORT is pip's, of both locks
    python provisioning/sbom.py write LOCK LICENCES BILL      # make sbom

LICENCES is provisioning/containers/licences.csv, which is also part of the image. Neither LICENCES nor BILL contains
packages that only another system or another Python version needs.
"""

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.spdx import fixup_id, is_expression
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name
from pip_requirements_parser import RequirementsFile

from medsilo import __version__

COLUMNS = ("name", "version", "licence")
IMAGE = {"python_version": "3.11", "python_full_version": "3.11.14", "sys_platform": "linux"}
IMAGE |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython", "implementation_name": "cpython"}
# maximum number of characters in the name of a licence; a longer text is taken for the full text of the licence
LONGEST = 80
SILENT = "not told by the package"


def licences(report: Path, table: Path) -> None:
    told = json.loads(report.read_text("utf-8"))
    if int(told["pip_version"].partition(".")[0]) < 25:
        sys.exit(f"pip {told['pip_version']} reports no licence's expression; nothing is written: take pip 25 or newer")
    found = [own["metadata"] for own in told["install"]]
    rows = sorted((canonicalize_name(own["name"]), own["version"].partition("+")[0], licence_of(own)) for own in found)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def licence_of(told: Mapping[str, Any]) -> str:
    """Return the name of the licence in a package's metadata: an SPDX expression if the metadata has one, otherwise
    words.
    """
    words = told.get("license", "").strip()
    named = [own.rpartition(" :: ")[2] for own in told.get("classifier", ()) if own.startswith("License :: OSI")]
    short = words if len(words) <= LONGEST and "\n" not in words else ""
    return told.get("license_expression") or fixup_id(short) or "; ".join(named) or short or SILENT


def write(lock: Path, table: Path, bill: Path) -> None:
    """Write the packages in the image's lock file with hashes and licences, and check the result with CycloneDX's
    schema.
    """
    with table.open(newline="", encoding="utf-8") as file:
        known = {(row["name"], row["version"]): row["licence"] for row in csv.DictReader(file)}
    pinned = RequirementsFile.from_file(str(lock)).requirements
    names = {(own.name, own.get_pinned_version) for own in pinned if not own.marker or own.marker.evaluate(IMAGE)}
    if unknown := sorted(" ".join(own) for own in names - known.keys()):
        sys.exit(f"{table.name} has no licence of {', '.join(unknown)}; say make lock")
    found = made(lock)
    found["components"] = [own for own in found["components"] if (own["name"], own["version"]) in names]
    for own in found["components"]:
        own["licenses"] = [licence_in(known[own["name"], own["version"]])]
        del own["description"]  # CycloneDX's description of a package is only the package's line in the lock file
    refs = {own["bom-ref"] for own in (found["metadata"]["component"], *found["components"])}
    found["dependencies"] = [own for own in found["dependencies"] if own["ref"] in refs]
    found["metadata"]["component"]["version"] = __version__
    text = json.dumps(found, indent=1, sort_keys=True)
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the bill is not as CycloneDX has it, and is not written: {wrong}")
    bill.write_text(text, "utf-8")


def made(lock: Path) -> dict[str, Any]:
    """Return the bill of materials that CycloneDX's tool makes from a lock file, without licences."""
    about = ["--pyproject", "pyproject.toml", "--spec-version", "1.6", "--output-reproducible", str(lock)]
    command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", *about]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def licence_in(told: str) -> dict[str, Any]:
    if known := fixup_id(told):
        return {"license": {"id": known}}
    return {"expression": told} if is_expression(told) else {"license": {"name": told}}


if __name__ == "__main__":
    ways = {"licences": licences, "write": write}
    if len(sys.argv) < 4 or sys.argv[1] not in ways:
        sys.exit(__doc__)
    ways[sys.argv[1]](*map(Path, sys.argv[2:]))
