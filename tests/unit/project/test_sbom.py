"""Each package in the image's lock files has a known licence, and the bill of materials lists all these packages."""

import csv
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

from medsilo import __version__

LOCK, TABLE = "requirements.lock", "provisioning/containers/licences.csv"


def pinned(lock: Path, root: Path) -> dict[tuple[str, str], set[str]]:
    [version] = re.findall(r"(?m)^ARG BASE=python:([\d.]+)-", (root / "provisioning/containers/Dockerfile").read_text())
    image = {"python_full_version": version, "sys_platform": "linux", "platform_machine": "x86_64"}
    image |= {"platform_python_implementation": "CPython", "implementation_name": "cpython"}
    found = {}
    for entry in re.findall(r"(?m)^([a-z][^\n]*)((?:\n +--hash=.*)+)", lock.read_text()):
        own = Requirement(entry[0].rstrip(" \\"))
        if own.marker is None or own.marker.evaluate(image):
            [one] = own.specifier
            found[own.name, one.version] = set(re.findall(r"sha256:(\w{64})", entry[1]))
    return found


def ran(root: Path, *given: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "provisioning/sbom.py", *map(str, given)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "custom"})


def test_the_image_holds_the_licence_of_each_package_that_the_locks_pin(root: Path) -> None:
    containers = root / "provisioning/containers"
    rows = list(csv.DictReader((root / TABLE).open(encoding="utf-8")))
    assert {(row["name"], row["version"]) for row in rows} == {
        *pinned(root / LOCK, root),
        *pinned(containers / "kubernetes.lock", root),
    }
    assert all(row["licence"] for row in rows) and len(rows) > 90
    assert f"COPY requirements.lock {TABLE}" in (containers / "Dockerfile").read_text()
    assert f"!{TABLE}" in (containers / "Dockerfile.dockerignore").read_text().splitlines()


@pytest.mark.long
def test_the_bill_names_every_package_of_the_lock_with_hashes_and_licence(root: Path, tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        done = ran(root, "write", LOCK, TABLE, tmp_path / name)
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "one.json").read_text()
    assert text == (tmp_path / "two.json").read_text()  # the bill of materials contains neither times nor random values
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill, names = json.loads(text), pinned(root / LOCK, root)
    assert {(own["name"], own["version"]) for own in bill["components"]} == names.keys()
    for own in bill["components"]:
        told = {one["content"] for place in own["externalReferences"] for one in place.get("hashes", ())}
        assert told == names[own["name"], own["version"]] and own["purl"].startswith("pkg:pypi/")
        assert own["licenses"]
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == ("medsilo", __version__)
    licences = {own["name"]: own["licenses"] for own in bill["components"]}
    assert licences["monai"] and {"license": {"id": "Apache-2.0"}} in licences["requests"]

    lock = tmp_path / LOCK
    lock.write_text((root / LOCK).read_text() + "unheard-of==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    refused = ran(root, "write", lock, TABLE, tmp_path / "three.json")
    assert refused.returncode == 1 and "unheard-of 1.0" in refused.stderr and "make lock" in refused.stderr
    assert not (tmp_path / "three.json").exists() and "Traceback" not in refused.stderr


def test_a_licence_is_what_a_package_tells(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root / "provisioning")
    sbom = import_module("sbom")

    def found(pip: str = "25.0", **told: object) -> list[str]:
        report, table = tmp_path / "report.json", tmp_path / "licences.csv"
        metadata = {"name": "A_b", "version": "1.0+cpu", **told}
        report.write_text(json.dumps({"pip_version": pip, "install": [{"metadata": metadata}]}))
        sbom.licences(report, table)
        return table.read_text().splitlines()[1:]

    by_class, closed = ["License :: OSI Approved :: BSD License"], ["License :: Other/Proprietary License"]
    assert found(license_expression="MIT", license="Other", classifier=by_class) == ["a-b,1.0,MIT"]
    assert found(license="BSD", classifier=by_class) == ["a-b,1.0,BSD License"]
    assert found(license="LicenseRef-Own", classifier=closed) == ["a-b,1.0,LicenseRef-Own"]
    assert found(license="Copyright\n" * 9, classifier=by_class) == ["a-b,1.0,BSD License"]
    assert found(license="Copyright\n" * 9) == ["a-b,1.0,not told by the package"]
    with pytest.raises(SystemExit, match=r"23\.2\.1.* take pip 25"):
        found(pip="23.2.1", license="MIT")
