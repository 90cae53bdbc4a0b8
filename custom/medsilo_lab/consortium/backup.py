"""Back up a server's kit, studies, stored jobs and list of expelled hospitals in one file. Restore a server from a
backup.
"""

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import make_folder, read_bounded, replacing, write_json, write_text
from medsilo.core.text import is_safe_name
from medsilo.core.yaml_text import dump_yaml, read_yaml
from medsilo.flare.leftovers import JOB, storage_of, studies_of
from medsilo.runs import paths
from medsilo.runs.reading import read_rounds
from medsilo.site.kit import HOSPITALS
from medsilo.site.party import FILE_NAME
from medsilo_lab.consortium.description import SERVICE

EXPELLED = "disabled_clients.json"  # file in the server's kit in which NVFlare lists expelled hospitals
KIT, STUDIES, STORAGE, FACTS = "kit", "studies", "storage", "backup.json"
ENTRY = re.compile(rf"({KIT}|{STUDIES}|{STORAGE})(/(?!\.{{1,2}}/)[^/\x00-\x1f]+)*/(?!\.{{1,2}}$)[^/\x00-\x1f]+")
LEFT_OUT = (".part", ".lock", ".fl")  # suffixes of temporary files, which a backup leaves out
SERVER = "server"
TRIES = 20  # maximum number of attempts to list a folder whose files a running server replaces


# A text without control characters, because control characters could move a terminal's cursor.
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,4096}$")]
AbsoluteFolder = Annotated[Line, Field(pattern=r"^/")]


