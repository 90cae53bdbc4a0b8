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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

from medsilo.core.errors import MedsiloError, NoRoom, YamlError

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


def why_unread(error: OSError | UnicodeDecodeError, wanted: str) -> str:
    """Return why a file can't be read as text, and what to do, without its name. wanted: the file to give instead."""
    if isinstance(error, UnicodeDecodeError):
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        return f"it is not UTF-8 (byte 0x{byte:02X} in line {line}); save it as UTF-8"
    if isinstance(error, FileNotFoundError):
        return f"there is no such file; give {wanted}"
    if isinstance(error, IsADirectoryError):
        return f"it is a folder; give {wanted}"
    return f"{os.strerror(error.errno or 0).lower()}; check its permissions"


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


# YAML 1.2's numbers, which PyYAML, of YAML 1.1, reads as text: 1e-4 has no point.
NUMBER = ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789"))
LARGEST_YAML = 262_144  # bytes
MOST_NODES = 20_000  # of a YAML text: its keys, values, lists and mappings
DEEPEST = 32  # lists and mappings within each other
LONGEST_NUMBER = 40  # digits
ODD = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, and halves of characters


class _Loader(yaml.SafeLoader):
    """YAML of texts, numbers, truth values, lists and mappings, of bounded size. Dates are texts.

    It refuses names for parts (`&a`, `*a`, `<<`), which grow a short text without end; types of its own (`!!int`); and
    a key given twice, instead of silently taking the last.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        event: Any = self.peek_event()
        if problem := self._problem(event):
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _problem(self, event: Any) -> str:
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            return "names for parts of it (& and *) are not read"
        if getattr(event, "tag", None):
            return "types of its own (!) are not read"
        if self.nodes > MOST_NODES:
            return f"it has more than {MOST_NODES} keys and values"
        return f"it is more than {DEEPEST} levels deep" if self.depth > DEEPEST else ""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if ODD.search(value):
            raise yaml.constructor.ConstructorError(None, None, "a text has control characters", node.start_mark)
        if node.tag.endswith((":int", ":float")) and len(value) > LONGEST_NUMBER:
            problem = f"a number has more than {LONGEST_NUMBER} digits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for place, _ in node.value:
            key: Any = self.construct_object(place, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", place.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML whose texts are quoted where the loader would take them for numbers."""


_Loader.add_implicit_resolver(*NUMBER)
_Dumper.add_implicit_resolver(*NUMBER)


def load_yaml(text: str) -> Any:
    """Return the values of a YAML text, or raise YamlError: the one way in which the package reads YAML."""
    if len(text.encode("utf-8", "replace")) > LARGEST_YAML:
        raise YamlError(f"it has more than {LARGEST_YAML} bytes")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise YamlError(" ".join((problem or "syntax").split()), mark.line + 1 if mark else None) from error
    except (ValueError, OverflowError) as error:
        raise YamlError("a value that looks like a number cannot be read as one") from error


def read_yaml(path: Path, name: str, wanted: str) -> Any:
    """Return the values of a YAML file. name: what people call it; wanted: the file to give where it can't be read."""
    try:
        return load_yaml(read_bounded(path, LARGEST_YAML).decode())
    except YamlError as error:
        raise MedsiloError(f"{name} cannot be read: {error}; correct it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"{name} cannot be read: {why_unread(error, wanted)}") from error
    except ValueError as error:
        raise MedsiloError(f"{name} cannot be read: it has more than {LARGEST_YAML} bytes; correct it") from error


def dump_yaml(value: Any, in_line: bool = False) -> str:
    """Return the value as YAML that `load_yaml` reads, its keys in their order; in one line on wish."""
    form: dict[str, Any] = {"default_flow_style": True, "width": LARGEST_YAML, "allow_unicode": True} if in_line else {}
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **form)


@dataclass(frozen=True)
class LockedFolder:
    """A folder with the lock that all processes of a hospital share."""

    folder: Path
    lock: str  # the file's name
    wait: float  # seconds that another process may hold it
    holds: str  # for people: "this hospital's records"
    unless: str  # what does not happen when the folder cannot be used

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody else in as long as the block runs; raises MedsiloError where that is not to be had."""
        try:
            make_folder(self.folder)
            with FileLock(self.folder / self.lock, timeout=self.wait, mode=FILE):
                yield
        except Timeout as error:
            raise MedsiloError(f"another process holds {self.holds}; end it, or try again") from error
        except OSError as error:
            raise MedsiloError(
                f"{self.holds} cannot be used ({type(error).__name__}), so {self.unless}; check the folder of "
                f"'state_dir'",
                private=f"{self.folder}: {error}",
            ) from error
