"""Write and verify a release: the signed tag, the wheels, the hashes of all packages that they need, and the
maintainer's signature.

    python provisioning/release.py tag . KEY                           # make tag KEY=...
    python provisioning/release.py write dist requirements.txt KEY     # make release KEY=...
    python provisioning/release.py verify dist SIGNERS                 # make verify-release SIGNERS=...
    python provisioning/release.py wheelhouse dist requirements.txt    # make wheelhouse

The command wheelhouse collects the wheels and all packages that they need in one folder. Machines without a network can
install from the folder if their Python, system and processor are the same as on this machine.

KEY is a private key made by ssh-keygen. SIGNERS is a file of lines "maintainer ssh-ed25519 ...", which the person who
verifies a release must have received by another channel. This program installs no package.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

SUMS, LOCK, SPACE, WHO = "SHA256SUMS", "requirements.lock", "medsilo-release", "maintainer"
PLACEHOLDER = "FILL-IN"  # placeholder in CITATION.cff for facts that only the authors know


def tag(checkout: Path, key: Path) -> None:
    """Sign the tag of this version with an SSH key. If the checkout is not ready for a release, exit with the
    reasons.
    """
    version = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if open_points := [*_open_points(checkout, version)]:
        sys.exit("\n".join((f"v{version} can't be tagged yet:", *open_points)))
    signed = ["-c", "gpg.format=ssh", "-c", f"user.signingkey={key.resolve()}", "tag", "--sign"]
    _git(checkout, *signed, "--message", f"medsilo {version}", f"v{version}")
    if "BEGIN SSH SIGNATURE" not in _git(checkout, "cat-file", "tag", f"v{version}").stdout:
        _git(checkout, "tag", "--delete", f"v{version}")  # git 2.39 makes an unsigned tag if the key cannot be read
        sys.exit(f"v{version} could not be signed with {key.name}; give a private key of ssh-keygen's")
    print(f"v{version} is signed. Push the tag: git push origin v{version}")


def _open_points(checkout: Path, version: str) -> Iterator[str]:
    """Yield the steps that a person must take before a version can be tagged."""
    changes, cited = ((checkout / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    if not re.search(rf"(?m)^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes):
        yield f"CHANGELOG.md: give the heading the date of the release, as in '## {version} (2027-01-31)'"
    if re.search(rf"(?m)^[^#\n]*{PLACEHOLDER}", cited):  # the file's comment names the placeholder, too
        yield f"CITATION.cff: replace each {PLACEHOLDER} by what is true of the authors"
    if not re.search(rf"(?m)^version: {re.escape(version)}$", cited):
        yield f"CITATION.cff: the version is not {version}"
    if _git(checkout, "status", "--porcelain").stdout:
        yield "git: commit all changes"
    if _git(checkout, "tag", "--list", f"v{version}").stdout:
        yield f"git: v{version} exists, and a tag never moves; raise the version in pyproject.toml"


def _git(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=checkout, stdout=subprocess.PIPE, text=True)


def locked(requirements: Path) -> str:
    """Return a line for every required package: the package's version, and the hash of the file that pip selects."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = ["--dry-run", "--ignore-installed", "--quiet", "--report", report, "--requirement", requirements]
        if subprocess.run([sys.executable, "-m", "pip", "install", *asked]).returncode:
            sys.exit(
                "pip found no file for each package, which needs a network or a folder of wheels; nothing is signed"
            )
        found = json.loads(report.read_text("utf-8"))["install"]
    lines = []
    for own in found:
        name, version = own["metadata"]["name"], own["metadata"]["version"]
        digest = own["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return "".join(sorted(lines, key=str.lower))


def write(dist: Path, requirements: Path, key: Path) -> None:
    """Write the list of locked packages and the list of checksums into the folder of the wheels; sign the list of
    checksums.
    """
    (dist / LOCK).write_text(locked(requirements), "utf-8")
    files = [*sorted(dist.glob("*.whl")), dist / LOCK]
    if len(files) != 3:
        sys.exit(f"{dist} has {len(files) - 1} wheels; a release has two, medsilo and medsilo-lab: make clean")
    (dist / SUMS).write_text("".join(f"{digest(file)}  {file.name}\n" for file in files), "utf-8")
    (dist / f"{SUMS}.sig").unlink(missing_ok=True)
    if subprocess.run(["ssh-keygen", "-Y", "sign", "-q", "-f", key, "-n", SPACE, dist / SUMS]).returncode:
        sys.exit(f"{SUMS} could not be signed with {key.name}; give a private key of ssh-keygen's")


def wheelhouse(dist: Path, requirements: Path) -> None:
    """Write a folder with the wheels of medsilo, the built wheels of all packages that medsilo needs, and the hashes of
    all wheels.
    """
    house = dist / "wheelhouse"
    shutil.rmtree(house, ignore_errors=True)
    house.mkdir()
    collect = ["wheel", "--quiet", "--wheel-dir", str(house), "--requirement", str(requirements)]
    subprocess.run([sys.executable, "-m", "pip", *collect], check=True)
    for own in dist.glob("*.whl"):
        shutil.copy(own, house)
    wheels = sorted(house.glob("*.whl"), key=lambda file: file.name.lower())
    named = ["{}=={}".format(*wheel.name.split("-")[:2]) for wheel in wheels]
    lines = [f"{name} --hash=sha256:{digest(wheel)}\n" for name, wheel in zip(named, wheels, strict=True)]
    (house / LOCK).write_text("".join(lines), "utf-8")
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{house}: {len(wheels)} packages, {size:,} bytes. Copy it to the machine without a network, and there")
    print(f"pip install --no-index --find-links wheelhouse --require-hashes -r wheelhouse/{LOCK}")


def verify(dist: Path, signers: Path) -> None:
    """Exit with an error message unless the maintainer signed exactly the files in the folder."""
    if missing := [path.name for path in (dist / SUMS, dist / f"{SUMS}.sig", signers) if not path.is_file()]:
        sys.exit(f"{', '.join(missing)}: missing, so nothing can be verified; install nothing of it")
    command = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", WHO, "-n", SPACE, "-s", dist / f"{SUMS}.sig"]
    if subprocess.run(command, input=(dist / SUMS).read_bytes(), capture_output=True).returncode:
        sys.exit(f"{SUMS} is not signed by the maintainer in {signers.name}; install nothing of it")
    lines = (line.split("  ", 1) for line in (dist / SUMS).read_text("utf-8").splitlines())
    sums: dict[str, str] = {name: own for own, name in lines}
    there = {file.name for file in (*dist.glob("*.whl"), dist / LOCK)}
    wrong = [name for name in sorted(there | sums.keys()) if name not in sums or digest(dist / name) != sums[name]]
    if wrong:
        sys.exit(f"{', '.join(wrong)}: not what the maintainer signed; install nothing of it")
    print(
        f"{len(sums)} files are what the maintainer signed; install with: pip install --require-hashes -r {LOCK}, then"
    )
    print("pip install --no-deps " + " ".join(sorted(name for name in sums if name.endswith(".whl"))))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


if __name__ == "__main__":
    acts = {("tag", 2): tag, ("write", 3): write, ("verify", 2): verify, ("wheelhouse", 2): wheelhouse}
    what = acts.get((" ".join(sys.argv[1:2]), len(sys.argv) - 2))
    sys.exit(what(*map(Path, sys.argv[2:])) if what else __doc__)
