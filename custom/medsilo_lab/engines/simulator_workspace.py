"""Find studies in the workspace of NVFlare's simulator. Finished studies are moved out of the workspace, because
NVFlare empties the workspace before each simulation.
"""

import re
import shutil
from pathlib import Path

from medsilo.runs import paths
from medsilo.runs.clean import is_finished
from medsilo.runs.reading import read_summary

STUDIES = "medsilo"  # name of the folder with the studies, in the server's folder and in each site's folder
EARLIER = "-earlier"  # suffix of the folder into which the finished studies of a workspace are moved
# matches the last line of a Python traceback in a log; the line may begin with the rank of a process
RAISED = re.compile(
    r"^(?:\d.* - )?(?:\[rank\d+\]: )?(?:medsilo\.core\.errors\.\w+|([\w.]+(?:Error|Exception|Exit))): (.+)$",
    re.MULTILINE,
)


def studies_in(workspace: Path) -> list[Path]:
    return sorted((workspace / "server" / STUDIES).glob("*/"), key=lambda folder: folder.stat().st_mtime)


def keep_finished(workspace: Path) -> Path | None:
    """Move the files of a finished study out of the workspace, and return the new folder. If the workspace contains no
    finished study, return None.
    """
    finished = [study for study in studies_in(workspace) if is_finished(study)]
    if not finished:
        return None
    kept = workspace.with_name(f"{workspace.name}{EARLIER}") / finished[-1].name
    kept.mkdir(parents=True)
    for studies in workspace.glob(f"*/{STUDIES}"):
        shutil.move(studies.parent, kept)
    return kept


def failure_in(workspace: Path) -> str | None:
    """Return the first error of medsilo in the logs of a workspace. If the logs contain no error of medsilo, return the
    first other error.

    If the logs contain no error, return the reason for which the study failed according to its summary.
    """
    for log in sorted(workspace.glob("*/log.txt")):
        if found := RAISED.findall(log.read_text(errors="replace")):
            kind, text = min(found, key=lambda one: bool(one[0]))
            return f"{log.parent.name}: {f'{kind}: ' if kind else ''}{text}"
    studies = [study for study in studies_in(workspace) if (study / paths.SUMMARY).is_file()]
    return read_summary(studies[-1]).reason if studies else None
