"""The plans that nnU-Net's own planner makes of a fingerprint, for the memory that the hospitals have."""

import inspect
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch

from medsilo.extend import MedsiloError, files
from medsilo_nnunet import NEEDED, PLANNERS
from medsilo_nnunet.fingerprint import Fingerprint, MeasuredSite
from medsilo_nnunet.nnunet_files import SETTINGS
from medsilo_nnunet.question import SegmentationQuestion

FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")  # nnU-Net reads their places from the environment
ENVIRONMENT = Lock()


@dataclass(frozen=True)
class MadePlans:
    """The content of plans.json, and for which memory it was made."""

    plans: dict[str, Any]
    memory: float  # GB of a GPU
    too_small: tuple[str, ...]  # hospitals with less


def make_plans(
    question: SegmentationQuestion,
    fingerprint: Fingerprint,
    sites: Mapping[str, MeasuredSite],
    planner: str = PLANNERS[0],
    memory: float | None = None,
) -> MadePlans:
    """Return what nnU-Net's planner makes of the fingerprint of all hospitals.

    memory: GB that a GPU must have; by default what the planner is made for, or what the smallest hospital has.
    """
    readers = sorted({one.reader for one in sites.values()})
    if len(readers) != 1:
        raise MedsiloError(f"nnU-Net reads the hospitals' files with {' and '.join(readers)}; agree on one file format")
    known = {site: one.memory for site, one in sites.items() if one.memory is not None}
    kind = _planner(planner)
    usual = float(inspect.signature(kind).parameters["gpu_memory_target_in_gb"].default)
    target = memory or min([usual, *known.values()])
    settings = {
        **question.in_nnunet(),
        "numTraining": fingerprint.cases,
        "file_ending": ".nii.gz",  # not in the plans, which name the reader
        "overwrite_image_reader_writer": readers[0],
        "dataset": {"none": {"images": [""], "label": ""}},  # the planner looks at a case for its reader alone
    }
    name = question.name
    with _home(name) as folder:
        files.write_json(folder / FOLDERS[0] / name / SETTINGS, settings)
        files.write_json(folder / FOLDERS[1] / name / "dataset_fingerprint.json", fingerprint.in_nnunet())
        try:
            # Its networks are only counted, so they need no memory.
            with redirect_stdout(io.StringIO()), torch.device("meta"):
                planned = kind(name, gpu_memory_target_in_gb=target)
                planned.plan_experiment()
        except Exception as error:
            raise MedsiloError(
                f"nnU-Net's planner fails on this fingerprint ({type(error).__name__}); check spacings and sizes",
                private=str(error),
            ) from error
        plans = json.loads((folder / FOLDERS[1] / name / f"{planned.plans_identifier}.json").read_text("utf-8"))
    return MadePlans(plans, target, tuple(sorted(site for site, own in known.items() if own < target)))


def unsure_keys(
    plans: Mapping[str, Any], fingerprints: Sequence[Fingerprint], plan: Callable[[Fingerprint], Mapping[str, Any]]
) -> list[str]:
    """Return the keys of each configuration that exact numbers might have changed, where numbers cover several cases.

    A group's middle stands for its cases, so ranks are off by up to half a group in each hospital: the plans are made
    again with all medians so many ranks lower and higher.
    """
    ranks = sum(one.least // 2 for one in fingerprints)
    if not ranks:
        return []
    own, whole = plans["configurations"], Fingerprint.merged(fingerprints)
    found = set[str]()
    for shift in (-ranks, ranks):
        other = plan(whole.shifted(shift))["configurations"]
        found |= own.keys() ^ other.keys()
        for name in own.keys() & other.keys():
            found |= {f"{name}.{key}" for key in own[name] if own[name][key] != other[name].get(key)}
    return sorted(found)


def _planner(name: str) -> Any:
    """Return nnU-Net's planner of this name."""
    if name not in PLANNERS:
        raise MedsiloError(f"nnU-Net's planner {name} is not known; choose one of {', '.join(PLANNERS)}")
    with MedsiloError.needing(NEEDED):
        from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
        from nnunetv2.experiment_planning.experiment_planners.residual_unets import residual_encoder_unet_planners
    return ExperimentPlanner if name == PLANNERS[0] else getattr(residual_encoder_unet_planners, name)


@contextmanager
def _home(name: str) -> Iterator[Path]:
    """Give nnU-Net empty folders for a data set of this name, and put the environment back."""
    with ENVIRONMENT, TemporaryDirectory() as temporary:
        before = {key: os.environ[key] for key in FOLDERS if key in os.environ}
        for key in FOLDERS:
            (Path(temporary) / key / name).mkdir(parents=True)
            os.environ[key] = str(Path(temporary) / key)
        try:
            yield Path(temporary)
        finally:
            for key in FOLDERS:
                del os.environ[key]
            os.environ.update(before)
