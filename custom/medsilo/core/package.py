"""Tell which packages are here: version and hash of each, so that all sites run the same code.

A package is one that is imported, of ours (`medsilo`, `medsilo_dicom`), or an installed distribution of others
(`acme-gait`). Each has a hash of its own, so that a change in one says nothing about another.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from medsilo import __version__
from medsilo.core.errors import MedsiloError

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT.parent
ENGINE = "medsilo"
ALWAYS = (ENGINE, "nvflare_reliability")  # run in every study, where they are installed
OURS = (ENGINE, "medsilo-lab")  # the distributions that our packages are in
SUFFIXES = (".py", ".html", ".template", ".csv")  # of our files that run or are shown
DECISIVE = ("nvflare", "torch", "numpy", "monai")  # libraries whose versions decide over the last digits


def check_nvflare() -> None:
    """Reject an NVFlare of another release than the one medsilo is tested with: it would fail somewhere inside."""
    wanted = re.findall(r"(?m)^nvflare==(\S+)$", (ROOT / "tested.txt").read_text("utf-8"))[0]
    if (installed := version("nvflare")).split(".")[:2] != wanted.split(".")[:2]:
        raise MedsiloError(
            f"nvflare is {installed} here, and medsilo runs with {wanted}: pip install nvflare=={wanted}"
        )


def is_ours(name: str) -> bool:
    """Return whether a package that is imported under this name is one of ours."""
    return name in ALWAYS or name.startswith(f"{ENGINE}_")


def ours_behind(thing: object) -> set[str]:
    """Return which packages of ours the class of an object is made of, those that it is derived from included."""
    return set(filter(is_ours, (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)))


def is_here(name: str) -> bool:
    """Return whether a package of ours can be imported."""
    return find_spec(name) is not None


@cache
def machine_facts() -> dict[str, str]:
    """Return what numbers depend on beside this package: Python, libraries, and which instructions torch uses here."""
    from torch.backends.cpu import get_cpu_capability

    own = {name: version(name) for name in DECISIVE}
    return {"python": platform.python_version(), **own, "processor": f"{platform.machine()} {get_cpu_capability()}"}


def place_in_package(file: str) -> str | None:
    """Return where one of our files lies, for people; None for a file of another package."""
    path = Path(file)
    place = path.relative_to(PLACE) if path.is_relative_to(PLACE) else None
    return place.as_posix() if place and is_ours(place.parts[0]) else None


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
    """Return version and hash of a package of ours, or of an installed distribution of others.

    The hash is a SHA-256 over the names and contents of its files, and of others' packages over their entry points. It
    does not depend on where or how the package was installed. It is computed once in a process.
    """
    other = None if is_ours(name) else distribution(name)
    digest = hashlib.sha256()
    for path, place in sorted(files_of(name).items()):
        try:
            content = place.read_bytes()
        except OSError as error:
            raise MedsiloError(f"a file of package {name} can't be read; install it again", str(place)) from error
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    digest.update(((other and other.read_text("entry_points.txt")) or "").encode())
    return {"version": other.version if other else __version__, "hash": digest.hexdigest()}


def files_of(name: str) -> dict[str, Path]:
    """Return where each file of a package lies: of ours those that run, of others those that it was installed with.

    A package that is installed in place ("editable") has no such list: its folders are read instead.
    """
    if is_ours(name):
        return {path: place for path, place in _in_module(name) if place.suffix in SUFFIXES}
    found = distribution(name)
    recorded, origin = found.files, json.loads(found.read_text("direct_url.json") or "{}")
    if recorded is None or origin.get("dir_info", {}).get("editable"):
        return dict(_in_folders(found))
    return {path.as_posix(): Path(str(found.locate_file(path))) for path in recorded if _is_content(path)}


def files_in(found: Distribution) -> set[Path]:
    """Return the files that a distribution was installed with."""
    return {Path(str(found.locate_file(path))).resolve() for path in found.files or ()}


def name_that_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first package that is not the same in both, medsilo itself before all others; None where all are."""
    differ = [name for name in {*one, *other} if one.get(name) != other.get(name)]
    return min(differ, key=lambda name: (name != ENGINE, str(name)), default=None)


def in_words(facts: Any) -> str:
    """Return version and hash of a package for people."""
    return f"{facts.get('version')} ({str(facts.get('hash'))[:12]})" if isinstance(facts, dict) else "no such package"


def _is_content(path: PurePath) -> bool:
    """Return whether a file is the package's own: no bytecode, no script outside, nothing that the installer wrote."""
    written = path.parts[0].endswith(METADATA) or path.parts[0] == ".."
    return not written and path.suffix != ".pyc" and "__pycache__" not in path.parts


def _in_folders(found: Distribution) -> Iterator[tuple[str, Path]]:
    listed = (found.read_text("top_level.txt") or "").split()
    for module in listed or sorted({entry.module.partition(".")[0] for entry in found.entry_points}):
        yield from _in_module(module)


def _in_module(module: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(module)  # a module without a parent: looking for it imports nothing
    if spec is None:
        raise MedsiloError(f"there is no module {module}, which an installed package says it has; install it again")
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in folder.rglob("*"):
            if path.is_file() and _is_content(path.relative_to(folder)):
                yield (module / path.relative_to(folder)).as_posix(), path
    if spec.submodule_search_locations is None and spec.origin:
        yield Path(spec.origin).name, Path(spec.origin)
