"""`make release` writes a release and signs it with a temporary key, and `make verify-release` checks the release."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen signs a release")


def small_wheel(folder: Path, name: str, *needs: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def key(folder: Path, name: str) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
    subprocess.run(command, check=True)
    return folder / name


def release(root: Path, *given: Path | str, place: Path | None = None) -> subprocess.CompletedProcess[str]:
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place)}
    command = [sys.executable, "provisioning/release.py", *map(str, given)]
    return subprocess.run(command, cwd=root, env=offline, capture_output=True, text=True)


OFFLINE = ["unshare", "--map-root-user", "--net"]  # a network namespace in which no other machine is reachable
needs_a_namespace = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OFFLINE, "true"], capture_output=True).returncode != 0,
    reason="this account may make no network namespace",
)


def installed_offline(folder: Path, house: Path) -> Path:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    install = ["pip", "install", "--quiet", "--no-index", "--find-links", house, "--require-hashes", "-r"]
    for command in (
        [sys.executable, "-m", "venv", folder],
        [folder / "bin/python", "-m", *install, house / "requirements.lock"],
    ):
        done = subprocess.run([*OFFLINE, *map(str, command)], env=bare, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.mark.long
@needs_a_namespace
def test_a_wheelhouse_is_installed_without_a_network_and_only_as_it_was_made(root: Path, tmp_path: Path) -> None:
    place, dist = tmp_path / "packages", tmp_path / "dist"
    small_wheel(place, "below")
    small_wheel(place, "above", "below")
    small_wheel(dist, "own", "above")
    (tmp_path / "needs.txt").write_text("above==1.0\n")
    made = release(root, "wheelhouse", dist, tmp_path / "needs.txt", place=place)
    assert made.returncode == 0, made.stderr
    shutil.rmtree(place)
    programs = installed_offline(tmp_path / "venv", dist / "wheelhouse")
    subprocess.run([programs / "python", "-c", "import own, above, below"], check=True)
    small_wheel(dist / "wheelhouse", "below", "evil")
    with pytest.raises(AssertionError, match="hash"):
        installed_offline(tmp_path / "other", dist / "wheelhouse")


@pytest.mark.long
@needs_a_namespace
def test_medsilo_runs_without_a_network_from_its_wheelhouse(root: Path, tmp_path: Path) -> None:
    """The wheelhouse contains only small requirements, because torch and other large packages take gigabytes."""
    light = ("typer", "rich", "pydantic", "PyYAML", "Jinja2", "psutil", "filelock", "cryptography", "numpy")
    pins = [line for line in (root / "custom/medsilo/tested.txt").read_text().splitlines() if line.startswith(light)]
    (tmp_path / "light.txt").write_text("\n".join(pins))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    for part in ("custom", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (root / part).is_dir() else shutil.copy)(root / part, tmp_path / "source" / part)
    project = tmp_path / "source/pyproject.toml"
    needs = re.subn(r"(?ms)^dependencies = \[.*?^\]", f"dependencies = {json.dumps(pins)}", project.read_text())
    assert needs[1] == 1
    project.write_text(needs[0])
    subprocess.run([*build, tmp_path / "dist", tmp_path / "source"], check=True, capture_output=True)
    command = [sys.executable, "provisioning/release.py", "wheelhouse", tmp_path / "dist", tmp_path / "light.txt"]
    made = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    if made.returncode:
        pytest.skip("the packages can't be had here")
    programs = installed_offline(tmp_path / "venv", tmp_path / "dist/wheelhouse")
    (tmp_path / "runs").mkdir()
    for words in (["--help"], ["prune", "runs"]):
        command = [*OFFLINE, programs / "medsilo", *words]
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_release_is_signed_and_every_change_is_noticed(root: Path, tmp_path: Path) -> None:
    place, dist = tmp_path / "packages", tmp_path / "dist"
    below = small_wheel(place, "below")
    small_wheel(place, "above", "below")
    wheel, lab = small_wheel(dist, "medsilo"), small_wheel(dist, "medsilo_lab")
    (tmp_path / "needs.txt").write_text("above==1.0\n")
    own, other = key(tmp_path, "own"), key(tmp_path, "other")
    signers = tmp_path / "signers"
    signers.write_text(f"maintainer {own.with_suffix('.pub').read_text()}")
    written = release(root, "write", dist, tmp_path / "needs.txt", own, place=place)
    assert written.returncode == 0, written.stderr
    lock = (dist / "requirements.lock").read_text()
    digest = hashlib.sha256(below.read_bytes()).hexdigest()
    assert [line.split("==")[0] for line in lock.splitlines()] == ["above", "below"]
    assert f"below==1.0 --hash=sha256:{digest}\n" in lock
    verified = release(root, "verify", dist, signers)
    assert verified.returncode == 0 and f"install --no-deps {wheel.name} {lab.name}\n" in verified.stdout

    for file in (wheel, lab, dist / "requirements.lock", dist / "SHA256SUMS"):
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        changed = release(root, "verify", dist, signers)
        assert changed.returncode == 1 and file.name in changed.stderr and "install nothing of it" in changed.stderr
        file.write_bytes(before)
    added = small_wheel(dist, "evil")
    assert "evil-1.0" in release(root, "verify", dist, signers).stderr
    added.unlink()
    assert release(root, "verify", dist, signers).returncode == 0
    release(root, "write", dist, tmp_path / "needs.txt", other, place=place)
    assert "not signed by the maintainer" in release(root, "verify", dist, signers).stderr
    (dist / "SHA256SUMS").unlink()
    for given, said in (
        (("verify", dist, signers), "SHA256SUMS: missing, so nothing can be verified"),
        (("verify", dist), "make verify-release"),
        (("write", dist, tmp_path / "needs.txt", tmp_path / "nowhere"), "could not be signed with nowhere"),
    ):
        refused = release(root, *given, place=place)
        assert refused.returncode == 1 and said in refused.stderr and "Traceback" not in refused.stderr
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("elsewhere==1.0\n")
    offline = release(root, "write", dist, unknown, own, place=place)
    assert offline.returncode == 1 and offline.stderr.splitlines()[-1].endswith("nothing is signed")


def test_a_tag_is_signed_when_the_checkout_is_ready_for_a_release(root: Path, tmp_path: Path) -> None:
    checkout, own = tmp_path / "checkout", key(tmp_path, "own")
    checkout.mkdir()
    for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(root / name, checkout)
    (tmp_path / "signers").write_text(f"maintainer {own.with_suffix('.pub').read_text()}")

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        person = ["-c", "user.name=A. Person", "-c", "user.email=person@example.org"]
        trusted = ["-c", f"gpg.ssh.allowedSignersFile={tmp_path / 'signers'}"]
        return subprocess.run(["git", *person, *trusted, *words], cwd=checkout, capture_output=True, text=True)

    def tag(by: Path = own) -> subprocess.CompletedProcess[str]:
        return release(root, "tag", checkout, by)

    assert git("init", "--quiet").returncode == 0
    for name in ("user.name", "user.email"):
        git("config", name, "person@example.org")
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    refused = tag()
    assert refused.returncode == 1 and not git("tag").stdout
    for said in ("can't be tagged yet", "CHANGELOG.md: ", "replace each FILL-IN", "git: commit all changes"):
        assert said in refused.stderr

    for name, before, after in (
        ("CHANGELOG.md", "(not released yet)", "(2027-01-31)"),
        ("CITATION.cff", ": FILL-IN", ": Person"),
        ("CITATION.cff", "orcid.org/FILL-IN", "orcid.org/0000-0002-1825-0097"),
    ):
        text = (checkout / name).read_text()
        assert before in text
        (checkout / name).write_text(text.replace(before, after))
    git("add", ".")
    git("commit", "--quiet", "--message", "Release")
    assert "could not be signed with nowhere" in tag(tmp_path / "nowhere").stderr
    made = tag()
    assert made.returncode == 0 and f"git push origin v{version}" in made.stdout, made.stderr
    assert git("verify-tag", f"v{version}").returncode == 0
    assert "a tag never moves" in tag().stderr
    (tmp_path / "signers").write_text(f"maintainer {key(tmp_path, 'other').with_suffix('.pub').read_text()}")
    assert git("verify-tag", f"v{version}").returncode != 0
