"""Draw the loss around a trained model, as HarmoFL's Fig. 6 and FedSM's Fig. 4 do in the manner of Li et al. 2018.

Along the axes of a loss landscape, only the trained weights of the model change. Batch norm is in evaluation mode, and
uses the model's saved running statistics. The landscape shows the loss on training cases, because the sites minimised
the loss on training cases.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from medsilo.learning.seeds import generator_for
from results.analyses.analysis import AnalysisResult, Question, finite_or_none, mean_loss
from results.analyses.figures import COLOURS, panels
from results.analyses.finished import FinishedRun, drawn

CASES = 128
LINES = 10  # number of directions in FedSM's Fig. 4
STEPS = 10
LEVELS = 16
SMALLEST = 1e-6  # smallest loss that a figure distinguishes from 0
Direction = list[Tensor]


def filter_normalised(model: nn.Module, generator: torch.Generator) -> Direction:
    """Return a random direction in which each filter has the norm of the model's corresponding filter: d ← d / ‖d‖ ·
    ‖θ‖ (Li et al.).

    A filter consists of all weights of one output channel. Along this direction, biases and normalisation weights do
    not change, as in the code of Li et al.
    """
    # transposed convolutions have weights [in, out, ...]
    turned = {layer.weight for layer in model.modules() if isinstance(layer, _ConvTransposeNd)}
    direction = []
    for weight in model.parameters():
        random = torch.randn(weight.shape, generator=generator).to(weight)
        if weight.ndim < 2:
            direction.append(torch.zeros_like(weight))
            continue
        output = 1 if weight in turned else 0
        within = [axis for axis in range(weight.ndim) if axis != output]
        norms = [torch.linalg.vector_norm(of.detach(), dim=within, keepdim=True) for of in (weight, random)]
        direction.append(random / norms[1] * norms[0])
    return direction


def unit(model: nn.Module, generator: torch.Generator) -> Direction:
    """Return a random direction of length 1 in the space of all trained weights together (FedSM, Section 4.2)."""
    random = [torch.randn(weight.shape, generator=generator).to(weight) for weight in model.parameters()]
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(random)))
    return torch._foreach_div(random, length)  # type: ignore[return-value]


def ladder(reach: float, steps: int) -> list[float]:
    """Return evenly spaced values from -reach to reach, with exactly 0 in the middle."""
    return [reach * step / steps for step in range(-steps, steps + 1)]


@torch.no_grad()
def surface(
    model: nn.Module, directions: Sequence[Direction], places: Sequence[float], loss: Callable[[], float]
) -> Tensor:
    """Return the loss at θ + Σ a_i d_i for all a_i of `places`, in float64, with one axis for each direction."""
    weights: list[Tensor] = list(model.parameters())
    own = [weight.detach().clone() for weight in weights]
    losses = []
    try:
        for amounts in product(places, repeat=len(directions)):
            torch._foreach_copy_(weights, own)
            for amount, direction in zip(amounts, directions, strict=True):
                torch._foreach_add_(weights, direction, alpha=amount)
            losses.append(loss())
    finally:
        torch._foreach_copy_(weights, own)
    return torch.tensor(losses, dtype=torch.float64).reshape([len(places)] * len(directions))


def landscapes(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Draw the loss of each run's model on each site's cases over the plane of two filter-normalised directions."""
    steps = asked.steps or STEPS
    places, found, lines = ladder(asked.reach, steps), [], []
    for run, site, model, loss in _each(runs, asked):
        directions = [filter_normalised(model, generator_for(asked.seed, "landscape", axis)) for axis in "xy"]
        losses = surface(model, directions, places, loss)
        right, up = divmod(int(losses.nan_to_num(torch.inf).argmin()), len(places))
        centre, lowest = float(losses[steps, steps]), float(losses[right, up])
        at = [places[right], places[up]]
        found.append(
            {
                "run": run,
                "site": site,
                "centre": finite_or_none(centre),
                "lowest": finite_or_none(lowest),
                "lowest_at": at,
            }
            | {"losses": [list(map(finite_or_none, column)) for column in losses.tolist()]}
        )
        lines.append(f"{run}, {site}: loss {centre:.3f} at the model, lowest {lowest:.3f} at {at}")
    return AnalysisResult({"places": places, "surfaces": found}, {"landscape": _draw_surfaces(places, found)}, lines)