class Backup(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    form: Literal[1] = 1
    made: Line
    storage: AbsoluteFolder
    # folder of the studies on the server that was backed up; None if the studies were inside the kit
    studies: AbsoluteFolder | None
    expelled: list[Line]
    files: int

    def places(self, kit: Path) -> dict[str, Path]:
        beside = {STUDIES: Path(self.studies)} if self.studies else {}
        return {KIT: kit, STORAGE: Path(self.storage), **beside}

    def moved(self, kit: Path, storage: Path | None) -> "Backup":
        """Return a copy of this `Backup` whose paths of storage and studies point into the restored kit `kit`. If
        `storage` is given, the path of the storage is `storage`.
        """
        place = (storage or kit / STORAGE).absolute()
        return self.model_copy(
            update={"storage": str(place), "studies": str(kit.absolute() / STUDIES) if self.studies else None}
        )


def back_up(kit: Path, file: Path) -> Backup:
    """Write a backup of a server that may be running. Each file in the backup is complete, even if the server replaces
    this file during the backup.
    """
    storage = storage_of(kit)
    if storage is None:
        raise MedsiloError("only a server can be backed up; give the server's kit", str(kit))
    kit = kit.absolute()
    studies = studies_of(kit)
    if file.exists():
        raise MedsiloError(f"{file.name} exists; name a new file")
    kept = Backup(
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        storage=str(storage),
        studies=None if studies.is_relative_to(kit) else str(studies),
        expelled=_expelled(kit / EXPELLED),
        files=0,
    )
    with replacing(file) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for part, folder in kept.places(kit).items():
            for path, name in _files(part, folder, archive, storage):
                # if the server has just replaced a file, the next listing contains the new file
                with suppress(FileNotFoundError):
                    archive.write(path, name)
        kept = kept.model_copy(update={"files": len(archive.namelist())})
        archive.writestr(FACTS, kept.model_dump_json())
    return kept


def _files(part: str, folder: Path, archive: zipfile.ZipFile, storage: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder with their relative names. If a file disappears during the backup, the folder is
    listed again.

    storage: The server's storage folder, which is a separate section of the backup even if it is inside the kit.
    """
    for _ in range(TRIES):
        known = {*archive.namelist()}
        for place, folders, names in os.walk(folder):
            if part == KIT and Path(place) == folder:
                # a backup leaves out the folders of running and killed jobs
                folders[:] = [name for name in folders if not JOB.fullmatch(name) and folder / name != storage]
            for path in (Path(place) / name for name in sorted(names) if not name.endswith(LEFT_OUT)):
                name = f"{part}/{path.relative_to(folder).as_posix()}"
                if name not in known and path.is_file() and not path.is_symlink():
                    yield path, name
        if len(known) == len(archive.namelist()):
            return
    raise MedsiloError(
        "the server writes files faster than medsilo can read them; stop the server, then repeat the backup"
    )


def _expelled(path: Path) -> list[str]:
    if not path.exists():
        return []
    with reading(f"{EXPELLED}, which names the expelled hospitals,"):
        return sorted(map(str, json.loads(path.read_text(encoding="utf-8"))["disabled_clients"]))


def put_back(file: Path, kit: Path, storage: Path | None = None, expelled: Collection[str] = ()) -> Backup:
    """Restore a server's kit and its storage from a backup. The hospitals in `expelled` are expelled in addition to the
    hospitals that were expelled before the backup.

    A restore writes only into the kit and into the storage folder. By default, the storage folder is inside the kit.
    """
    if kit.exists():
        raise MedsiloError(f"{kit.name} exists; choose a new folder for the kit, or move the existing folder")
    if storage and any(one.is_file() for one in storage.rglob("*")):
        raise MedsiloError(
            f"{storage.name} is not empty; choose an empty folder for the jobs with --storage", str(storage)
        )
    make_folder(kit.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=kit.absolute().parent) as folder:
        place = Path(folder)
        was = _unpacked(file, place)
        _check_known(expelled, _names(place, was.expelled))
        kept = was.moved(kit, storage)
        _lead_to(place / KIT, was, kept, kit.absolute())
        if out := sorted({*kept.expelled, *expelled}):
            write_json(place / KIT / EXPELLED, {"disabled_clients": out})
        parts = {part: path for part, path in kept.places(kit).items() if (place / part).is_dir()}
        outside = [part for part, path in parts.items() if not path.is_relative_to(kit.absolute()) and part != KIT]
        for part in parts.keys() - {KIT, *outside}:
            if (place / KIT / part).exists():
                raise MedsiloError(
                    f"{file.name}: the backup contains jobs, but the kit already has a folder {part}/; give --storage"
                )
            (place / part).rename(place / KIT / part)
        for part in (*outside, KIT):  # the kit is copied last, because the server can start as soon as the kit exists
            shutil.copytree(place / part, parts[part], dirs_exist_ok=True)
    kit.chmod(0o700)
    return kept.model_copy(update={"expelled": out})


def _check_known(expelled: Collection[str], names: Collection[str]) -> None:
    if unknown := sorted(set(expelled) - set(names)):
        raise MedsiloError(
            f"--expelled: no hospital of this backup is called {unknown[0]!r}; known: {', '.join(sorted(names))}. At "
            "NVFlare's console, disable_client NAME expels a hospital that joined after the backup"
        )


def _names(folder: Path, expelled: Collection[str]) -> set[str]:
    """Return the names of all hospitals in an unpacked backup. The names come from the kit, the studies, the jobs and
    the list of expelled hospitals.
    """
    names = set(expelled)
    with reading(f"local/{HOSPITALS} in the backup"):
        path = folder / KIT / "local" / HOSPITALS
        names |= set(json.loads(path.read_text(encoding="utf-8"))["hospitals"]) if path.exists() else set()
    for path in folder.rglob(paths.ROUNDS):
        with suppress(MedsiloError):
            names |= {site for line in read_rounds(path.parent, growing=True) for site in line.asked}
    for meta in folder.glob(f"{STORAGE}/jobs/*/meta"):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            names |= {site for sites in json.loads(meta.read_text("utf-8"))["deploy_map"].values() for site in sites}
    return {name for name in names if is_safe_name(name)} - {SERVER}


def _lead_to(unpacked: Path, was: Backup, now: Backup, kit: Path) -> None:
    """Replace the server's paths in an unpacked kit by the paths after the restore."""
    resources = unpacked / "local/resources.json"
    parts = json.dumps(was.storage)[1:-1], json.dumps(now.storage)[1:-1]
    if resources.is_file():
        with reading("local/resources.json in the backup"):
            text = resources.read_text(encoding="utf-8")
        write_text(resources, text.replace(f'"{parts[0]}/', f'"{parts[1]}/'))
    if (unit := unpacked / SERVICE).is_file():
        with reading(f"{SERVICE} in the backup"):
            text = unit.read_text(encoding="utf-8")
        text = text.replace(f" {was.storage}\n", f" {now.storage}\n")
        lay = re.search("^WorkingDirectory=(/.+)$", text, re.MULTILINE)
        write_text(unit, text.replace(lay[1], str(kit)) if lay else text)
    if now.studies:
        own = unpacked / "local" / FILE_NAME
        values = read_yaml(own, f"local/{FILE_NAME}", "that of a server") or {}
        if not isinstance(values, dict):
            raise MedsiloError(f"local/{FILE_NAME} in the backup is not a mapping; use another backup")
        write_text(own, dump_yaml({**values, "output": now.studies}))


def _unpacked(file: Path, folder: Path) -> Backup:
    try:
        with zipfile.ZipFile(file) as archive:
            inside = archive.infolist()
            if odd := [one.filename for one in inside if one.filename != FACTS and not ENTRY.fullmatch(one.filename)]:
                raise ValueError(f"{odd[0]!r} is not part of a server's backup")
            if sum(one.file_size for one in inside) > shutil.disk_usage(folder).free:
                raise ValueError("its files have more bytes than are free on the disk")
            archive.extractall(folder)
            for one in inside:
                (folder / one.filename).chmod(one.external_attr >> 16 & 0o700 | 0o600)
            kept = Backup.model_validate_json(read_bounded(folder / FACTS, 1 << 24))
            if kept.files != len(archive.namelist()) - 1 or not (folder / KIT / "startup").is_dir():
                raise ValueError("files are missing")
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, RuntimeError, NotImplementedError, EOFError) as error:
        what = "is no whole backup" if file.exists() else "is not there"
        raise MedsiloError(f"{file.name} {what}; use the file that medsilo kits backup wrote", str(error)) from error
    return kept
