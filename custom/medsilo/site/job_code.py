"""Read the code in a job without running the code, hash the code, and store it for people to review.

A job's code is the job's app as NVFlare unpacks it: scripts, and the configuration of classes, commands and arguments.
The plan and those files whose hashes the plan contains do not belong to a job's code, because the plan's hash covers
them. NVFlare's signatures do not belong to a job's code, because they change with each submission.
"""

import base64
import hashlib
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import Field

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded, write_text
from medsilo.core.package import DECISIVE, canonical, is_ours
from medsilo.core.section import Section
from medsilo.core.text import plain, printable

MOST_FILES, LARGEST = 1000, 4 << 20  # limits on the number of files and folders, and on the bytes of all files together
LONGEST_NAME = 200
MOST_VERSIONS = 300
LARGEST_KEPT = 4 * LARGEST  # limit on the bytes of the file that stores a job's code
PLAN = "config/plan.yaml"
COMPONENTS = "config/config_fed_client.json"
CONFIG, CUSTOM = "config", "custom"  # folders of an app
BROUGHT = "job"  # subfolder of an app to which a hospital's launcher moves the job's files
SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")  # NVFlare's signature files
CACHE = "__pycache__"
LINKED = "a link leads to another place; put the file itself there"
# NVFlare adds this component to each job before the job starts, if a hospital's resources.json configures
# SiteLogStreamer. The component that NVFlare adds has no effect unless the hospital sets allow_log_streaming.
ADDED = {
    "id": "auto_log_streamer",
    "path": "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
    "args": {"target_parent_server": True, "log_file_name": "error_log.txt"},
}
IMPORT = re.compile(r"(?m)(?:^|[;:])[ \t]*(?:from[ \t]+([A-Za-z_]\w*)|import[ \t]+([^\n;#]+))")
ABSENT = "not installed"


class CodeFacts(Section):
    """The identity of a job's code: its hash, and the versions of the packages that the code uses."""

    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    versions: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=200)]] = Field(
        {}, max_length=MOST_VERSIONS
    )


@dataclass(frozen=True)
class JobCode:
    """The files of a job's code, by their paths in the app."""

    files: Mapping[str, bytes]

    @classmethod
    def read(cls, app: Path, fixed: Mapping[str, int], has_run: bool = False) -> Self:
        """Read the code in an app's folder, or raise MedsiloError for a symbolic link, too many files, or too many
        bytes.

        Args:
            fixed: the sizes in bytes of the files that the plan names, by SHA-256
            has_run: whether Python may have written caches into the folder
        """
        files: dict[str, bytes] = {}
        left = LARGEST
        for name, size in _files_below(app, has_run):
            path = app / name
            if (
                PurePosixPath(name).parent == PurePosixPath(CONFIG)
                and size in fixed.values()
                and _hash_of(path) in fixed
            ):
                continue
            left -= size
            if left < 0:
                raise MedsiloError(
                    f"the job's code has more than {LARGEST:,} bytes, too many for a review; {plain(name, 80)} has "
                    f"{size:,}"
                )
            content = _content(path, size)
            files[name] = _as_sent(content) if name == COMPONENTS else content
        return cls(files)

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256(b"medsilo code 1\n")
        for name, content in sorted(self.files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))

    @cached_property
    def imports(self) -> set[str]:
        """Names of the top-level modules that the code imports from elsewhere. Dynamic imports are not found."""
        inside = [PurePosixPath(name).parts[1] for name in self.files if name.startswith(f"{CUSTOM}/")]
        own = {name.partition(".")[0] for name in inside}
        found: set[str] = set()
        for name, content in self.files.items():
            if name.endswith(".py"):
                for module, several in IMPORT.findall(content.decode("utf-8", "replace")):
                    found |= {module} if module else {one.split(".")[0].split(" ")[0] for one in _parted(several)}
        return {name for name in found - own if name.isidentifier()}

    def facts(self) -> CodeFacts:
        """Return the code's hash, and the installed versions of Python, of numerical libraries, and of all imported
        packages.
        """
        wanted = {name for name in self.imports - sys.stdlib_module_names - {*DECISIVE} if not is_ours(name)}
        known = _distributions(_places()) if wanted else {}
        packages = {canonical(own) for name in wanted for own in known.get(name, ())} | {*DECISIVE}
        versions = {"python": platform.python_version(), **dict.fromkeys(wanted - known.keys(), ABSENT)}
        versions |= {name: _version(name) for name in packages}
        if len(versions) > MOST_VERSIONS:
            raise MedsiloError(
                f"the job's code imports more than {MOST_VERSIONS} packages; ask the lead for fewer packages"
            )
        return CodeFacts(hash=self.hash, versions=dict(sorted(versions.items())))

    def differing(self, other: "JobCode") -> list[str]:
        """Return the paths of files that differ between two versions of the code, or that only one of the versions
        contains.
        """
        return sorted(name for name in {*self.files, *other.files} if self.files.get(name) != other.files.get(name))

    def keep(self, folder: Path) -> None:
        """Store the code in a file whose name is the code's hash."""
        path = folder / f"{self.hash}.json"
        if not path.exists():
            told = {name: base64.b64encode(content).decode() for name, content in sorted(self.files.items())}
            write_text(path, json.dumps(told))

    @classmethod
    def kept(cls, folder: Path, hash: str) -> Self:
        """Read stored code by its hash, or raise MedsiloError if the code is missing or changed."""
        path = folder / f"{hash}.json"
        try:
            told = json.loads(read_bounded(path, LARGEST_KEPT))
            found = cls({name: base64.b64decode(content, validate=True) for name, content in told.items()})
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"the code {hash[:12]} is not kept here any more ({type(error).__name__}); give the job's folder"
            raise MedsiloError(why, str(path)) from error
        if found.hash != hash:
            raise MedsiloError(f"the stored code {hash[:12]} was changed; give the job's folder", str(path))
        return found


