"""The settings of a kit as its engineer left them: while they promise something, no study runs under changed ones.

What is remembered lies in the kit, signed with its key, and not in `records`, whose place the settings themselves say.
It begins with the first check or study under settings that promise something, and a change counts when the engineer
says so.

What is not noticed: whoever may read the key can sign, and who removes the file and replaces the settings begins anew.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import read_bounded
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.sealing.signed import read_own, write_signed
from medsilo.sealing.signing import PrivateKey
from medsilo.site.approvals import moment
from medsilo.site.settings import FILE_NAME, SiteSettings

REMEMBERED = "accepted-settings.json"  # in the kit
READ = (".yaml", ".json", ".default", ".py")  # ends of files that medsilo or NVFlare read in local/, code among them
BESIDE = "startup/*__*resources.json"  # NVFlare takes components from these, too
LARGEST = 1 << 20  # bytes of each of these files
REMEDY = "its engineer looks at local/ and says so: medsilo check --kit KIT --accept"


class _SettingsRecord(Section):
    files: dict[str, str]  # SHA-256 of each that is there, by its path in local/
    at: int = Field(ge=0)


class AcceptedSettings:
    """The settings that a kit's engineer accepted."""

    def __init__(self, kit: Path, key: PrivateKey) -> None:
        self.file, self.local, self._key = kit / REMEMBERED, kit / "local", key

    def check(self) -> str:
        """Return since when the settings stand, nothing where none are remembered; raises Refused where they differ."""
        if not self.file.exists():
            return ""
        remembered = self._read()
        now = self._now()
        if differ := sorted(name for name, _ in now.items() ^ remembered.files.items()):
            told = ", ".join(plain(name, 80) if name in now else f"{name} (missing)" for name in dict.fromkeys(differ))
            raise Refused(f"this hospital's {told} changed since {moment(remembered.at)}, so nothing runs; {REMEDY}")
        return moment(remembered.at)

    def begin(self, settings: SiteSettings) -> str:
        """The same; where nothing is remembered yet, remember settings that promise something."""
        if self.file.exists():
            return self.check()
        return self.accept(settings)

    def accept(self, settings: SiteSettings) -> str:
        """Remember the settings as they are now; nothing where they promise nothing. Returns since when they stand."""
        if settings.approval == "none" and settings.privacy is None:
            self.file.unlink(missing_ok=True)
            return ""
        accepted = _SettingsRecord(files=self._now(), at=int(time.time()))
        write_signed(self.file, accepted, self._key)
        return moment(accepted.at)

    def _read(self) -> _SettingsRecord:
        try:
            return read_own(self.file, _SettingsRecord, self._key)
        except MedsiloError as error:
            raise Refused(
                f"this hospital's {REMEMBERED} is damaged or not signed by its key, so nothing runs; {REMEDY}",
                private=f"{self.file}: {error}",
            ) from error

    def _now(self) -> Mapping[str, str]:
        try:
            found = [*self.local.rglob("*"), *self.local.parent.glob(BESIDE)]
            read = [path for path in found if path.suffix in READ and path.is_file()]
            there = {os.path.relpath(path, self.local): read_bounded(path, LARGEST) for path in read}
            return {name: hashlib.sha256(content).hexdigest() for name, content in there.items()}
        except (OSError, ValueError) as error:
            raise Refused(
                f"this hospital's settings cannot be read ({type(error).__name__}), so nothing runs; see to local/",
                private=str(error),
            ) from error


def check_there(local: Path) -> None:
    """Raise MedsiloError where a hospital's kit has no settings: without them nothing is promised any more."""
    if not (local / FILE_NAME).exists():
        raise MedsiloError(f"this hospital's {FILE_NAME} is missing in the kit's local/, so nothing runs; put it back")
