"""FedRDN (Yan et al., A Simple Data Augmentation for Feature Distribution Skewed Federated Learning, CVPR 2025)."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, cast

import torch
from pydantic import model_validator
from torch import Generator, Tensor, nn

from medsilo.extend import Group, Phase, Refused, Task
from medsilo.extend.methods import (
    Average,
    Averaging,
    ModelFactory,
    Modules,
    PlanError,
    Private,
    Ranges,
    Tensors,
    TrainContext,
    network,
    seed_for,
    site_mean,
)

# Minimum divisor in the normalisation of an image. A channel whose standard deviation is below the minimum divisor is
# nearly constant, and has no contrast to enhance.
FLATTEST = 0.01
ROUNDED = 1e-4  # maximum value that counts as 0 in the tables of statistics, because secure aggregation rounds sums


def digest_of(image: Tensor) -> str:
    return hashlib.sha256(image.contiguous().cpu().numpy().tobytes()).hexdigest()


class ChannelNorm(nn.Module):
    """Maps images [B, C, ...] to (x − μ) / σ, where μ and σ are statistics of the hospital's images. Before the
    hospital's statistics are computed, images stay unchanged.

    The tables `present` [sites], `means` and `deviations` [sites, C] hold the statistics of all hospitals. In the
    tables that a hospital sends, all rows except the hospital's row are zero, so that the server can add the tables.
    """

    mean: Tensor  # for each channel, the mean over the hospital's images, [C]
    deviation: Tensor
    measured: Tensor
    present: Tensor
    means: Tensor
    deviations: Tensor

    def __init__(self, sites: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))
        self.register_buffer("measured", torch.zeros((), dtype=torch.bool))
        self.register_buffer("present", torch.zeros(sites))
        self.register_buffer("means", torch.zeros(sites, channels))
        self.register_buffer("deviations", torch.zeros(sites, channels))
        self._draws: Generator | None = None
        # indices of the table rows that contain statistics; this tensor stays on the CPU
        self._known = torch.zeros(0, dtype=torch.int64)
        # a seed; together with the content of an image, the seed determines the hospital that is chosen for the image
        self._number: int | None = None

    def _apply(self, *args: Any, **named: Any) -> "ChannelNorm":
        """Move all tensors except `_known` to a device; `_known` is read in every batch. On the CPU, `_known` can be
        read without synchronisation with the GPU.
        """
        super()._apply(*args, **named)
        if self.mean.device.type == "cuda":
            self.measured = self.measured.cpu()
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if not self.measured:
            return images
        mean, deviation = self.mean, self.deviation
        if self._draws is not None and len(self._known):
            drawn = self._known[self._draw_hospitals(images, len(self._known))].to(mean.device, non_blocking=True)
            mean, deviation = self.means[drawn], self.deviations[drawn]
        each = (-1, len(self.mean), *(1,) * (images.ndim - 2))
        return ((images - mean.view(each)) / deviation.view(each)).to(images.dtype)

    def _draw_hospitals(self, images: Tensor, hospitals: int) -> Tensor:
        """Choose a random hospital for each image, and return the index of the hospital's row in the tables."""
        if self._number is None:
            return torch.randint(hospitals, (len(images),), generator=self._draws)
        return torch.tensor([seed_for(self._number, digest_of(image)) % hospitals for image in images])

    @contextmanager
    def drawing(self, random: Generator, by_image: bool = False) -> Iterator[None]:
        """Inside the `with` block, normalise each image with the statistics of a random hospital.

        Args:
            random: The random generator that chooses the hospitals.
            by_image: True if the hospital for an image depends only on the image and a seed, and not on other images in
                the batch.
        """
        self._draws, self._known = random, self.present.cpu().nonzero().flatten()
        self._number = int(torch.randint(2**62, (), generator=random)) if by_image else None
        try:
            yield
        finally:
            self._draws = None

    @torch.no_grad()
    def statistics(self, images: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the mean and the standard deviation of each channel, [B, 2 C], for every batch of images. Before `take`
        is called, images are not normalised.
        """
        self.measured.fill_(False)
        for batch in images:
            values = batch.double().flatten(2)
            yield torch.cat([values.mean(2), values.std(2).nan_to_num(0.0)], 1)

    @torch.no_grad()
    def take(self, statistics: Tensor) -> None:
        """Set the statistics [2 C] that the hospital uses in evaluation."""
        mean, deviation = statistics.chunk(2)
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.clamp(min=FLATTEST))
        self.measured.fill_(True)

    @torch.no_grad()
    def show(self, index: int) -> None:
        """Write the hospital's statistics into its row of the tables, and zeros into the other rows."""
        for table, own in ((self.present, 1.0), (self.means, self.mean), (self.deviations, self.deviation)):
            table.zero_()
            table[index] = own

    @torch.no_grad()
    def share_out(self) -> None:
        """Compute the statistics of all hospitals from the mean of the hospitals' tables."""
        shares = self.present.clone()
        known = shares > ROUNDED
        self.means[known] /= shares[known, None]
        self.deviations[known] = (self.deviations[known] / shares[known, None]).clamp(min=FLATTEST)
        self.present.copy_(known)


INPUT, CHANNELS = "input", "channels"
BRIGHTER = 10  # statistics may be larger than the task's largest input value by at most this factor


class FedRDN(Averaging):
    """FedAvg in which sites train on (x − μ_j) / σ_j, with the statistics of a hospital j that is chosen at random for
    every image.

    The phase "measure" is one round without training. Each site sends the mean and the standard deviation of each
    channel, averaged over the site's training images. Once in a study, each site receives the statistics of all sites.
    In evaluation, a site uses its own statistics.
    """

    title = "FedRDN"
    paper = "Yan et al. 2025"
    sends = "channel statistics, model; the statistics are sent once and forwarded to all hospitals"
    extra_work = "one pass over the images for their statistics"
    suits = "one shared model for images that differ in brightness and contrast"

    name: Literal["fedrdn"] = "fedrdn"

    @model_validator(mode="after")
    def _has_an_input_layer(self) -> Self:
        if self.amplitude:
            raise PlanError("algorithm.amplitude: fedrdn normalises images itself; set the key to null")
        return self

    def networks(self, build: ModelFactory) -> Modules:
        if build.shape is not None and len(build.shape) < 2:
            raise PlanError("algorithm.name: fedrdn normalises images, and a table has no images; choose fedavg")
        return {"model": build(), INPUT: ChannelNorm(len(build.sites), build.channels)}

    def input_layer(self, modules: Modules) -> nn.Module:
        return modules[INPUT]

    def phases(self, rounds: int) -> Sequence[Phase]:
        own = Group(
            CHANNELS,
            tables,
            site_mean,
            "up",
            average=Average(
                "mean and deviation of each channel, averaged over a site's training images", lambda images, _: images
            ),
            unclipped=True,
            title="channel statistics",
            ranges=table_ranges,
            check=of_one_hospital,
            disclosure_notes=lambda tensors: [
                "channels: all other hospitals of the study are given them, too, in the clear"
            ],
            undefended="mixing: no robust rule covers fedrdn's statistics, since only a hospital knows its images; "
            "use fedavg or fedbn",
        )
        everyones = Group(CHANNELS, tables, site_mean, "down", arrived=share_out)
        model = Group("model", network("model"), self.mean)
        return [
            Phase("measure", 1, (own,), self.measure, trains=False, releases=1),
            Phase("train", rounds, (model, everyones), self.train),
        ]

    def private(self) -> Private:
        return Private(
            ("model",), disclosure_notes="the channels' statistics leave once, cut and with noise of their own account"
        )

    def measure(self, context: TrainContext) -> float:
        """Compute μ_k = 1/n Σ_i μ(x_i) and σ_k = 1/n Σ_i σ(x_i), where μ and σ are taken over all positions of a
        channel in image i.
        """
        norm = cast(ChannelNorm, context.modules[INPUT])
        found = norm.statistics(inputs for inputs, _ in context.cases.in_order())
        norm.take(context.private.noisy_mean(found) if context.private else torch.cat(list(found)).mean(0))
        norm.show(context.sites.index(context.site))
        return math.nan

    def measure_unseen(self, modules: Modules, inputs: Callable[[], Iterable[Tensor]]) -> None:
        norm = cast(ChannelNorm, modules[INPUT])
        norm.take(torch.cat(list(norm.statistics(inputs()))).mean(0))

    def train(self, context: TrainContext) -> float:
        """Train with the statistics of a random hospital for every image. If a site missed the round in which
        statistics are computed, the site computes its own statistics before it trains.
        """
        norm = cast(ChannelNorm, context.modules[INPUT])
        if not norm.measured:
            self.measure_unseen(context.modules, lambda: (inputs for inputs, _ in context.cases.in_order()))
        with norm.drawing(context.random, by_image=context.private is not None):
            return context.train()


def tables(modules: Modules) -> Tensors:
    norm = cast(ChannelNorm, modules[INPUT])
    return {"present": norm.present, "means": norm.means, "deviations": norm.deviations}


def table_ranges(modules: Modules, task: Task) -> Ranges:
    """Return the allowed ranges of the values in the tables. Zero is allowed, because a hospital sends rows of zeros
    for all other hospitals.
    """
    largest = BRIGHTER * task.largest_input
    return {"present": (0.0, 1.0), "means": (-largest, largest), "deviations": (0.0, largest)}


def of_one_hospital(tensors: Tensors) -> None:
    """Raise Refused unless the tables contain the statistics of one hospital or, under secure aggregation, the mean of
    several hospitals' tables.
    """
    present = tensors["present"]
    known = present > ROUNDED
    if abs(float(present.sum()) - 1) > ROUNDED or float(present.min()) < -ROUNDED:
        raise Refused("channels/present does not name exactly one hospital")
    if any(bool((tensors[name][~known].abs() > ROUNDED).any()) for name in ("means", "deviations")):
        raise Refused("the tables of channels hold rows of other hospitals")
    if bool((tensors["deviations"][known] < FLATTEST * present[known, None] - ROUNDED).any()):
        raise Refused(f"channels/deviations is below {FLATTEST}")


def share_out(modules: Modules, came: bool) -> None:
    """Store the received statistics of all hospitals; raise Refused if this site has lost statistics that it received
    earlier.
    """
    norm = cast(ChannelNorm, modules[INPUT])
    if came:
        norm.share_out()
    elif not norm.present.any():
        raise Refused("this site has lost the other hospitals' statistics; the server sends them with the next request")
