"""Tell which medsilo this is: version and hash, so that all sites of a study can be held to the same code."""

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

from medsilo import __version__

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT.parent
# The plug-ins that come with medsilo.
PLUGINS = (
    "medsilo_adapters",
    "medsilo_dicom",
    "medsilo_new",
    "medsilo_nnunet",
    "medsilo_omop",
    "medsilo_papers",
    "medsilo_promise",
    "medsilo_record",
    "medsilo_rehearsal",
    "medsilo_release",
    "medsilo_series",
    "medsilo_statistics",
)
ROOTS = (ROOT, *(PLACE / name for name in PLUGINS))
NAME = "medsilo"  # of the distribution that they are all in
DECISIVE = ("nvflare", "torch", "numpy", "monai")  # libraries whose versions decide over the last digits


def package_files() -> list[Path]:
    """Every file that belongs to the package and its plug-ins, in a fixed order, relative to where these lie."""
    files = (path.relative_to(PLACE) for root in ROOTS for path in root.rglob("*") if path.is_file())
    return sorted(path for path in files if path.suffix in {".py", ".html", ".csv"} and "__pycache__" not in path.parts)


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
