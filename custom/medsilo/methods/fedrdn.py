"""FedRDN: Yan et al., A Simple Data Augmentation for Feature Distribution Skewed Federated Learning, CVPR 2025."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn

from medsilo.core.errors import PlanError, Refused
from medsilo.core.tensors import Modules, Tensors
from medsilo.course.declared import Private
from medsilo.course.group import Average, Group, Ranges, network
from medsilo.course.phase import Phase
from medsilo.course.server_side import ServerSide
from medsilo.course.workbench import Blueprint, Workbench
from medsilo.learning.channel_norm import FLATTEST, ROUNDED, ChannelNorm
from medsilo.learning.training import Training
from medsilo.methods.fedavg import Averaging
from medsilo.mixing.mixers import Mixer, UniformMean
from medsilo.tasks.task import Task

INPUT, CHANNELS = "input", "channels"
BRIGHTER = 10  # times the task's brightest image


class FedRDN(Averaging):
    """FedAvg whose sites train on (x − μ_j) / σ_j, with the statistics of a hospital j drawn for every image.

    Phase "measure" is one round without training: every site sends the mean and the deviation of each channel, averaged
    over its training images. All sites are given all of them once. In evaluation a site takes its own.
    """

    title = "FedRDN"
    paper = "Yan et al. 2025"

    name: Literal["fedrdn"] = "fedrdn"

    @model_validator(mode="after")
    def _has_an_input_layer(self) -> Self:
        if self.amplitude:
            raise PlanError("algorithm.amplitude: fedrdn normalises images itself; set it to null")
        return self

    def networks(self, build: Blueprint) -> Modules:
        if not build.sites:
            raise PlanError("participation.sites: fedrdn draws one hospital of all, so the plan has to name them")
        if build.shape is not None and len(build.shape) < 2:
            raise PlanError("algorithm.name: fedrdn normalises images, and a table's columns are none; choose fedavg")
        return {"model": build(), INPUT: ChannelNorm(len(build.sites), build.channels)}

    def input_layer(self, modules: Modules) -> nn.Module:
        return modules[INPUT]

    def phases(self, training: Training) -> Sequence[Phase]:
        own = Group(
            CHANNELS,
            tables,
            hospitals_count_alike,
            "up",
            average=Average(
                "mean and deviation of each channel, averaged over a site's training images", lambda images, _: images
            ),
            wide=True,
            title="channel statistics",
            ranges=table_ranges,
            check=of_one_hospital,
            says=lambda tensors: ["channels: all other hospitals of the study are given them, too, in the clear"],
            undefended="mixing: each hospital alone tells of its images, so no robust rule can hold for fedrdn's "
            "statistics; use fedavg or fedbn",
        )
        everyones = Group(CHANNELS, tables, hospitals_count_alike, "down", arrived=share_out)
        model = Group("model", network("model"), self.mean)
        return [
            Phase("measure", 1, (own,), self.measure, trains=False, releases=1),
            Phase("train", training.rounds, (model, everyones), self.train),
        ]

    def private(self) -> Private:
        return Private(("model",), says="the channels' statistics leave once, cut and with noise of their own account")

    def measure(self, bench: Workbench) -> float:
        """μ_k = 1/n Σ_i μ(x_i), σ_k = 1/n Σ_i σ(x_i), over the positions of each channel of image i."""
        norm = cast(ChannelNorm, bench.modules[INPUT])
        found = norm.statistics(inputs for inputs, _ in bench.data())
        norm.take(bench.private.noisy_mean(found) if bench.private else torch.cat(list(found)).mean(0))
        norm.show(bench.sites.index(bench.site))
        return math.nan

    def measure_unseen(self, modules: Modules, inputs: Callable[[], Iterable[Tensor]]) -> None:
        norm = cast(ChannelNorm, modules[INPUT])
        norm.take(torch.cat(list(norm.statistics(inputs()))).mean(0))

    def train(self, bench: Workbench) -> float:
        """Every image takes the statistics of a drawn hospital; a site that missed the first round has no own yet."""
        norm = cast(ChannelNorm, bench.modules[INPUT])
        if not norm.measured:
            self.measure_unseen(bench.modules, lambda: (inputs for inputs, _ in bench.data()))
        with norm.drawing(bench.random, by_image=bench.private is not None):
            return bench.train()


def tables(modules: Modules) -> Tensors:
    """Return the tables of all hospitals' statistics, without what a hospital keeps as its own."""
    norm = cast(ChannelNorm, modules[INPUT])
    return {"present": norm.present, "means": norm.means, "deviations": norm.deviations}


def table_ranges(modules: Modules, task: Task) -> Ranges:
    """Return what a row can hold: the mean and deviation of the task's images, or nothing."""
    largest = BRIGHTER * task.largest_input
    return {"present": (0.0, 1.0), "means": (-largest, largest), "deviations": (0.0, largest)}


def of_one_hospital(tensors: Tensors) -> None:
    """Raise Refused when neither one hospital has such tables nor, where they were sealed, several of them."""
    present = tensors["present"]
    known = present > ROUNDED
    if abs(float(present.sum()) - 1) > ROUNDED or float(present.min()) < -ROUNDED:
        raise Refused("channels/present does not name one hospital")
    if any(bool((tensors[name][~known].abs() > ROUNDED).any()) for name in ("means", "deviations")):
        raise Refused("channels holds rows of other hospitals")
    if bool((tensors["deviations"][known] < FLATTEST * present[known, None] - ROUNDED).any()):
        raise Refused(f"channels/deviations is below {FLATTEST}")


def hospitals_count_alike(server: ServerSide) -> Mixer:
    """Return what adds the tables up."""
    return UniformMean()


def share_out(modules: Modules, came: bool) -> None:
    """Hold on to the statistics of all hospitals."""
    norm = cast(ChannelNorm, modules[INPUT])
    if came:
        norm.share_out()
    elif not norm.present.any():
        raise Refused("this site has lost the statistics of all hospitals; they are sent with the next request")
