"""The settings of a site as the command line gives them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    from medsilo.site.settings import SiteSettings


def folder_of_settings(folder: Path | None, kit: Path | None = None) -> Path | None:
    """Return the folder, or that of a kit; an error if one was given and is not there."""
    if folder and kit:
        raise MedsiloError("--kit and --settings both name settings; give one of them")
    folder = kit / "local" if kit else folder
    if folder and not folder.is_dir():
        raise MedsiloError("there is no such folder of settings; give the folder that holds medsilo.yaml", str(folder))
    return folder


def settings_of(
    device: str | None,
    data: Path | None,
    site_config: Path | None = None,
    before: "SiteSettings | None" = None,
    **more: Any,
) -> "SiteSettings":
    """Return the command line's settings over a site's own, or over those that a run had before.

    They are for work that stays on this machine, which needs no approval.
    """
    from medsilo.site.settings import FILE_NAME, EachSites, SiteSettings, make_settings, read_settings_of_all

    local = folder_of_settings(site_config)
    if local and not any(local.glob(FILE_NAME)) and not any(local.glob(f"*/{FILE_NAME}")):
        raise MedsiloError(f"the folder of settings has no {FILE_NAME}; give the one that has it", str(local))
    settings = read_settings_of_all(local) if local else before or SiteSettings()
    given = {"device": device, "data": data and data.resolve()}
    said: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    said["approval"] = "none"
    if isinstance(settings, EachSites):
        settings = settings.changed({**said, **more}, "the command line")
    else:
        settings = make_settings({**settings.model_dump(), **said, **more}, "the command line")
    if device:
        check_device(settings)
    return settings


def check_device(settings: "SiteSettings") -> None:
    """Raise an error in the words of the command line if the device that was typed there is not on this machine."""
    try:
        settings.compute()
    except MedsiloError as error:
        raise MedsiloError(
            f"--device {settings.device}: this machine does not have it; give --device cpu, or install a CUDA build of "
            "torch",
            error.private,
        ) from error
