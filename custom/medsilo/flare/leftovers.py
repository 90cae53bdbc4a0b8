"""What grows in kits of a server and of hospitals, and may go; `medsilo.runs.clean` knows studies."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from medsilo.core.errors import reading
from medsilo.runs import paths
from medsilo.runs.clean import Old, find_old, is_finished, is_left
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # as NVFlare names jobs and their folders
ENDED = "FINISHED:"  # so begins the status of a job that runs no more
RUNS = ("DISPATCHED", "RUNNING")
AUDIT = "audit.log"  # of a job, by NVFlare: who asked for what, and each rejection


def find_in_kit(kit: Path, days: float, unfinished: float = math.inf) -> list[Old]:
    """Return what may go from the kit of a server or a hospital: files of its studies, and what NVFlare left.

    That are the folders of jobs that ran here, and at the server also jobs that have ended, with what leads download
    of them. A job stays while a process runs it, and while a study that has not ended could go on with it.
    """
    studies = studies_of(kit)
    found = find_old(studies, days, unfinished) if studies.is_dir() else []
    running = command_lines()
    found += [
        Old.of(folder, f"folder of a job that runs no more, without its {AUDIT}", AUDIT)
        for folder in sorted(kit.iterdir())
        if JOB.fullmatch(folder.name) and (folder / "meta.json").is_file() and folder.name not in running
    ]
    if (storage := storage_of(kit)) and (storage / "jobs").is_dir():
        found += _stored(storage / "jobs", running, _needed(studies, unfinished))
    return [old for old in found if old.days >= days]


def studies_of(kit: Path) -> Path:
    """Return where a kit's party keeps its studies."""
    local = kit / "local"
    output = SiteSettings.read(local).output if (local / FILE_NAME).is_file() else None
    return output or kit / "medsilo"


def storage_of(kit: Path) -> Path | None:
    """Return where a server keeps jobs and what leads download; None in the kit of another."""
    path = kit / "local/resources.json"
    if not (kit / "startup/fed_server.json").is_file() or not path.is_file():
        return None
    with reading("local/resources.json"):
        components = json.loads(path.read_text(encoding="utf-8"))["components"]
        roots = [one["args"]["uri_root"] for one in components if one["id"] == "job_manager"]
    return Path(roots[0]).parent if roots else None


def command_lines() -> str:
    """Return the command lines of all processes; that of a job's process names the job."""
    return "\n".join(word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ())


def _needed(studies: Path, unfinished: float) -> set[str]:
    """Return the jobs that studies which have not ended, and were not left, could go on with."""
    needed: set[str] = set()
    for path in studies.glob(f"*/{paths.JOBS}"):
        goes_on = any((path.parent / paths.CHECKPOINTS).glob(paths.ROUND_FILES)) and not is_finished(path.parent)
        if goes_on and not is_left(path.parent, unfinished):
            needed.update(path.read_text(encoding="utf-8").split())
    return needed


def _stored(jobs: Path, running: str, needed: set[str]) -> Iterator[Old]:
    for folder in sorted(jobs.iterdir()):
        if not JOB.fullmatch(folder.name) or folder.name in running or folder.name in needed:
            continue
        try:
            status = str(json.loads((folder / "meta").read_text(encoding="utf-8"))["status"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # one that comes in now
        if status.startswith(ENDED):
            yield Old.of(folder, f"a job that has ended ({status.removeprefix(ENDED).lower()}), and its results")
        elif status in RUNS:
            yield Old.of(folder, "a job that was forgotten: no process runs it")
