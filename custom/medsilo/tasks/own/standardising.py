"""Numbers less their mean, divided by their standard deviation: a hospital's own, or the plan's."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from medsilo.tasks.own.columns import Column

Standardise = Literal["site", "plan", "none"]
FURTHEST = 100.0  # standard deviations from the mean, to which inputs are cut
Scales = tuple[Tensor, Tensor]  # what is subtracted of each input, and what it is divided by


def scaled(values: Tensor, scales: Scales) -> Tensor:
    """Return standardised values; those of each input lie along the last axis."""
    means, deviations = scales
    return ((values - means) / deviations).clamp(-FURTHEST, FURTHEST)


def scales_told(names: Sequence[str], told: Mapping[str, Sequence[float]]) -> Scales:
    """Return the scales that a survey told, in the order of these inputs."""
    means, deviations = torch.tensor([told[name] for name in names], dtype=torch.float64).unbind(1)
    return means, deviations


def largest(columns: Sequence[Column], standardise: Standardise) -> float:
    """Return how large an input can be."""
    if standardise != "none":
        return FURTHEST
    return max(1.0, *(max(abs(one.low), abs(one.high)) for one in columns if not one.levels))


def from_training_cases(what: str) -> str:
    """Return why numbers of a hospital's own training cases, such as means, can't be kept private."""
    return (
        f"numbers are scaled or filled in by a hospital's training cases, so one patient changes all others' inputs; "
        f"give public numbers (task.standardise=plan, with mean and deviation of each {what}), or task.standardise=none"
    )


def check_scales(columns: Sequence[Column], standardise: Standardise) -> None:
    """Raise a ValueError where the plan has to give means and deviations, and lacks one."""
    lacking = [one.name for one in columns if not one.levels and None in (one.mean, one.deviation)]
    if standardise == "plan" and lacking:
        raise ValueError(f"standardise: plan needs mean and deviation of every number; {lacking[0]!r} lacks them")
