"""Folders in which this process looks for files that networks begin with; weight_cache.py finds them there."""

from pathlib import Path

FOLDER = "models"  # of files that a run needs, in its own folder
FOLDERS: dict[Path, None] = {}  # in the order in which they were noted


def look_in(*folders: Path) -> None:
    """Note folders."""
    FOLDERS.update(dict.fromkeys(folder.absolute() for folder in folders))
