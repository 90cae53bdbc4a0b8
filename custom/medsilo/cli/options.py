"""Define the options that several commands share, and check the options' values.

To keep `--help` fast, this module imports no large packages.
"""

import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medsilo.cli import completion
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    from medsilo.site.settings import SiteSettings


# ---------------------------------------------------------------------------------------------------- values
def output_folder(value: object) -> Path:
    """Return the path of an output folder, and raise a ValueError if this account cannot write to the folder."""
    path = Path(str(value))
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} can't be written: {path} is a file; choose a folder")
    _try_to_write(path, path)
    return path


def output_file(value: object) -> Path:
    """Return the path of an output file, and raise a ValueError if this account cannot write the file."""
    path = Path(str(value))
    if path.is_dir():
        raise ValueError(f"{path} can't be written: {path} is a folder; give the name of a file")
    _try_to_write(path, path.parent)
    return path


def _try_to_write(wanted: Path, folder: Path) -> None:
    """Create and remove a temporary file in the nearest existing folder, because permissions alone do not prove write
    access.
    """
    place = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
    if not place.is_dir():
        raise ValueError(f"{wanted} can't be written: {place} is a file; choose another folder")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".medsilo-"):
            pass
    except OSError as error:
        # a file system such as /proc raises ENOENT for every new file
        why = "takes no files" if error.errno == errno.ENOENT else f"reports {os.strerror(error.errno or 0).lower()!r}"
        raise ValueError(f"{wanted} can't be written: {place} {why}; choose another folder") from error


# ---------------------------------------------------------------------------------------------------- options
def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """Return a command-line option that takes a value.

    Args:
        names: names that differ from the name of the parameter
    """
    return typer.Option(*names, metavar=metavar, help=help, **more)


def several(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """Return a command-line option that users may repeat."""
    return option(metavar, help, *names, default_factory=list, show_default=False, **more)


DEVICES = "auto, cpu, cuda or cuda:<n>"
SETTINGS_FOLDER = "a folder with a medsilo.yaml, which describes the data (medsilo docs start/your-data)"
SETTINGS_OF_SITES = f"{SETTINGS_FOLDER}. FOLDER/SITE/medsilo.yaml replaces it for one site"
DATA = "folder with the sites' data, for tasks that read a data folder"

A_JOB = typer.Argument(
    help="a job's folder, such as jobs/fedavg, or the name of a job in medsilo, such as fedavg",
    autocompletion=completion.jobs,
)
Job = Annotated[str, A_JOB]
JobOrNone = Annotated[str | None, A_JOB]
PlanFile = Annotated[
    Path | None,
    option(
        "PLAN",
        "run the job's method with this plan, such as jobs/fedavg/plans/nifti-folder.yaml, "
        "instead of the job's own plan",
        "--plan",
    ),
]
Changes = Annotated[
    list[str],
    several(
        "KEY=VALUE",
        "change a key of the plan, such as training.rounds=3; may be repeated ('medsilo docs KEY' explains a key)",
        "--set",
        autocompletion=completion.changes,
    ),
]
_FOLDER = option("FOLDER", "output folder", "--out", "-o", parser=output_folder)
OUT_FILE = option("FILE", "output file", "--out", "-o", parser=output_file)
OutFolder = Annotated[Path, _FOLDER]
OutFolderOrNone = Annotated[Path | None, _FOLDER]
OutFile = Annotated[Path, OUT_FILE]
OutFileOrNone = Annotated[Path | None, OUT_FILE]
Engine = Annotated[
    Literal["simulator", "inprocess"],
    option(
        "ENGINE",
        "simulator; or inprocess, which gives the same results in one process, without NVFlare",
        case_sensitive=False,
    ),
]
OWN_KIT = "your own kit, from the consortium's lead"
Kit = Annotated[Path, option("KIT", OWN_KIT)]
SITES_KIT = "this site's kit: the folder with startup/ and local/"
SiteKit = Annotated[Path | None, option("KIT", SITES_KIT, "--kit")]
Threads = Annotated[
    int | None, option("N", "number of sites that train at once (default: as many as memory allows)", min=1)
]
Device = Annotated[str | None, option("DEVICE", f"{DEVICES} (default: auto)")]
DeviceOfRun = Annotated[str | None, option("DEVICE", f"{DEVICES} (default: the run's device)")]
Data = Annotated[Path | None, option("FOLDER", DATA)]
DataOfRun = Annotated[Path | None, option("FOLDER", f"{DATA} (default: the run's folder)")]
SettingsFolder = Annotated[Path | None, option("FOLDER", SETTINGS_FOLDER, "--settings")]
SettingsOfSites = Annotated[Path | None, option("FOLDER", SETTINGS_OF_SITES, "--settings")]
Model = Annotated[Path, typer.Argument(help="a run folder, or the folder of a super model")]
ModelOf = Annotated[
    str, option("SITE", "use this hospital's personal model in the run, not the shared model", "--site")
]
Runs = Annotated[list[Path], typer.Argument(help="folders of runs")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="the job's id that 'medsilo submit' printed")]


