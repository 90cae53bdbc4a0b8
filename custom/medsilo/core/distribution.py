"""Other installed packages: version, and a hash over their files. Nothing of them is imported."""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePath

from medsilo.core.errors import MedsiloError

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