def drop_code(folder: Path, but: Collection[str]) -> None:
    """Delete all stored code in a folder, except code whose hash is in the given list."""
    for path in folder.glob("*.json"):
        if path.stem not in but:
            path.unlink(missing_ok=True)


def as_brought(app: Path) -> Path:
    """Return the folder of a job's files, which a hospital's launcher may have moved to a subfolder."""
    return app / BROUGHT if (app / BROUGHT).is_dir() and not (app / CUSTOM).exists() else app


def has_code(app: Path) -> bool:
    """Return True if an app has a folder of custom code, because NVFlare then treats the job as a job with code."""
    return os.path.lexists(app / CUSTOM)


def _files_below(app: Path, has_run: bool) -> Iterator[tuple[str, int]]:
    """Yield the path and size of each file of the code, without opening files or following symbolic links."""
    if app.is_symlink():
        raise MedsiloError(f"the job's code: {LINKED}", str(app))
    left, seen = [""], 0
    while left:
        above = left.pop()
        for entry in os.scandir(app / above):
            name, seen = f"{above}{entry.name}", seen + 1
            if seen > MOST_FILES:
                raise MedsiloError(
                    f"the job's code has more than {MOST_FILES} files and folders, too many for a review"
                )
            if name != printable(name) or len(name) > LONGEST_NAME:
                raise MedsiloError(f"the job's code: the name {plain(name, 80)} has unusual characters, or is too long")
            if entry.is_symlink():
                raise MedsiloError(f"the job's code: {plain(name, 80)}: {LINKED}")
            if entry.is_dir(follow_symlinks=False):
                if entry.name != CACHE:
                    left.append(f"{name}/")
                elif not has_run:
                    raise MedsiloError(
                        f"the job's code: {plain(name, 80)} has bytecode, which nobody can review; remove it"
                    )
            elif not entry.is_file(follow_symlinks=False):
                raise MedsiloError(f"the job's code: {plain(name, 80)} is neither a file nor a folder; remove it")
            elif name != PLAN and entry.name not in SIGNATURES:
                yield name, entry.stat(follow_symlinks=False).st_size


def _content(path: Path, size: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MedsiloError("the job's code changed while it was read; try again", str(path))
            content = file.read(size + 1)
    except OSError as error:
        raise MedsiloError(f"the job's code cannot be read ({type(error).__name__})", str(path)) from error
    if len(content) != size:
        raise MedsiloError("the job's code changed while it was read; try again", str(path))
    return content


def _as_sent(content: bytes) -> bytes:
    """From a job's configuration, remove the component that the hospital's NVFlare added."""
    try:
        read = json.loads(content)
        components = read.get("components") or []
        kept = [component for component in components if component != ADDED]
        read = {name: value for name, value in read.items() if name != "components"}
        return json.dumps(read | ({"components": kept} if kept else {}), indent=2).encode() + b"\n"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parted(several: str) -> list[str]:
    """Return the names of the modules in an import statement."""
    return [one.strip() for one in several.split(",") if one.strip()]


def _places() -> tuple[tuple[str, int], ...]:
    """Return the folders with installed packages, each with the time at which a package was last added or removed."""
    return tuple((str(place), place.stat().st_mtime_ns) for place in map(Path, sys.path) if place.is_dir())


@lru_cache(maxsize=1)
def _distributions(stamps: tuple[tuple[str, int], ...]) -> Mapping[str, list[str]]:
    """Map each top-level module to the installed packages that contain the module.

    The search takes a second, because it reads a file of every installed package. The result is used again until a
    package is added or removed.
    """
    return packages_distributions()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT
