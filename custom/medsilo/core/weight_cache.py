"""Large files that several studies need, such as pre-trained weights. Their SHA-256 says which one is meant.

A file is what its hash says, wherever it lies: model_folders.py has the folders.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, Refused

MOST = 20 << 30  # bytes of files that a server has sent
IN_BUNDLES = ("models/model.safetensors", "models/model.pt")  # weights in a MONAI bundle
HASH = re.compile(r"[0-9a-f]{64}")

_hashes: dict[tuple[str, int, int], str] = {}  # of files, by path, size and time of change


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, which are read again only when it has changed."""
    state = path.stat()
    key = str(path.absolute()), state.st_size, state.st_mtime_ns
    if key not in _hashes:
        with path.open("rb") as file:
            _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _hashes[key]


def find(sha256: str, size: int) -> Path:
    """Return a file with this hash and of so many bytes; no other is looked into."""
    for folder in filter(Path.is_dir, model_folders.FOLDERS):
        for path in sorted(folder.iterdir()):
            with suppress(OSError):
                if path.is_file() and path.stat().st_size == size and hash_of_file(path) == sha256:
                    return path
    raise MedsiloError(
        f"the plan's pre-trained file (SHA-256 {sha256[:12]}..., {size} bytes) is not here; put it into "
        f"{model_folders.FOLDER}/ in the folder of this party's studies"
    )


def keep(sha256: str, content: memoryview, folder: Path, most: int = MOST) -> None:
    """Keep a file that came, under its hash, in a folder of such files that may have so many bytes in all; the oldest
    go first."""
    from medsilo.core.files import write_bytes  # which takes time to import, and who reads names does without

    if hashlib.sha256(content).hexdigest() != sha256:
        raise Refused("the file that arrived is not the plan's: its hash differs")
    if (size := content.nbytes) > most:
        raise Refused(
            f"the plan's pre-trained file has {size} bytes; this party keeps {most} at most. Put it into "
            f"{model_folders.FOLDER}/ in the folder of its studies"
        )
    older = [path for path in folder.glob("*") if HASH.fullmatch(path.name)] if folder.is_dir() else []
    sizes = {path: path.stat().st_size for path in sorted(older, key=lambda path: path.stat().st_mtime_ns)}
    for path in sizes:
        if sum(own for other, own in sizes.items() if other.exists()) + size > most:
            path.unlink()
    write_bytes(folder / sha256, content)
    model_folders.look_in(folder)


def keep_beside(files: Mapping[str, int], folder: Path) -> None:
    """Have files in a folder too, under their hashes: as second names of the same bytes where the disk allows it."""
    from medsilo.core.files import make_folder

    for sha256, size in files.items():
        found, place = find(sha256, size), folder / sha256
        if found == place.absolute():
            continue
        make_folder(folder)
        place.unlink(missing_ok=True)
        try:
            os.link(found, place)
        except OSError:
            shutil.copyfile(found, place)
