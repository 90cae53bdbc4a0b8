"""Return versions and hashes of installed packages. Sites compare the hashes of packages to verify that all sites run
identical code.

A package is one of medsilo's import packages (`medsilo`, `medsilo_dicom`) or another installed distribution
(`acme-gait`). Each package has a separate hash, so a change to one package does not change the hash of another package.
"""

import hashlib
import importlib.util
import json
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, SourcelessFileLoader
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT.parent
ENGINE = "medsilo"
# those of medsilo's packages that run in every study, even if the plan does not name them
ALWAYS = (ENGINE, "nvflare_reliability")
LAB = "medsilo-lab"  # the name of the distribution that servers, leads and researchers install
OURS = (ENGINE, LAB)  # the distributions that contain medsilo's packages
# suffixes of compiled modules, which Python loads instead of a source file of the same name
NATIVE = (*EXTENSION_SUFFIXES, ".so", ".pyd")
# suffixes of medsilo's files that are executed or displayed
SUFFIXES = (".py", ".pyc", *NATIVE, ".html", ".js", ".css", ".template", ".csv")
DECISIVE = ("nvflare", "torch", "numpy", "monai")  # libraries whose versions may change the last digits of results


def check_nvflare() -> None:
    """Raise MedsiloError if the installed NVFlare is not the release with which medsilo is tested."""
    wanted = re.findall(r"(?m)^nvflare==(\S+)$", (ROOT / "tested.txt").read_text("utf-8"))[0]
    if (installed := version("nvflare")).split(".")[:2] != wanted.split(".")[:2]:
        raise MedsiloError(
            f"nvflare is {installed} here, and medsilo runs with {wanted}: pip install nvflare=={wanted}"
        )


def is_ours(name: str) -> bool:
    return name in ALWAYS or name.startswith(f"{ENGINE}_")


def ours_behind(thing: object) -> set[str]:
    """Return the names of medsilo's import packages in which an object's class or a base class is
    defined.
    """
    return set(filter(is_ours, (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)))


def is_here(name: str) -> bool:
    return find_spec(name) is not None


def from_lab(feature: str) -> str:
    """Return a clause that recommends medsilo-lab, for the end of an error message; return "" if medsilo-lab is
    installed.
    """
    return "" if is_here("medsilo_lab") else f"; {feature} come with {LAB}, which is not installed"


@cache
def machine_facts() -> dict[str, str]:
    """Return facts about this machine that can influence the results of a study.

    The returned facts are the versions of Python and of the libraries in `DECISIVE`, and the processor instructions
    that PyTorch uses.
    """
    from torch.backends.cpu import get_cpu_capability

    own = {name: version(name) for name in DECISIVE}
    return {"python": platform.python_version(), **own, "processor": f"{platform.machine()} {get_cpu_capability()}"}


def place_in_package(file: str) -> str | None:
    """Return the path of one of medsilo's files, relative to the folder that contains the file's package; None for a
    file of another package.
    """
    path = Path(file)
    place = path.relative_to(PLACE) if path.is_relative_to(PLACE) else None
    return place.as_posix() if place and is_ours(place.parts[0]) else None


METADATA = (".dist-info", ".egg-info")


