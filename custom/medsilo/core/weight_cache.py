"""Find and save files of pre-trained weights by their SHA-256, so that several studies can use one file.

The functions of this module search the folders that the module model_folders.py lists.
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

MOST = 20 << 30  # limit on the total bytes of all received files
IN_BUNDLES = (
    "models/model.safetensors",
    "models/model.pt",
    "model.safetensors",
    # paths of the weights in a model folder of MONAI or of Hugging Face
)
HASH = re.compile(r"[0-9a-f]{64}")

# hashes of files by path, size and modification time
_hashes: dict[tuple[str, int, int], str] = {}


def hash_of_file(path: Path) -> str:
    """Return a file's SHA-256. A process computes the hash of an unchanged file only once."""
    state = path.stat()
    key = str(path.absolute()), state.st_size, state.st_mtime_ns
    if key not in _hashes:
        with path.open("rb") as file:
            _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _hashes[key]


def find(sha256: str, size: int) -> Path:
    """Return the path of a file that has the given SHA-256.

    Args:
        sha256: the SHA-256 in hexadecimal digits
        size: the file's size in bytes; the function reads no file of another size
    """
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
    """Save a received file in a folder.

    Args:
        sha256: the SHA-256 that the content must have, which becomes the file's name
        content: the file's content
        folder: the folder
        most: limit on the bytes of all files in the folder; the oldest files are removed to keep within this limit
    """
    # a slow import that most users of this module don't need
    from medsilo.core.files import write_bytes

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
    """Link or copy weight files into a folder.

    Args:
        files: each file's size in bytes, by the file's SHA-256
        folder: the folder, which is created if it is missing
    """
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