def profiles(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Draw the loss of each run's model along random directions of length 1. Networks whose weights have equal shapes
    use the same random directions.
    """
    steps = asked.steps or STEPS
    places, found, lines = ladder(asked.reach, steps), [], []
    for run, site, model, loss in _each(runs, asked):
        directions = [unit(model, generator_for(asked.seed, "profile", which)) for which in range(LINES)]
        losses = torch.stack([surface(model, [direction], places, loss) for direction in directions])
        centre = float(losses[0, steps])
        rise = float(losses[:, [0, -1]].mean()) - centre
        found.append(
            {"run": run, "site": site, "centre": finite_or_none(centre), "mean_rise_at_edge": finite_or_none(rise)}
            | {"losses": [list(map(finite_or_none, line)) for line in losses.tolist()]}
        )
        lines.append(f"{run}, {site}: loss {centre:.3f}, {rise:+.3f} on average at distance {asked.reach:g}")
    return AnalysisResult({"places": places, "profiles": found}, {"profile": _draw_profiles(places, found)}, lines)


def _each(runs: Sequence[FinishedRun], asked: Question) -> Iterator[tuple[str, str, nn.Module, Callable[[], float]]]:
    compute = asked.settings.compute()
    for run in runs:
        for site in run.sites:
            model = run.model(site, compute.device)
            cases = drawn(run.data(site, asked.settings).train, asked.cases or CASES, asked.seed, site)
            yield run.label, site, model, partial(mean_loss, run, model, cases, compute)


def _grid(found: Sequence[dict[str, Any]]) -> tuple[Figure, list[tuple[Axes, dict[str, Any]]]]:
    rows, columns = (list(dict.fromkeys(one[key] for one in found)) for key in ("run", "site"))
    figure, axes = panels(len(rows), len(columns))
    pairs = [(axes[rows.index(one["run"])][columns.index(one["site"])], one) for one in found]
    for panel, one in pairs:
        panel.set_title(f"{one['run']}, {one['site']}", fontsize=9)
    return figure, pairs


def _draw_surfaces(places: Sequence[float], found: Sequence[dict[str, Any]]) -> Figure:
    figure, pairs = _grid(found)
    heights = [np.array(one["losses"], float).T for one in found]  # None becomes NaN; .T makes x the horizontal axis
    low, high = max(float(np.nanmin(heights)), SMALLEST), float(np.nanmax(heights))
    levels = np.geomspace(low, max(high, 1.01 * low), LEVELS)  # all panels share one colour scale
    norm = LogNorm(levels[0], levels[-1])
    for (panel, one), height in zip(pairs, heights, strict=True):
        panel.contourf(places, places, height, levels=levels, norm=norm, cmap="viridis", extend="min")
        panel.plot(0, 0, "+", color="white", markersize=9, label="the model")
        panel.plot(*one["lowest_at"], "x", color=COLOURS[1], markersize=7, label="lowest")
        panel.set_aspect("equal")
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=[panel for panel, _ in pairs], label="training loss")
    pairs[0][0].legend(fontsize=7, loc="upper right")
    return figure


def _draw_profiles(places: Sequence[float], found: Sequence[dict[str, Any]]) -> Figure:
    figure, pairs = _grid(found)
    for panel, one in pairs:
        panel.plot(places, np.array(one["losses"], float).T, color=COLOURS[0], alpha=0.5, linewidth=1)
        panel.set(xlabel="distance from the model", ylabel="training loss")
    # each site has its own colour scale, so that the site's models can be compared with each other
    for site in {one["site"] for one in found}:
        same = [panel for panel, one in pairs if one["site"] == site]
        limits = [panel.get_ylim() for panel in same]
        for panel in same:
            panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    return figure