def canonical(name: str) -> str:
    """Return the canonical spelling of a distribution's name: "acme-fl" for "Acme_FL"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except (PackageNotFoundError, ValueError):
        return False


def attach_again(group: str, name: str) -> str:
    """Return the remedy if an entry point was added to a checkout's pyproject.toml after medsilo was installed from the
    checkout.

    Returns "" if pyproject.toml does not have the entry point.
    """
    file = PLACE.parent / "pyproject.toml"
    if PLACE.name != "custom" or not file.is_file():
        return ""
    import tomllib

    listed = tomllib.loads(file.read_text("utf-8")).get("project", {}).get("entry-points", {}).get(group, {})
    if name not in listed:
        return ""
    return "it is in pyproject.toml, and not attached yet; install it again ('make')"


def extra_with(module: str) -> str | None:
    """Return the extra of medsilo that installs a module, such as "medsilo[page]"; None if no extra installs the
    module.
    """
    if not is_installed(ENGINE):
        return None
    for line in distribution(ENGINE).requires or ():
        named, _, marker = line.partition(";")
        extra, own = re.search(r"extra == .([\w-]+)", marker), re.match(r"[\w.-]+", named)
        if extra and own and canonical(own[0]) == canonical(module.partition(".")[0]):
            return f"{ENGINE}[{extra[1]}]"
    return None


@cache
def facts_of(name: str) -> dict[str, str]:
    """Return the version and the hash of one of medsilo's packages or of another installed distribution.

    The hash is a SHA-256 over the names and contents of the package's files. For a distribution that is not medsilo's,
    the hash also covers the entry points. The hash does not depend on how the package was installed. Each process
    computes a package's hash only once. Raises MedsiloError if Python would load bytecode that differs from its source
    file.
    """
    other = None if is_ours(name) else distribution(name)
    digest = hashlib.sha256()
    for path, place in sorted(files_of(name).items()):
        try:
            content = place.read_bytes()
            is_true = place.suffix != ".py" or _has_true_bytecode(place, content)
        except (OSError, SyntaxError, ValueError) as error:
            raise MedsiloError(f"a file of package {name} can't be read; install it again", str(place)) from error
        if not is_true:
            told = f"package {name}: the bytecode of {path} is not made of its source; remove __pycache__"
            raise MedsiloError(told, str(place))
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    digest.update(((other and other.read_text("entry_points.txt")) or "").encode())
    return {"version": other.version if other else __version__, "hash": digest.hexdigest()}


def files_of(name: str) -> dict[str, Path]:
    """Return the files of a package by their relative paths.

    For one of medsilo's packages, the function returns the files with a suffix in `SUFFIXES`; for another distribution,
    all files. An editable installation has no list of its files, so the function searches the installation's folders.
    """
    if is_ours(name):
        return {path: place for path, place in _in_module(name) if place.name.endswith(SUFFIXES)}
    found = distribution(name)
    recorded, origin = found.files, json.loads(found.read_text("direct_url.json") or "{}")
    if recorded is None or origin.get("dir_info", {}).get("editable"):
        return dict(_in_folders(found))
    own = {path.as_posix(): Path(str(found.locate_file(path))) for path in recorded if _is_content(path)}
    return own | {f"{path}: {place.name}": place for path, one in own.items() for place in _taken_before(one)}


def _taken_before(source: Path) -> Iterator[Path]:
    """Yield the existing files that Python would load in preference to a given source file."""
    if source.suffix == ".py":
        names = (*(f"{source.stem}{suffix}" for suffix in EXTENSION_SUFFIXES), f"{source.stem}/__init__.py")
        yield from filter(Path.is_file, (source.parent / name for name in names))


def _has_true_bytecode(source: Path, content: bytes) -> bool:
    """Return False if Python would load bytecode that was not compiled from the source file; otherwise, return True."""
    try:
        place = importlib.util.cache_from_source(str(source))
        cached = Path(place).read_bytes()
    except (OSError, NotImplementedError):
        return True
    magic, kind, facts = cached[:4], int.from_bytes(cached[4:8], "little"), cached[8:16]
    if magic != importlib.util.MAGIC_NUMBER:
        return True
    if kind & 1:
        is_loaded = not kind & 2 or facts == importlib.util.source_hash(content)
    else:
        there = source.stat()
        made_of = (int(there.st_mtime), there.st_size)
        is_loaded = facts == b"".join((number & 0xFFFFFFFF).to_bytes(4, "little") for number in made_of)
    if not is_loaded:  # Python ignores bytecode of another version of the source file, and compiles it again
        return True
    try:
        # get_code reads the bytecode of a module without executing the bytecode
        there_is = SourcelessFileLoader(source.stem, place).get_code(source.stem)
    except (ImportError, EOFError, ValueError, TypeError):  # the bytecode is damaged
        return False
    return there_is == compile(content, str(source), "exec", dont_inherit=True)


def files_in(distribution: Distribution) -> set[Path]:
    return {Path(str(distribution.locate_file(path))).resolve() for path in distribution.files or ()}


def name_that_differs(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Compare two mappings from package names to facts, and return the name of a package whose facts differ. Return
    None if the mappings are equal.

    If the facts of several packages differ between the mappings, the function prefers to return "medsilo".
    """
    differ = [name for name in {*first, *other} if first.get(name) != other.get(name)]
    return min(differ, key=lambda name: (name != ENGINE, str(name)), default=None)


def in_words(facts: Any) -> str:
    """Return a package's version and the first digits of its hash as text."""
    return f"{facts.get('version')} ({str(facts.get('hash'))[:12]})" if isinstance(facts, dict) else "no such package"


def _is_content(path: PurePath) -> bool:
    """True if a file belongs to the package itself, and is not bytecode, a script or metadata that the installer
    wrote.
    """
    written = path.parts[0].endswith(METADATA) or path.parts[0] == ".."
    return not written and "__pycache__" not in path.parts


def _in_folders(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    listed = (distribution.read_text("top_level.txt") or "").split()
    for module in listed or sorted({entry.module.partition(".")[0] for entry in distribution.entry_points}):
        yield from _in_module(module)


def _in_module(module: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(module)  # for a top-level module, find_spec imports no code
    if spec is None:
        raise MedsiloError(
            f"module {module} is missing, although an installed package lists it; install the package again"
        )
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in folder.rglob("*"):
            if path.is_file() and _is_content(path.relative_to(folder)):
                yield (module / path.relative_to(folder)).as_posix(), path
    if spec.submodule_search_locations is None and spec.origin:
        yield Path(spec.origin).name, Path(spec.origin)
