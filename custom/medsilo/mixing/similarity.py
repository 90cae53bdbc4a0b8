"""Work out who learns from whom: distances between the sites' statistics and weights W (AdaFed, Eqs. 5 to 8)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError

LayerStatistics = Sequence[tuple[Tensor, Tensor]]  # per layer: mean [channels] and variance [channels]


def wasserstein_distances(statistics: Sequence[LayerStatistics]) -> Tensor:
    """d_ij = Σ_l sqrt(‖μ_i^l − μ_j^l‖² + ‖√r_i^l − √r_j^l‖²), Eqs. 5 and 6: [N, N] in double precision.

    statistics: one list of (mean μ, variance r) per site, with the same layers everywhere. Each layer's term is the
    2-Wasserstein distance of two Gaussian distributions with diagonal covariance.
    """
    if not statistics or not statistics[0]:
        raise MedsiloError("no statistics to compare: every site must send those of at least one layer")
    shapes = [_shapes(site) for site in statistics]
    for place, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise MedsiloError(
                f"the statistics of site {place} are of layers {shape}, those of site 0 of {shapes[0]}; "
                "all sites must measure the same network"
            )
    distances = torch.zeros(len(statistics), len(statistics), dtype=torch.float64)
    for layer in zip(*statistics, strict=True):
        means = torch.stack([mean.detach().cpu().double() for mean, _ in layer])
        variances = torch.stack([variance.detach().cpu().double() for _, variance in layer])
        if not (means.isfinite().all() and variances.isfinite().all() and (variances >= 0).all()):
            raise MedsiloError("statistics must be finite, and variances not negative")
        points = torch.cat([means, variances.sqrt()], dim=1)
        # not by matrix products: they would lose the small distances, which weigh most
        distances += torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distances


def mixing_weights(distances: Tensor, self_weight: float) -> Tensor:
    """W [N, N] of Eqs. 7 and 8: w_ii = λ, and 1 − λ is shared among the others in proportion to 1 / d_ij.

    Sites at distance zero from site i are its twins: they share 1 − λ alone. A single site has W = [[1]].
    """
    distances = distances.detach().to("cpu", torch.float64)
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1] or not len(distances):
        raise MedsiloError(f"distances have shape {list(distances.shape)}: they must be N x N")
    if not distances.isfinite().all() or (distances < 0).any():
        raise MedsiloError("distances must be finite and not negative")
    if not 0 <= self_weight <= 1:
        raise MedsiloError(f"self_weight is {self_weight!r}: λ must lie in [0, 1]")
    if len(distances) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    others = ~torch.eye(len(distances), dtype=torch.bool)
    nearest = distances.masked_fill(~others, torch.inf).amin(1, keepdim=True)
    # d_nearest / d instead of 1 / d: the same after Eq. 7, and nothing overflows
    inverse = torch.where(nearest > 0, nearest / distances, (distances == 0).double()).masked_fill(~others, 0)
    weights = (1 - self_weight) * inverse / inverse.sum(1, keepdim=True)
    return weights.masked_fill(~others, self_weight)


def uniform_weights(sites: int, self_weight: float | None = None) -> Tensor:
    """The control of AdaFed: λ for oneself and the same for all others; without λ, 1/N for everybody."""
    if sites == 1 or self_weight is None:
        return torch.full((sites, sites), 1 / sites, dtype=torch.float64)
    return mixing_weights(1 - torch.eye(sites, dtype=torch.float64), self_weight)


def _shapes(site: LayerStatistics) -> list[int]:
    for mean, variance in site:
        if mean.ndim != 1 or mean.shape != variance.shape:
            raise MedsiloError(
                f"a layer's statistics have shapes {list(mean.shape)} and {list(variance.shape)}; give one mean and "
                "one variance per channel"
            )
    return [len(mean) for mean, _ in site]
