"""`make image-buildah` builds an identical image each time; the image runs without root rights on a read-only file
system.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from medsilo import __version__

TOOLS = ("buildah", "git", "unshare")
missing = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing), reason=f"this machine has no {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the root folder"),
]
BASE = "localhost/medsilo-test-base"
LICENCES = "provisioning/containers/licences.csv"
OF_THE_BASE = {"pip", "setuptools", "wheel"}
LIGHT = ("typer", "rich", "pydantic", "PyYAML", "Jinja2", "psutil", "filelock", "cryptography", "numpy", "setuptools")
# options with which a build uses this machine's network, certificates and host names
HERE = "--isolation chroot --network host --volume /etc/ssl/certs:/etc/ssl/certs:ro "
HERE += "--volume /etc/resolv.conf:/etc/resolv.conf:ro"


def told(*command: object, **others: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **others)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout.strip()


def dockerfile(root: Path) -> str:
    return (root / "provisioning/containers/Dockerfile").read_text()


@pytest.fixture
def base(root: Path, tmp_path: Path) -> Iterator[str]:
    [own] = re.findall(r"(?m)^ARG BASE=(\S+)", dockerfile(root))
    if subprocess.run(["buildah", "pull", "--quiet", f"docker.io/library/{own}"], capture_output=True).returncode == 0:
        yield f"docker.io/library/{own}"
        return
    if not shutil.which("debootstrap"):
        pytest.skip(f"{own} can't be had here, and there is no debootstrap to make another base")
    system = tmp_path / "system"
    make = ["debootstrap", "--variant=minbase", "--include=python3-pip,python-is-python3", "bookworm", system]
    if subprocess.run(list(map(str, make)), capture_output=True).returncode:
        pytest.skip(f"neither {own} nor Debian's packages can be had here")
    (system / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    container = told("buildah", "from", "scratch")
    told("buildah", "copy", "--quiet", container, system, "/")
    told("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
    told("buildah", "commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(system)
    yield BASE
    subprocess.run(["buildah", "rmi", "--force", BASE], capture_output=True)


def without_torch(root: Path, place: Path) -> None:
    told("git", "clone", "--quiet", "--no-hardlinks", root, place)
    lock = place / "requirements.lock"
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", lock.read_text()))
    wanted = place / "light.txt"
    wanted.write_text("\n".join(f"{name}=={pins[name.lower()]}" for name in LIGHT))
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate"]
    told(*resolve, "--python-version", "3.11", wanted, "-o", lock)
    wanted.unlink()
    told("git", "-c", "user.name=a test", "-c", "user.email=test@example.org", "commit", "-qam", "Light", cwd=place)


def test_two_builds_are_alike_and_run_as_nobody_where_nothing_can_be_written(
    root: Path, tmp_path: Path, base: str
) -> None:
    place = tmp_path / "repository"
    without_torch(root, place)
    build = ["make", "image-buildah", f"BASE={base}", f"BUILDAH_ARGS={HERE}"]
    archives = []
    for name in ("one", "other"):
        told(*build, cwd=place)
        archives.append(shutil.move(place / "dist/medsilo.oci.tar", tmp_path / f"{name}.tar"))
    assert archives[0].read_bytes() == archives[1].read_bytes()
    config = config_of(archives[0])
    assert config["User"] == "10001:10001"
    image = (place / "dist/medsilo.image-id").read_text()
    container = told("buildah", "from", image)
    try:
        system = told("buildah", "mount", container)
        assert (Path(system) / "opt/medsilo/licences.csv").is_file()
        holds_what_its_bill_says(place, system)
        [check] = re.findall(r"(?m)^HEALTHCHECK .* CMD (.*)$", dockerfile(root))
        runs_where_nothing_can_be_written(system, config, json.loads(check))
    finally:
        told("buildah", "rm", container)
        told("buildah", "rmi", "--force", image)


def holds_what_its_bill_says(place: Path, system: str) -> None:
    """Assert that the image contains the packages in the bill of materials, and otherwise only pip."""
    bill = place / "dist/sbom.cdx.json"
    told(sys.executable, place / "provisioning/sbom.py", "write", "requirements.lock", LICENCES, bill, cwd=place)
    written = {(own["name"], own["version"]) for own in json.loads(bill.read_text())["components"]}
    held = json.loads(told("chroot", system, "python", "-m", "pip", "list", "--format", "json"))
    found = {(canonicalize_name(own["name"]), own["version"].partition("+")[0]) for own in held}
    assert written <= found and len(written) > len(LIGHT)
    assert {name for name, _ in found - written} <= {"medsilo", *OF_THE_BASE}


def config_of(archive: Path) -> dict:
    with tarfile.open(archive) as file:

        def read(name: str) -> dict:
            return json.load(file.extractfile(f"./{name}"))

        def blob(entry: dict) -> dict:
            return read(f"blobs/{entry['digest'].replace(':', '/')}")

        [manifest] = read("index.json")["manifests"]
        return blob(blob(manifest)["config"])["config"]


def runs_where_nothing_can_be_written(system: str, config: dict, health: list[str]) -> None:
    closed = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && mount -t tmpfs tmpfs "$1/tmp" && shift && "$@"'
    enter = ["unshare", "--mount", "--net", "sh", "-c", closed, "sh", system]
    enter += ["chroot", f"--userspec={config['User']}", system, "env", "-i", *config["Env"]]
    entry = config["Entrypoint"]
    assert told(*enter, *entry, "--version").split()[-1] == __version__
    assert "Install" in told(*enter, *entry, "docs", "start/install")
    own = subprocess.run(
        [*enter, "sh", "-c", "id -u; echo > /tmp/own; echo > /kit/own"], capture_output=True, text=True
    )
    assert own.stdout.split() == ["10001"] and "Read-only file system" in own.stderr and own.stderr.count("\n") == 1
    check = subprocess.run([*enter, *health], capture_output=True, text=True)
    assert check.returncode == 1 and "Traceback" not in check.stderr and "kit" in check.stderr + check.stdout
