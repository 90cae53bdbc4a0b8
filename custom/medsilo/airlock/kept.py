"""Copies a site's state files out of a sandbox and into the next sandbox, because each sandbox loses its files when it
ends.
"""

import os
import re
import shutil
from pathlib import Path

from medsilo.airlock.room import KEPT
from medsilo.airlock.wire import CHUNK, End


class KeptFiles:
    def __init__(self, end: End, folder: Path, may_keep: re.Pattern[str]) -> None:
        """Copy an earlier sandbox's state files into the site's folder in the present sandbox."""
        self.end, self.folder, self.may_keep = end, folder, may_keep
        # size and modification time of each file that was sent out of the sandbox
        self.handed: dict[str, tuple[int, int]] = {}
        for path in KEPT.rglob("*") if KEPT.is_dir() else ():
            name = path.relative_to(KEPT).as_posix()
            if may_keep.fullmatch(name) and path.is_file():
                place = folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
                self.handed[name] = _state_of(place)

    def hand_out(self) -> None:
        """Send changed state files to the process outside the sandbox; after deletions, also send the names of the
        remaining state files.
        """
        files = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        own = {name: path for name, path in files.items() if self.may_keep.fullmatch(name)}
        for name, path in own.items():
            if self.handed.get(name) != (state := _state_of(path)):
                self._hand_out(name, path)
                self.handed[name] = state
        if gone := self.handed.keys() - own.keys():
            for name in gone:
                del self.handed[name]
            self.end.send("keep", facts={"names": sorted(own)})

    def _hand_out(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            self.end.send("keep", name=name, size=left)
            while left:
                part = file.read(min(left, CHUNK))
                self.end.write(memoryview(part))
                left -= len(part)


def _state_of(path: Path) -> tuple[int, int]:
    there = path.stat()
    return there.st_size, there.st_mtime_ns
