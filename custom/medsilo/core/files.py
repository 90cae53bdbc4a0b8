"""Files that are either whole or not there: atomic writing, tensors without pickle, folders with a lock.

Plug-ins write by `write_json`, `write_text` and `write_bytes`, for this account alone, and read by `read_bounded`.

>>> from tempfile import TemporaryDirectory
>>> from medsilo.extend import files
>>> with TemporaryDirectory() as folder:
...     files.write_json(Path(folder, "told.json"), {"cases": 3})
...     json.loads(files.read_bounded(Path(folder, "told.json"), largest=100))
{'cases': 3}
"""

import csv
import errno
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

if TYPE_CHECKING:  # many commands write and read texts only, and torch takes a second and a half to import
    from torch import Tensor

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk is
UNASKED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)  # of file systems that sync no folders
FOLDER, FILE = 0o700, 0o600  # what is written here is for this account alone: it may tell of patients


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that lack, for this account alone; one that is there stays as it is."""
    if folder.is_dir():
        return
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(FOLDER, exist_ok=True)
            sync_names(place.parent)


def free_disk(folder: Path) -> int:
    """The free bytes on the disk of a folder that may not be there yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def check_unquoted(path: Path | str, remedy: str) -> None:
    """Reject a path that NVFlare can't start a process in: its command lines have paths without quotes."""
    if torn := re.search(r"[\s'\"\\#]", str(path)):
        raise MedsiloError(f"NVFlare starts nothing where a path has {torn[0]!r}: {remedy}", str(path))


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: until then, a power cut may undo new and removed names."""
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
    """Say in one line that a file could not be written, and whether the disk is full, which may pass."""
    try:
        yield
    except OSError as error:
        full = error.errno in FULL
        why = "the disk is full" if full else f"{type(error).__name__} while writing"
        failed = (NoRoom if full else MedsiloError)(
            f"{path.name} could not be written: {why}. What was saved before is intact; free space or choose another "
            "output folder, and give the command again (for a run: medsilo resume)",
            private=f"{path}: {error}",
        )
        raise failed from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well; else `path` stays as it was."""
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
    """Remove what a killed process left half-written in folders that nobody else writes to."""
    for folder in folders:
        for path in folder.glob(".*.part"):
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files need not be UTF-8


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file and wait until it is on the disk; after one that was cut off it starts again."""
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
    """Write JSON that is of use for moments only: whole, without waiting for the disk; a failure is no error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        temporary.touch(FILE)
        temporary.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
        temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; a number that is no number is an error and never a file that others can't read."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write rows as CSV atomically, under these columns and all others that any of them has."""
    text, every = io.StringIO(), dict.fromkeys([*columns, *(key for row in rows for key in row)])
    writer = csv.DictWriter(text, list(every), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", facts: Mapping[str, Any] | None = None) -> None:
    """Write named tensors and JSON facts into one safetensors file, atomically.

    By hand for a reason: one tensor after another, so that those in mapped files are never in memory together; the
    format's own library wants all of them at once.
    """
    from medsilo.core.mmap_store import TYPES, bytes_of, let_go, stretches_of

    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts or {}, allow_nan=False)}}
    end = 0
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # each number where it is aligned
    for name in names:
        dtype, shape = tensors[name].dtype, tensors[name].shape
        if dtype not in TYPES:
            raise MedsiloError(
                f"{path.name} could not be written: {name} has the type {dtype}, which has no name there"
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
    """The tensors and facts of a file that `save_tensors` wrote."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118


def load_facts(path: Path) -> dict[str, Any]:
    """The facts of a file that `save_tensors` wrote, without its tensors."""
    with _opened(path) as file:
        return json.loads(file.metadata()["facts"])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MedsiloError(  # facts may be nested as deep as a file is long
            f"{path.name} cannot be read ({type(error).__name__}); it is missing or damaged", private=str(path)
        ) from error


def read_bounded(path: Path, largest: int) -> bytes:
    """Return a file's content; raises ValueError for more than so many bytes."""
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError("it is too large")
    return content
