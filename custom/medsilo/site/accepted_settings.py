"""Detect whether a kit's settings have changed since the hospital's engineer accepted the settings."""

import hashlib
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.machinery import all_suffixes
from pathlib import Path

from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused, TemporaryRefusal
from medsilo.core.files import read_bounded
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.site.kit import KitFiles
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

REMEMBERED = "accepted-settings.json"  # name of the kit's file with the accepted settings
# suffixes of the files in local/ that medsilo or NVFlare reads or imports
READ = (".yaml", ".json", ".default", *all_suffixes())
# pattern of further files in the kit from which NVFlare reads components
BESIDE = "startup/*__*resources.json"
LARGEST_FILE = 1 << 20  # bytes
REMEDY = "its engineer looks at local/ and says so: medsilo check --kit KIT --accept"


class _SettingsRecord(Section):
    files: dict[str, str]  # SHA-256 of each settings file, by path relative to local/
    at: int = Field(ge=0)
    # True if the settings promise to protect patients; otherwise, they may change without acceptance.
    promises: bool = Field(True, exclude_if=bool)


class AcceptedSettings:
    """The record of the settings that the engineer of a kit's hospital accepted. If the settings promise to protect
    patients, a change of the settings stops all studies until the engineer accepts the new settings.

    The record of accepted settings is a file in the kit, signed with the kit's key. The record of accepted settings is
    not in the hospital's state folder, because a changed setting could name another folder. The first check or study
    records the accepted settings, and a later change needs the engineer's acceptance. If a hospital has a privacy
    ledger but no record of accepted settings, somebody removed the record, which is always created before the ledger.
    """

    def __init__(self, kit: KitFiles, folder_of_budget: Path | None = None) -> None:
        """Prepare the check of a kit's settings.

        Args:
            folder_of_budget: folder of the hospital's query budget, if known
        """
        self.file, self.local, self._kit, self._folder_of_budget = (
            kit.kit / REMEMBERED,
            kit.kit / "local",
            kit,
            folder_of_budget,
        )

    def check(self) -> str:
        """Return the time of the last acceptance as text; the text is empty if nobody has accepted settings. Raises
        Refused if the settings have changed since the last acceptance.
        """
        if not self.file.exists():
            from medsilo.site.ledger import ledgers

            if ledgers(self._folder_of_budget, self._kit.kit):
                raise Refused(
                    f"this hospital's {REMEMBERED} is missing, although it has a privacy ledger; its engineer must "
                    "check local/, then run: medsilo ledger accept --kit KIT"
                )
            return ""
        from medsilo.site.signed import read_of_kit

        try:
            remembered = read_of_kit(self.file, _SettingsRecord, self._kit, "settings")
        except TemporaryRefusal:
            raise
        except MedsiloError as error:
            raise Refused(
                f"this hospital's {REMEMBERED} is damaged or not signed by its key, so no study runs; {REMEDY}",
                private=f"{self.file}: {error}",
            ) from error
        if not remembered.promises:
            return ""
        now = self._now()
        if differ := sorted(name for name, _ in now.items() ^ remembered.files.items()):
            told = ", ".join(plain(name, 80) if name in now else f"{name} (missing)" for name in dict.fromkeys(differ))
            raise Refused(f"this hospital's {told} changed since {moment(remembered.at)}, so no study runs; {REMEDY}")
        return moment(remembered.at)

    def begin(self, settings: SiteSettings) -> str:
        """Check the settings; if nobody has accepted any settings yet, accept the present settings."""
        return self.check() or ("" if self.file.exists() and not settings.promise() else self.accept(settings))

    def accept(self, settings: SiteSettings) -> str:
        """Record the present settings as accepted, and return the time of this acceptance as text.

        The returned text is empty if the settings promise no protection of patients.
        """
        from medsilo.site.signed import write_signed

        promises = settings.promise()
        accepted = _SettingsRecord(files=self._now() if promises else {}, at=int(time.time()), promises=promises)
        write_signed(self.file, accepted, self._kit.key_for("settings"))
        return moment(accepted.at) if promises else ""

    def _now(self) -> Mapping[str, str]:
        try:
            found = [*self.local.rglob("*"), *self.local.parent.glob(BESIDE)]
            there = {os.path.relpath(path, self.local): _content(path) for path in found}
            return {name: hashlib.sha256(own).hexdigest() for name, own in there.items() if own is not None}
        except (OSError, ValueError) as error:
            raise Refused(
                f"this hospital's settings cannot be read ({type(error).__name__}), so no study runs; check local/",
                private=str(error),
            ) from error


def _content(path: Path) -> bytes | None:
    """Return a file's content, or the target of a symbolic link to a folder. Return None for a file that neither
    medsilo nor NVFlare reads.
    """
    if path.is_symlink() and path.is_dir():
        return bytes(path.readlink())
    is_read = path.suffix in READ and path.parent.name != "__pycache__" and path.is_file()
    return read_bounded(path, LARGEST_FILE) if is_read else None


def check_there(local: Path) -> None:
    """Raise MedsiloError if a hospital's kit lacks medsilo.yaml, because nothing would protect the hospital's patients
    without medsilo.yaml.
    """
    if not (local / FILE_NAME).exists():
        raise MedsiloError(f"this hospital's {FILE_NAME} is missing in the kit's local/, so no study runs; put it back")


def moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
