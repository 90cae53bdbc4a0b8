"""Check whether a machine can train: Python, packages, disk, memory, device and airlock."""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo.check.result import Finding
from medsilo.core.errors import MedsiloError
from medsilo.core.package import ROOT
from medsilo.core.text import counted, size_text
from medsilo.site.settings import SiteSettings

if TYPE_CHECKING:
    from medsilo.plan import Plan

CARDS = ("nvidia*", "nvmap", "kfd", "dxg")  # patterns of device files that exist on Linux machines with a GPU
PLATFORM = "nvflare"  # all sites must have the same major and minor version of NVFlare
ROOM = 1 << 30  # bytes of disk space for logs and NVFlare's files, which a run needs besides its results
CHECKS = {
    "environment": "Python and every required package, in the versions that medsilo is tested with",
    "disk": "the output folder is writable, has enough free space, and lies outside the folder of the data set",
    "device": "this machine has the device, precision and CPU threads that the settings name",
    "airlock": "unless `airlock` is `off`: whether this machine can run "
    "[training scripts in a sandbox](../trust/airlock.md)",
}


def required_versions() -> dict[str, str]:
    pins = (line.partition("==") for line in (ROOT / "tested.txt").read_text("utf-8").splitlines())
    return {name: version for name, _, version in pins if version}


def check_environment(required: Mapping[str, str]) -> Iterator[Finding]:
    """Check that Python packages are installed in the versions with which medsilo is tested."""
    where, python = "environment", ".".join(map(str, sys.version_info[:3]))
    others = []
    for name, version in required.items():
        wanted = f"pip install {name}=={version}"
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(where, "stops", f"the package {name} is missing", wanted)
            continue
        if installed.partition("+")[0] == version:  # a suffix of PyTorch's version, such as +cu126, names the device
            continue
        if name == PLATFORM and installed.split(".")[:2] != version.split(".")[:2]:
            yield Finding(where, "stops", f"{name} is {installed}, all sites run {version}", wanted)
        else:
            others.append(f"{name} {installed} ({version})")
    if others:
        told = f"other versions than medsilo is tested with (in brackets): {', '.join(others)}"
        yield Finding(where, "note", told, "install requirements.txt where results must agree to the last digit")
    yield Finding(where, "ok", f"Python {python}, {len(required)} packages looked at")


def check_disk(output: Path, plan: "Plan | None", free: Callable[[Path], int]) -> Finding:
    while not output.exists():
        output = output.parent
    if not output.is_dir() or not os.access(output, os.W_OK):
        told, remedy = "the folder for results can't be written by this account", "correct 'output' in medsilo.yaml"
        return Finding("disk", "stops", told, f"{remedy}, or the folder's rights", (str(output),))
    there, needed = free(output), kept(plan) if plan else 0
    told = f"{size_text(there)} free" + (f", a run keeps at most {size_text(needed)}" if plan else "")
    if there < needed:
        return Finding("disk", "stops", told, "free space, or set 'output' in medsilo.yaml to a larger disk")
    if there < needed + ROOM:
        return Finding("disk", "note", told, "leave 1 GB more for logs and NVFlare's own files")
    return Finding("disk", "ok", told)


def check_apart(settings: SiteSettings, local: Path | None) -> Iterator[Finding]:
    """Yield a finding if results would be written into a folder of the data, where they could be mistaken for data."""
    source, output = settings.data, settings.studies_in(local.parent) if local else settings.output
    folders = [source.folder, source.data_set or source.folder] if source else []
    if output and any(output.resolve().is_relative_to(folder.resolve()) for folder in folders):
        told = "the folder for results is, or lies in, the folder of the data set, where results could pass for data"
        yield Finding("disk", "note", told, "set 'output' in medsilo.yaml to another folder", (str(output),))


def weights_of(plan: "Plan") -> tuple[int, int]:
    """Return the total bytes of all networks of a plan, and an upper bound on the bytes of the optimizers."""
    weights = sum(tensor.nbytes for module in plan.layout().values() for tensor in module.state_dict().values())
    remembered = int(plan.training.momentum > 0) if plan.training.optimizer == "sgd" else 2  # per weight
    return weights, remembered * weights


def kept(plan: "Plan") -> int:
    """Estimate an upper bound on the disk space, in bytes, of the checkpoints and models that a run leaves at a
    site.
    """
    weights, slots = weights_of(plan)
    return 3 * (weights + slots) + 3 * weights


def check_memory(plan: "Plan", free: int) -> Finding | None:
    weights, slots = weights_of(plan)
    if 2 * weights + slots <= free:
        return None
    told = f"networks, gradients and optimizers take {size_text(2 * weights + slots)}, {size_text(free)} are free"
    return Finding("memory", "stops", told, "end other programs, or use a machine with more memory")


def check_device(settings: SiteSettings) -> Iterator[Finding]:
    """Check that this machine has the device, and supports the precision, that the settings name.

    PyTorch is imported only if the machine may have a GPU, because importing PyTorch takes a second.
    """
    where, cores, threads = "device", os.cpu_count() or 1, counted(settings.threads, "thread")
    if settings.device == "cpu" or (settings.device == "auto" and not may_have_gpu()):
        yield Finding(where, "ok", f"cpu, {settings.precision}, {cores} CPU cores, {threads}")
        return
    import torch

    try:
        compute = settings.compute()
    except MedsiloError as error:
        yield Finding(where, "stops", str(error))
        return
    own = "" if compute.on_card else f", {cores} CPU cores"
    yield Finding(where, "ok", f"{compute.description}{own}, {threads}")
    if compute.on_card and settings.precision == "bfloat16" and not torch.cuda.is_bf16_supported():
        yield Finding(where, "stops", "this GPU has no bfloat16", "set precision: float32 in medsilo.yaml")


def check_airlock(settings: SiteSettings) -> Iterator[Finding]:
    """If the hospital's settings ask for an airlock, report whether this machine can run training scripts in an
    airlock.
    """
    from medsilo.airlock.room import ability

    if settings.airlock == "off":
        return
    able = ability()
    if not able.works:
        told = f"no training script can run in a room here: {able.lacks[0]}"
        if settings.airlock == "required":
            yield Finding("airlock", "stops", told, "without it jobs with scripts are refused (airlock: required)")
        else:
            yield Finding("airlock", "note", told, "until then scripts run as this account (airlock: wanted)")
        return
    yield Finding("airlock", "ok", "training scripts run in a room without network, and read what room.reads names")
    for lack in able.lacks:
        yield Finding("airlock", "note", lack)


def without_walls(settings: SiteSettings) -> str:
    """Return the reason why this machine can't make the airlock that the hospital wants, or "" if it can."""
    from medsilo.airlock.room import ability

    if settings.airlock != "wanted" or ability().works:
        return ""
    return f"this hospital wants its airlock, and this machine can't make one: {ability().lacks[0]}"


def may_have_gpu() -> bool:
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in CARDS)
