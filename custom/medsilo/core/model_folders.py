"""List the folders in which weight_cache.py searches for files of initial weights."""

from pathlib import Path

FOLDER = "models"  # subfolder of a run's folder that contains files of initial weights
FOLDERS: dict[Path, None] = {}  # the folders, in the order of the search


def look_in(*folders: Path) -> None:
    FOLDERS.update(dict.fromkeys(folder.absolute() for folder in folders))
