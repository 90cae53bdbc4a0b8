"""A release as `make release` writes it, with a key that is thrown away, and as `make verify-release` checks it."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen signs a release")


def small_wheel(folder: Path, name: str, *needs: str) -> Path:
    """Write a wheel of one empty module."""
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


def test_a_release_is_signed_and_every_change_is_noticed(root: Path, tmp_path: Path) -> None:
    place, dist = tmp_path / "packages", tmp_path / "dist"
    below = small_wheel(place, "below")
    small_wheel(place, "above", "below")
    wheel = small_wheel(dist, "medsilo")
    (tmp_path / "needs.txt").write_text("above==1.0\n")
    own, other = key(tmp_path, "own"), key(tmp_path, "other")
    signers = tmp_path / "signers"
    signers.write_text(f"maintainer {own.with_suffix('.pub').read_text()}")
    written = release(root, "write", dist, tmp_path / "needs.txt", own, place=place)
    assert written.returncode == 0, written.stderr
    lock = (dist / "requirements.lock").read_text()
    digest = hashlib.sha256(below.read_bytes()).hexdigest()
    assert [line.split("==")[0] for line in lock.splitlines()] == ["above", "below"]
    assert f"below==1.0 --hash=sha256:{digest}\n" in lock  # what nobody named is in it, too
    verified = release(root, "verify", dist, signers)
    assert verified.returncode == 0 and "2 files are what the maintainer signed" in verified.stdout

    for file in (wheel, dist / "requirements.lock", dist / "SHA256SUMS"):
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
