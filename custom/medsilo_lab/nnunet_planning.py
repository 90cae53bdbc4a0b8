"""Run nnU-Net's planner on a joint fingerprint, for the memory of the hospitals' GPUs."""

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

from medsilo.core import files
from medsilo.core.errors import MedsiloError
from medsilo_nnunet import NEEDED, PLANNERS
from medsilo_nnunet.fingerprint import Fingerprint, MeasuredSite
from medsilo_nnunet.nnunet_files import SETTINGS
from medsilo_nnunet.question import SegmentationQuestion

FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
ENVIRONMENT = Lock()


@dataclass(frozen=True)
class MadePlans:
    plans: dict[str, Any]
    memory: float
    too_small: tuple[str, ...]


def make_plans(
    question: SegmentationQuestion,
    fingerprint: Fingerprint,
    sites: Mapping[str, MeasuredSite],
    planner: str = PLANNERS[0],
    memory: float | None = None,
) -> MadePlans:
    """Make plans with nnU-Net's planner from the joint fingerprint of all hospitals.

    Args:
        memory: The GPU memory for the plans, in GB. The default is the planner's standard, or less if a hospital's GPU
            has less memory.
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
        "file_ending": ".nii.gz",  # nnU-Net's planner requires this key, but does not write its value into the plans
        "overwrite_image_reader_writer": readers[0],
        # nnU-Net's planner reads the cases only to choose a reader class; because the reader class is given, one empty
        # case suffices
        "dataset": {"none": {"images": [""], "label": ""}},
    }
    name = question.name
    with _home(name) as folder:
        files.write_json(folder / FOLDERS[0] / name / SETTINGS, settings)
        files.write_json(folder / FOLDERS[1] / name / "dataset_fingerprint.json", fingerprint.in_nnunet())
        try:
            # nnU-Net's planner only computes the memory of networks, so networks on the meta device are enough
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
    """Return the keys of nnU-Net's configurations that could have other values if the hospitals had disclosed exact
    numbers.

    A hospital sorts its cases into groups, and discloses only the middle case of each group. The rank of each median is
    therefore uncertain by half a group per hospital. To find uncertain keys, the plans are made two more times, with
    the lowest and the highest possible medians.
    """
    ranks = sum(fingerprint.least // 2 for fingerprint in fingerprints)
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
    if name not in PLANNERS:
        raise MedsiloError(f"nnU-Net's planner {name} is not known; choose one of {', '.join(PLANNERS)}")
    with MedsiloError.needing(NEEDED):
        from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
        from nnunetv2.experiment_planning.experiment_planners.residual_unets import residual_encoder_unet_planners
    return ExperimentPlanner if name == PLANNERS[0] else getattr(residual_encoder_unet_planners, name)


@contextmanager
def _home(name: str) -> Iterator[Path]:
    """Set nnU-Net's environment variables to empty folders for a data set, and restore the variables afterwards."""
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
