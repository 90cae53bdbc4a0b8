"""A kit's settings as its hospital's engineer accepted them: what they promise, nobody takes away unnoticed."""

import hashlib
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.machinery import all_suffixes
from pathlib import Path

from pydantic import Field

from medsilo.core import optional
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import read_bounded
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.site.kit import KitFiles
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

REMEMBERED = "accepted-settings.json"  # in the kit
READ = (".yaml", ".json", ".default", *all_suffixes())  # of files that medsilo or NVFlare read in local/, or import
BESIDE = "startup/*__*resources.json"  # NVFlare takes components from these, too
LARGEST_FILE = 1 << 20  # bytes of each of these files
REMEDY = "its engineer looks at local/ and says so: medsilo check --kit KIT --accept"


class _SettingsRecord(Section):
    files: dict[str, str]  # SHA-256 of each that is there, by its path in local/
    at: int = Field(ge=0)


class AcceptedSettings:
    """The settings of a kit as its engineer left them: while they promise something, no study runs under changed ones.

    What is remembered lies in the kit, signed with its key, and not in `records`, whose place the settings themselves
    say. It begins with the first check or study under settings that promise something, and a change counts when the
    engineer says so. Somebody who removes the file, too, is not noticed.
    """

    def __init__(self, kit: KitFiles) -> None:
        self.file, self.local, self._kit = kit.kit / REMEMBERED, kit.kit / "local", kit

    def check(self) -> str:
        """Return since when the settings stand, nothing where none are remembered; raises Refused where they differ."""
        if not self.file.exists():
            return ""
        try:
            remembered = optional.read_own(self.file, _SettingsRecord, self._kit.key_for("settings"))
        except MedsiloError as error:
            raise Refused(
                f"this hospital's {REMEMBERED} is damaged or not signed by its key, so nothing runs; {REMEDY}",
                private=f"{self.file}: {error}",
            ) from error
        now = self._now()
        if differ := sorted(name for name, _ in now.items() ^ remembered.files.items()):
            told = ", ".join(plain(name, 80) if name in now else f"{name} (missing)" for name in dict.fromkeys(differ))
            raise Refused(f"this hospital's {told} changed since {moment(remembered.at)}, so nothing runs; {REMEDY}")
        return moment(remembered.at)

    def begin(self, settings: SiteSettings) -> str:
        """The same; where nothing is remembered yet, remember settings that promise something."""
        return self.check() or self.accept(settings)

    def accept(self, settings: SiteSettings) -> str:
        """Remember the settings as they are now; nothing where they promise nothing. Returns since when they stand."""
        if settings.approval == "none" and settings.privacy is None:
            self.file.unlink(missing_ok=True)
            return ""
        accepted = _SettingsRecord(files=self._now(), at=int(time.time()))
        optional.write_signed(self.file, accepted, self._kit.key_for("settings"))
        return moment(accepted.at)

    def _now(self) -> Mapping[str, str]:
        try:
            found = [*self.local.rglob("*"), *self.local.parent.glob(BESIDE)]
            there = {os.path.relpath(path, self.local): _content(path) for path in found}
            return {name: hashlib.sha256(own).hexdigest() for name, own in there.items() if own is not None}
        except (OSError, ValueError) as error:
            raise Refused(
                f"this hospital's settings cannot be read ({type(error).__name__}), so nothing runs; see to local/",
                private=str(error),
            ) from error


def _content(path: Path) -> bytes | None:
    """Return what must not change of a file, or of a link to a folder, where it leads; None of what nobody reads."""
    if path.is_symlink() and path.is_dir():
        return bytes(path.readlink())
    is_read = path.suffix in READ and path.parent.name != "__pycache__" and path.is_file()
    return read_bounded(path, LARGEST_FILE) if is_read else None


def check_there(local: Path) -> None:
    """Raise MedsiloError where a hospital's kit has no settings: without them nothing is promised any more."""
    if not (local / FILE_NAME).exists():
        raise MedsiloError(f"this hospital's {FILE_NAME} is missing in the kit's local/, so nothing runs; put it back")


def moment(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
