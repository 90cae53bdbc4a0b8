"""Normalise images by the channels' mean and deviation: a hospital's own, or those of one drawn for each image."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from medsilo.learning.seeds import seed_for

FLATTEST = 0.01  # no image is divided by less: a channel in which everything is alike has no contrast to bring out
ROUNDED = 1e-4  # shares below it are none: sums that were sealed are rounded


def digest_of(image: Tensor) -> str:
    """Return a hash of an image."""
    return hashlib.sha256(image.contiguous().cpu().numpy().tobytes()).hexdigest()


class ChannelNorm(nn.Module):
    """x ↦ (x − μ) / σ for images [B, C, ...], by the statistics of the hospital; unchanged before they are measured.

    The tables `present` [sites], `means` and `deviations` [sites, C] are those of all hospitals. While a hospital sends
    its own, they are zero but in its own row, so that they add up at the server.
    """

    mean: Tensor  # [C], the hospital's own
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
        self._number: int | None = None  # with which each image draws by itself
        self._measures = False

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """[B, C, ...] to the same shape and type."""
        if self._measures or not self.measured:
            return images
        mean, deviation = self.mean, self.deviation
        known = self.present.nonzero().flatten()
        if self._draws is not None and len(known):
            drawn = known[self._drawn(images, len(known)).to(known.device)]
            mean, deviation = self.means[drawn], self.deviations[drawn]
        each = (-1, len(self.mean), *(1,) * (images.ndim - 2))
        return ((images - mean.view(each)) / deviation.view(each)).to(images.dtype)

    def _drawn(self, images: Tensor, hospitals: int) -> Tensor:
        """Return the hospital that is drawn for each image."""
        if self._number is None:
            return torch.randint(hospitals, (len(images),), generator=self._draws)
        return torch.tensor([seed_for(self._number, digest_of(image)) % hospitals for image in images])

    @contextmanager
    def drawing(self, random: Generator, by_image: bool = False) -> Iterator[None]:
        """Inside, every image takes the statistics of a hospital that is drawn for it.

        by_image: what is drawn follows from the image and a number, so that no image changes another's.
        """
        self._draws = random
        self._number = int(torch.randint(2**62, (), generator=random)) if by_image else None
        try:
            yield
        finally:
            self._draws = None

    @torch.no_grad()
    def statistics(self, images: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield [B, 2 C]: every image's means and deviations over a channel's positions. Meanwhile images pass as
        they are."""
        self._measures = True
        try:
            for batch in images:
                values = batch.double().flatten(2)
                yield torch.cat([values.mean(2), values.std(2).nan_to_num(0.0)], 1)
        finally:
            self._measures = False

    @torch.no_grad()
    def take(self, statistics: Tensor) -> None:
        """Set the hospital's own [2 C]."""
        mean, deviation = statistics.chunk(2)
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.clamp(min=FLATTEST))
        self.measured.fill_(True)

    @torch.no_grad()
    def show(self, place: int) -> None:
        """Put the hospital's own into its row of the tables, and nothing into the others."""
        for table, own in ((self.present, 1.0), (self.means, self.mean), (self.deviations, self.deviation)):
            table.zero_()
            table[place] = own

    @torch.no_grad()
    def share_out(self) -> None:
        """Make the statistics of all hospitals of the mean of their tables."""
        shares = self.present.clone()
        known = shares > ROUNDED
        self.means[known] /= shares[known, None]
        self.deviations[known] = (self.deviations[known] / shares[known, None]).clamp(min=FLATTEST)
        self.present.copy_(known)
