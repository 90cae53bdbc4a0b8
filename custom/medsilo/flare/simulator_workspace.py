"""The workspace of NVFlare's simulator where a recipe runs in it: NVFlare empties it before each run."""

import re
import shutil
from pathlib import Path

from medsilo.runs import paths
from medsilo.runs.clean import is_finished
from medsilo.runs.reading import read_summary

STUDIES = "medsilo"  # in the folder of the server and of each site
EARLIER = "-earlier"  # behind the name of a workspace: where its finished studies go
# How Python ends a traceback, in a log, or line by line in that of a process which runs the script.
RAISED = re.compile(
    r"^(?:\d.* - )?(?:medsilo\.core\.errors\.\w+|([\w.]+(?:Error|Exception|Exit))): (.+)$", re.MULTILINE
)


def studies_in(workspace: Path) -> list[Path]:
    """Return the studies' folders at the server, the newest last."""
    return sorted((workspace / "server" / STUDIES).glob("*/"), key=lambda folder: folder.stat().st_mtime)


def keep_finished(workspace: Path) -> Path | None:
    """Move what NVFlare would remove of a finished study, of its server and sites; returns the new folder."""
    finished = [study for study in studies_in(workspace) if is_finished(study)]
    if not finished:
        return None
    kept = workspace.with_name(f"{workspace.name}{EARLIER}") / finished[-1].name
    kept.mkdir(parents=True)
    for studies in workspace.glob(f"*/{STUDIES}"):
        shutil.move(studies.parent, kept)
    return kept


def failure_in(workspace: Path) -> str | None:
    """Return the first error in the log of a site, one of medsilo's before others, else the server's reason."""
    for log in sorted(workspace.glob("*/log.txt")):
        if found := RAISED.findall(log.read_text(errors="replace")):
            kind, text = min(found, key=lambda one: bool(one[0]))
            return f"{log.parent.name}: {f'{kind}: ' if kind else ''}{text}"
    studies = [study for study in studies_in(workspace) if (study / paths.SUMMARY).is_file()]
    return read_summary(studies[-1]).reason if studies else None
