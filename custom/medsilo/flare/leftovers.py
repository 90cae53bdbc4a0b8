"""Find removable files in a startup kit: files of old studies and of old jobs. `medsilo.runs.clean` finds the removable
files of runs.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from medsilo.core.errors import reading
from medsilo.runs import paths
from medsilo.runs.clean import OldFile, find_old, is_finished, is_left
from medsilo.runs.ends import OVER, is_over
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

# the identifier that NVFlare gives a job; a job's folder has the same name
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
RUNS = ("DISPATCHED", "RUNNING")
AUDIT = "audit.log"  # the file in which NVFlare logs the requests of a job, with senders and rejections


def find_in_kit(kit: Path, days: float, unfinished: float = math.inf) -> list[OldFile]:
    """Return the removable files in the startup kit of a server or a hospital.

    Files of old studies and folders of ended jobs are removable; at a server, stored jobs and results of jobs are
    removable, too. A job is not removable while a process runs the job, or while an unfinished study may continue from
    the job.

    Args:
        days: The smallest age of a removable file, in days.
        unfinished: The age in days from which an unfinished study counts as abandoned.
    """
    studies = studies_of(kit)
    found = find_old(studies, days, unfinished) if studies.is_dir() else []
    running = command_lines()
    found += [
        OldFile.of(folder, f"folder of a job that runs no more, without its {AUDIT}", AUDIT)
        for folder in sorted(kit.iterdir())
        if JOB.fullmatch(folder.name) and (folder / "meta.json").is_file() and folder.name not in running
    ]
    if (storage := storage_of(kit)) and (storage / "jobs").is_dir():
        found += _stored(storage / "jobs", running, _needed(studies, unfinished))
    return [old for old in found if old.days >= days]


def studies_of(kit: Path) -> Path:
    local = kit / "local"
    return (SiteSettings.read(local) if (local / FILE_NAME).is_file() else SiteSettings()).studies_in(kit)


def storage_of(kit: Path) -> Path | None:
    """Return the folder in which a server stores jobs and results of jobs; None if the startup kit does not belong to a
    server.
    """
    path = kit / "local/resources.json"
    if not (kit / "startup/fed_server.json").is_file() or not path.is_file():
        return None
    with reading("local/resources.json"):
        components = json.loads(path.read_text(encoding="utf-8"))["components"]
        roots = [component["args"]["uri_root"] for component in components if component["id"] == "job_manager"]
    return Path(roots[0]).parent if roots else None


def command_lines() -> str:
    """Return the command lines of all processes, since the command line of a job's process contains the job's
    identifier.
    """
    return "\n".join(word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ())


def _needed(studies: Path, unfinished: float) -> set[str]:
    """Return the jobs from which unfinished studies may continue; jobs of abandoned studies are left out."""
    needed: set[str] = set()
    for path in studies.glob(f"*/{paths.JOBS}"):
        goes_on = any((path.parent / paths.CHECKPOINTS).glob(paths.ROUND_FILES)) and not is_finished(path.parent)
        if goes_on and not is_left(path.parent, unfinished):
            needed.update(path.read_text(encoding="utf-8").split())
    return needed


def _stored(jobs: Path, running: str, needed: set[str]) -> Iterator[OldFile]:
    for folder in sorted(jobs.iterdir()):
        if not JOB.fullmatch(folder.name) or folder.name in running or folder.name in needed:
            continue
        try:
            status = str(json.loads((folder / "meta").read_text(encoding="utf-8"))["status"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # a job that the server is still receiving has no readable status
        if is_over(status):
            yield OldFile.of(folder, f"a job that has ended ({status.removeprefix(OVER).lower()}), and its results")
        elif status in RUNS:
            yield OldFile.of(folder, "a job that was forgotten: no process runs it")
