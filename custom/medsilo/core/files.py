"""Write files atomically, and save tensors without pickle.

Plug-ins should read files with `read_bounded`, and write files with `write_json`, `write_text` and `write_bytes`. Only
the present user account can read files that these functions write.

>>> from tempfile import TemporaryDirectory
>>> from medsilo.extend import files
>>> with TemporaryDirectory() as folder:
...     files.write_json(Path(folder, "told.json"), {"cases": 3})
...     json.loads(files.read_bounded(Path(folder, "told.json"), largest=100))
{'cases': 3}
"""

import csv
import errno
import gc
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medsilo.core.errors import MedsiloError, NoRoom
from medsilo.core.text import plain

if TYPE_CHECKING:  # importing torch takes 1.5 seconds, and many commands don't need it
    from torch import Tensor

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
UNASKED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)  # errors of file systems that can't sync folders
MOST_IN_TREE = 20_000  # largest number of files and folders that `check_tree` allows
# rights of new files, which may be about patients
FOLDER, FILE = 0o700, 0o600


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents. The new folders can be opened only by the present user account."""
    if folder.is_dir():
        return
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(FOLDER, exist_ok=True)
            sync_names(place.parent)


def free_disk(folder: Path) -> int:
    """Return the number of free bytes on a folder's disk. The folder whose disk is measured need not exist yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def check_unquoted(path: Path | str, remedy: str) -> None:
    """Raise MedsiloError if a path has blanks or quotes, because NVFlare does not quote paths in command lines.

    Args:
        path: the path
        remedy: advice at the end of the error message
    """
    if torn := re.search(r"[\s'\"\\#]", str(path)):
        raise MedsiloError(f"NVFlare can't use a path that has {torn[0]!r}: {remedy}", str(path))


def sync_names(folder: Path) -> None:
    """Sync a folder's entries to the disk, so that a power cut can't undo the creation or removal of a file."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in UNASKED:
            raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError raised in the context into NoRoom if the disk is full, and otherwise into MedsiloError."""
    try:
        yield
    except OSError as error:
        full = error.errno in FULL
        why = "the disk is full" if full else f"{type(error).__name__} while writing"
        failed = (NoRoom if full else MedsiloError)(
            f"{path.name} could not be written: {why}. What was saved before is intact; free space or choose another "
            "output folder. A run on this machine then goes on with: medsilo resume",
            private=f"{path}: {error}",
        )
        raise failed from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file. The temporary file replaces the file `path` if the context ends without an
    error.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _writing(path):
            make_folder(path.parent)
            temporary.touch(FILE)
            temporary.chmod(FILE)
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
            sync_names(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def sweep(*folders: Path) -> None:
    """Remove the temporary files that killed processes left in folders. No other process may write to these folders
    meanwhile.
    """
    for folder in folders:
        for path in folder.glob(".*.part"):
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Args:
        path: the file, which is replaced if it exists
        text: the new content
    """
    with replacing(path) as temporary:
        # The text may contain file names that are not valid UTF-8.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically.

    Args:
        path: the file, which is replaced if it exists
        content: the new content
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, and wait until the line is on the disk.

    If the file's last line does not end with a line break, a line break is added before the new line.

    Args:
        path: the file, which is created if it is missing
        line: the line, without a line break at its end
    """
    with _writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE)
        with os.fdopen(descriptor, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            whole = end == 0 or os.pread(descriptor, 1, end - 1) == b"\n"
            file.write((b"" if whole else b"\n") + line.encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        if end == 0:
            sync_names(path.parent)


def write_passing(path: Path, value: Any) -> None:
    """Write short-lived JSON atomically; the function does not wait for the disk, and ignores errors of the disk.

    Args:
        path: the file, which is replaced if it exists
        value: a JSON value
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        temporary.touch(FILE)
        temporary.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
        temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises ValueError for NaN or infinity, which JSON does not have.

    Args:
        path: the file, which is replaced if it exists
        value: a JSON value
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write rows as CSV atomically.

    Args:
        path: the file, which is replaced if it exists
        rows: the rows; each row maps columns to values, and lacks the columns that stay empty
        columns: the first columns; all other keys of the rows become further columns
    """
    text, every = io.StringIO(), dict.fromkeys([*columns, *(key for row in rows for key in row)])
    writer = csv.DictWriter(text, list(every), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", facts: Mapping[str, Any] | None = None) -> None:
    """Write named tensors and JSON metadata to one safetensors file, atomically.

    Memory-mapped tensors are read one after another, so that memory never holds all tensors at once.

    Args:
        path: the file, which is replaced if it exists
        tensors: the tensors by name
        facts: the JSON metadata; None means no metadata
    """
    from medsilo.core.mmap_store import TYPES, bytes_of, let_go, stretches_of

    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts or {}, allow_nan=False)}}
    end = 0
    # Tensors of wide number types come first, because each tensor must begin at a multiple of its type's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in names:
        dtype, shape = tensors[name].dtype, tensors[name].shape
        if dtype not in TYPES:
            raise MedsiloError(
                f"{path.name} could not be written: safetensors has no name for the type {dtype} of {name}"
            )
        begin, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(bytes_of(tensors[name].detach().cpu().contiguous()))
            let_go(stretches_of([tensors[name]]))


def load_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Return the tensors and the metadata of a file that `save_tensors` wrote."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118


def load_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a file that `save_tensors` wrote, without reading the file's tensors."""
    with _opened(path) as file:
        return json.loads(file.metadata()["facts"])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        # RecursionError: a malicious file may have deeply nested metadata
        raise MedsiloError(
            f"{path.name} cannot be read ({type(error).__name__}); it is missing or damaged", private=str(path)
        ) from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch off Python's garbage collector in the context, because the collector would often scan all new objects."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def leads_out(path: Path, inside: Path) -> bool:
    """True if a path is a symbolic link to a target outside a folder.

    Args:
        path: the path
        inside: the folder, which is already resolved
    """
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside)


def check_tree(folder: Path, largest: int, subject: str) -> None:
    """Check a folder from another party: raise MedsiloError for too many files, a too large file, or a link to a file
    outside the folder. The function opens no file.

    Args:
        folder: the folder
        largest: the largest allowed size of a file in bytes
        subject: the folder's name in errors
    """
    inside, seen = folder.resolve(), 0
    for place, folders, names in os.walk(folder):
        seen += len(folders) + len(names)
        if seen > MOST_IN_TREE:
            raise MedsiloError(
                f"{subject} has more than {MOST_IN_TREE:,} files and folders; take out what it does not need"
            )
        for path in (Path(place) / name for name in (*folders, *names)):
            told = plain(path.relative_to(folder).as_posix(), 120)
            if leads_out(path, inside):
                raise MedsiloError(
                    f"{told} of {subject} is a link to a file outside the folder; replace the link by the file"
                )
            if not (path.is_file() or path.is_dir()):
                raise MedsiloError(f"{told} of {subject} is neither a file nor a folder; remove it")
            if path.is_file() and path.stat().st_size > largest:
                raise MedsiloError(f"{told} of {subject} has more than {largest:,} bytes; take it out")


def read_bounded(path: Path, largest: int) -> bytes:
    """Return a file's content. Raises ValueError if the file is too large.

    Args:
        path: the file
        largest: the largest allowed size in bytes
    """
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError("it is too large")
    return content