def check_changes(changes: list[str], job: Path | str | None = None, plan: Path | None = None, **sections: Any) -> None:
    """Raise an error if --set names a key that the plan does not have, without loading PyTorch."""
    if changes:
        from medsilo.cli.plan_keys import as_written, check_keys

        check_keys(changes, as_written(job, plan) | sections)


def folder_of_settings(folder: Path | None, kit: Path | None = None) -> Path | None:
    """Return the folder with medsilo.yaml: --settings, or local/ in --kit. Raise MedsiloError if the folder does not
    exist.
    """
    if folder and kit:
        raise MedsiloError("--kit and --settings both name a folder of settings; give only one of these options")
    folder = kit / "local" if kit else folder
    if folder and not folder.is_dir():
        raise MedsiloError("there is no such folder of settings; give the folder that holds medsilo.yaml", str(folder))
    return folder


def folder_of_site(folder: Path | None, site: str) -> Path | None:
    """Return the subfolder with a site's own settings, or the common folder if the site has none."""
    from medsilo.site.settings import FILE_NAME

    return folder / site if folder and (folder / site / FILE_NAME).is_file() else folder


def settings_of_owner(*args: Any) -> "SiteSettings":
    """Return the settings of `settings_of`, with all permissions that a person who owns all sites can give."""
    from medsilo.site.settings import ALL_MINE

    return settings_of(*args, **ALL_MINE)


def settings_of(
    device: str | None,
    data: Path | None,
    settings_folder: Path | None = None,
    before: "SiteSettings | None" = None,
    **more: Any,
) -> "SiteSettings":
    """Return the settings for a command that runs on this machine only, with the values of its options.

    Such work sends nothing, so the hospital need not approve its plan.

    Args:
        device: the device of the command line
        before: the settings of an earlier run, which apply without a settings folder
    """
    from medsilo.site.settings import FILE_NAME, SiteSettings, read_settings_of_all

    local = folder_of_settings(settings_folder)
    if local and not any(local.glob(FILE_NAME)) and not any(local.glob(f"*/{FILE_NAME}")):
        raise MedsiloError(f"the folder of settings has no {FILE_NAME}; give a folder with {FILE_NAME}", str(local))
    settings = read_settings_of_all(local) if local else before or SiteSettings()
    given = {"device": device, "data": data and data.resolve(), "approval": "none"}
    said = {key: value for key, value in given.items() if value is not None}
    settings = settings.changed({**said, **more}, "the command line")
    if device:
        settings.compute()  # raises an error if this machine lacks the device
    return settings


Live = Annotated[
    bool,
    typer.Option(
        "--live", help="serve a web page on this machine that shows curves and rounds, and that can stop the run"
    ),
]
TensorBoard = Annotated[
    bool,
    typer.Option("--tensorboard", help="write scores and losses for TensorBoard into each run folder"),
]


def run_settings(run: Path) -> "SiteSettings":
    """Return the settings that the simulator stored in a run's folder, or the default settings if it stored none."""
    from medsilo.runs import paths
    from medsilo.site.settings import read_settings_of_all

    return read_settings_of_all(run / paths.NVFLARE / "local")
