"""Tell which medsilo, and which other packages, are here: versions and hashes, so that all sites run the same code."""

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path, PurePath

from medsilo import __version__
from medsilo.core.errors import MedsiloError

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT.parent
# The plug-ins that come with medsilo.
PLUGINS = (
    "medsilo_adapters",
    "medsilo_dicom",
    "medsilo_lab",
    "medsilo_nnunet",
    "medsilo_page",
    "medsilo_papers",
    "medsilo_secagg",
    "medsilo_series",
    "medsilo_zoo",
)
RELIABILITY = "nvflare_reliability"  # what NVFlare lacks, for any application; the engine uses it
ROOTS = (ROOT, PLACE / RELIABILITY, *(PLACE / name for name in PLUGINS))
SUFFIXES = (".py", ".html", ".template", ".csv")
NAME = "medsilo"  # of the distribution that they are all in
DECISIVE = ("nvflare", "torch", "numpy", "monai")  # libraries whose versions decide over the last digits


def package_files() -> list[Path]:
    """Every file that belongs to the package and its plug-ins, in a fixed order, relative to where these lie."""
    files = (path.relative_to(PLACE) for root in ROOTS for path in root.rglob("*") if path.is_file())
    return sorted(path for path in files if path.suffix in SUFFIXES and "__pycache__" not in path.parts)


@cache
def package_hash() -> str:
    """SHA-256 over the names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in package_files():
        content = (PLACE / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def package_facts() -> dict[str, str]:
    """Version and hash, as they stand in outputs and as sites report them."""
    return {"version": __version__, "hash": package_hash()}


@cache
def machine_facts() -> dict[str, str]:
    """Return what numbers depend on beside this package: Python, libraries, and which instructions torch uses here."""
    from torch.backends.cpu import get_cpu_capability

    own = {name: version(name) for name in DECISIVE}
    return {"python": platform.python_version(), **own, "processor": f"{platform.machine()} {get_cpu_capability()}"}


def place_in_package(file: str) -> str | None:
    """Return where one of our files lies, for people; None for a file of another package."""
    path = Path(file)
    return path.relative_to(PLACE).as_posix() if any(path.is_relative_to(root) for root in ROOTS) else None


METADATA = (".dist-info", ".egg-info")


def canonical(name: str) -> str:
    """Return the one spelling of a package's name: Acme_FL and acme-fl are the same package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(name: str) -> bool:
    """Return whether a package of this name is installed here."""
    try:
        return bool(distribution(name))
    except (PackageNotFoundError, ValueError):
        return False


@cache
def facts_of(name: str) -> dict[str, str]:
    """Return version and hash of an installed package.

    The hash is a SHA-256 over the names and contents of its files and over its entry points. It does not depend on
    where or how the package was installed. It is computed once in a process.
    """
    found = distribution(name)
    digest = hashlib.sha256()
    for path, place in sorted(files_of(name).items()):
        try:
            content = place.read_bytes()
        except OSError as error:
            raise MedsiloError(f"a file of package {name} can't be read; install it again", str(place)) from error
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    digest.update((found.read_text("entry_points.txt") or "").encode())
    return {"version": found.version, "hash": digest.hexdigest()}


def files_of(name: str) -> dict[str, Path]:
    """Return where each file of an installed package lies: those that it was installed with.

    A package that is installed in place ("editable") has no such list: its folders are read instead.
    """
    found = distribution(name)
    recorded = found.files
    if recorded is None or _is_editable(found):
        return dict(_in_folders(found))
    return {path.as_posix(): Path(str(found.locate_file(path))) for path in recorded if _is_content(path)}


def _is_editable(found: Distribution) -> bool:
    return bool(json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))


def _is_content(path: PurePath) -> bool:
    """Return whether a file is the package's own: no bytecode, no script outside, nothing that the installer wrote."""
    written = path.parts[0].endswith(METADATA) or path.parts[0] == ".."
    return not written and path.suffix != ".pyc" and "__pycache__" not in path.parts


def _in_folders(found: Distribution) -> Iterator[tuple[str, Path]]:
    listed = (found.read_text("top_level.txt") or "").split()
    for module in listed or sorted({entry.module.partition(".")[0] for entry in found.entry_points}):
        spec = find_spec(module)  # a module without a parent: looking for it imports nothing
        if spec is None:
            raise MedsiloError(f"package {found.name} has no module {module}; install it again")
        for folder in map(Path, spec.submodule_search_locations or ()):
            for path in folder.rglob("*"):
                if path.is_file() and _is_content(path.relative_to(folder)):
                    yield (module / path.relative_to(folder)).as_posix(), path
        if spec.submodule_search_locations is None and spec.origin:
            yield Path(spec.origin).name, Path(spec.origin)
