"""A server in one file, and back: its kit with studies and the list of who is expelled, and the jobs in its storage."""

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from medsilo.consortium.disk import JOB, storage_of, studies_of
from medsilo.core.errors import MedsiloError
from medsilo.core.files import make_folder, write_json

EXPELLED = "disabled_clients.json"  # NVFlare's own name for it, in the server's kit
KIT, STUDIES, STORAGE, FACTS = "kit", "studies", "storage", "backup.json"
LEFT_OUT = (".part", ".lock", ".pid")  # ends of the names of files that are of this moment only
TRIES = 20  # looks at a folder in which a server replaces files meanwhile
MOST = 64 << 20  # bytes of the list of files


class Backup(BaseModel):
    """The facts of a backup, which stand at its end."""

    model_config = ConfigDict(extra="forbid", strict=True)
    form: Literal[1] = 1
    made: str
    storage: str
    studies: str | None  # where they were, if not in the kit
    expelled: list[str]
    files: dict[str, str]  # name → SHA-256


def back_up(kit: Path, file: Path) -> Backup:
    """Write a backup. The server may run: files that it replaces meanwhile are read whole, before or after."""
    storage = storage_of(kit)
    if storage is None:
        raise MedsiloError("only a server has a backup: give its kit", str(kit))
    if file.exists():
        raise MedsiloError(f"{file.name} exists; name a new file")
    studies = studies_of(kit)
    beside = None if studies.is_relative_to(kit) else str(studies)
    parts = {KIT: kit, STORAGE: storage, **({STUDIES: studies} if beside else {})}
    make_folder(file.absolute().parent)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    digests: dict[str, str] = {}
    try:
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as target:
            with tarfile.open(fileobj=target, mode="w") as tar:
                for part, folder in parts.items():
                    for name, read in _files(part, folder, digests):
                        digests[name] = _add(tar, name, read)
                expelled = _expelled(kit / EXPELLED)
                made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                kept = Backup(made=made, storage=str(storage), studies=beside, expelled=expelled, files=digests)
                _add(tar, FACTS, io.BytesIO(kept.model_dump_json().encode()))
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except OSError as error:
        raise MedsiloError(f"{file.name} could not be written; is the disk full?", str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return kept


def _files(part: str, folder: Path, known: Collection[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield a folder's files, open; looks again where one went while the others were read."""
    for _ in range(TRIES):
        whole = True
        for place, folders, names in os.walk(folder):
            if part == KIT and Path(place) == folder:
                folders[:] = [name for name in folders if not JOB.fullmatch(name)]  # of jobs that run, or were killed
            for name in sorted(names):
                path = Path(place) / name
                told = f"{part}/{path.relative_to(folder).as_posix()}"
                if told in known or name.endswith(LEFT_OUT) or path.is_symlink() or not path.is_file():
                    continue
                try:
                    opened = path.open("rb")
                except FileNotFoundError:
                    whole = False
                    continue
                with opened:
                    yield told, opened
        if whole:
            return
    raise MedsiloError("the server replaces files faster than they can be read; stop it, then repeat")


def _add(tar: tarfile.TarFile, name: str, file: BinaryIO) -> str:
    """Add what an open file holds now; returns its digest. A log may grow meanwhile."""
    info = tarfile.TarInfo(name)
    info.mode, info.size = 0o600, file.seek(0, os.SEEK_END)
    if isinstance(file, io.BufferedReader):
        info.mode, info.mtime = os.fstat(file.fileno()).st_mode & 0o700, int(os.fstat(file.fileno()).st_mtime)
    file.seek(0)
    reader = _Digesting(file)
    tar.addfile(info, reader)
    return reader.digest.hexdigest()


class _Digesting(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data


def _expelled(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        return sorted(map(str, json.loads(path.read_text(encoding="utf-8"))["disabled_clients"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MedsiloError(f"{EXPELLED} is damaged; write anew who is expelled", str(path)) from error


def put_back(file: Path, kit: Path, expelled: Collection[str] = ()) -> Backup:
    """Make a server's kit and its storage from a backup, beside whose expelled hospitals others may be named."""
    if kit.exists():
        raise MedsiloError(f"{kit.name} exists; name a new folder for the kit, or move that one away")
    make_folder(kit.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=kit.absolute().parent) as place:
        kept = _unpacked(file, Path(place))
        parts = {KIT: kit, STORAGE: Path(kept.storage), **({STUDIES: Path(kept.studies)} if kept.studies else {})}
        for path in [*parts.values()][1:]:
            if any(one.is_file() for one in path.rglob("*")):
                raise MedsiloError(f"{path} is not empty, and the backup goes there; move it away")
        out = sorted({*kept.expelled, *expelled})
        if out:
            write_json(Path(place) / KIT / EXPELLED, {"disabled_clients": out})
        for part, path in parts.items():
            if (Path(place) / part).exists():
                shutil.copytree(Path(place) / part, path, dirs_exist_ok=True)
    kit.chmod(0o700)
    return kept.model_copy(update={"expelled": out})


def _unpacked(file: Path, place: Path) -> Backup:
    """Unpack a backup and compare every file with its digest."""
    try:
        with tarfile.open(file) as tar:
            tar.extractall(place, filter="data")
        facts = place / FACTS
        if facts.stat().st_size > MOST:
            raise ValueError("too long a list of files")
        kept = Backup.model_validate_json(facts.read_bytes())
        there = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
        del there[FACTS]
        wrong = [*(there.keys() ^ kept.files.keys())]
        wrong += [name for name, digest in kept.files.items() if name in there and _digest(there[name]) != digest]
    except FileNotFoundError as error:
        raise MedsiloError("there is no such backup, or it is not whole", str(error)) from error
    except (tarfile.TarError, OSError, ValueError, ValidationError, KeyError) as error:
        raise MedsiloError(f"{file.name} is no whole backup; use another", str(error)) from error
    if wrong:
        raise MedsiloError(f"{file.name} was changed or is damaged at {sorted(wrong)[0]}; use another backup")
    return kept


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
