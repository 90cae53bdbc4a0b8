"""Tell which medsilo this is: version and hash, so that all sites of a study can be held to the same code."""

import hashlib
from functools import cache
from pathlib import Path

from medsilo import __version__

ROOT = Path(__file__).resolve().parents[1]


def package_files() -> list[Path]:
    """Every file that belongs to the package, in a fixed order, relative to its root."""
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(path for path in files if path.suffix in {".py", ".html"} and "__pycache__" not in path.parts)


@cache
def package_hash() -> str:
    """SHA-256 over the names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in package_files():
        content = (ROOT / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def package_facts() -> dict[str, str]:
    """Version and hash, as they stand in outputs and as sites report them."""
    return {"version": __version__, "hash": package_hash()}
