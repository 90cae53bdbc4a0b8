"""The machine that is to train: Python, packages, medsilo itself, disk, device."""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from medsilo.check.result import Finding
from medsilo.core.errors import MedsiloError
from medsilo.core.package import ROOT
from medsilo.core.text import counted, size_text
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings

PLATFORM = "nvflare"  # must be of the same release at all sites; the others may differ in digits
ROOM = 1 << 30  # bytes beside the results for logs and NVFlare's own files


def required_versions() -> dict[str, str]:
    """The versions medsilo is tested with."""
    pins = (line.partition("==") for line in (ROOT / "tested.txt").read_text("utf-8").splitlines())
    return {name: version for name, _, version in pins if version}


def check_environment(required: Mapping[str, str]) -> Iterator[Finding]:
    """Python and the packages: there, of the versions that medsilo is tested with."""
    where, python = "environment", ".".join(map(str, sys.version_info[:3]))
    others = []
    for name, version in required.items():
        wanted = f"pip install {name}=={version}"
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(where, "stops", f"the package {name} is missing", wanted)
            continue
        if installed.partition("+")[0] == version:  # +cu126 and the like only say for which device it was built
            continue
        if name == PLATFORM and installed.split(".")[:2] != version.split(".")[:2]:
            yield Finding(where, "stops", f"{name} is {installed}, all sites run {version}", wanted)
        else:
            others.append(f"{name} {installed} ({version})")
    if others:
        told = f"other versions than medsilo is tested with (in brackets): {', '.join(others)}"
        yield Finding(where, "note", told, "install requirements.txt where results must agree to the last digit")
    yield Finding(where, "ok", f"Python {python}, {len(required)} packages looked at")


def check_disk(output: Path, plan: Plan | None, free: Callable[[Path], int]) -> Finding:
    """The results' folder: writable, with room for what a run keeps there."""
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


def weights_of(plan: Plan) -> tuple[int, int]:
    """Bytes of all the method's networks, and of what optimizers keep beside them at most."""
    weights = sum(tensor.nbytes for module in plan.layout().values() for tensor in module.state_dict().values())
    remembered = int(plan.training.momentum > 0) if plan.training.optimizer == "sgd" else 2  # numbers of each weight
    return weights, remembered * weights


def kept(plan: Plan) -> int:
    """The most bytes that a run leaves at a site: the state after three rounds, two models, the super model."""
    weights, slots = weights_of(plan)
    return 3 * (weights + slots) + 3 * weights


def check_memory(plan: Plan, free: int) -> Finding | None:
    """Return a finding if networks, gradients and optimizers alone need too much memory, so that nobody need try."""
    weights, slots = weights_of(plan)
    if 2 * weights + slots <= free:
        return None
    told = f"networks, gradients and optimizers take {size_text(2 * weights + slots)}, {size_text(free)} are free"
    return Finding("memory", "stops", told, "end other programs, or use a machine with more memory")


def check_device(settings: SiteSettings) -> Iterator[Finding]:
    """The device and precision of the settings."""
    where = "device"
    try:
        compute = settings.compute()
    except MedsiloError as error:
        yield Finding(where, "stops", str(error))
        return
    cores, kind = os.cpu_count() or 1, compute.device.type
    own = "" if compute.on_card else f", {cores} CPU cores"
    told = f"{compute.description}{own}, {counted(settings.threads, 'thread')}"
    yield Finding(where, "ok", told)
    if kind == "cuda" and settings.precision == "bfloat16" and not torch.cuda.is_bf16_supported():
        yield Finding(where, "stops", "this GPU has no bfloat16", "set precision: float32 in medsilo.yaml")
