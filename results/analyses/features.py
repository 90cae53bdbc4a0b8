"""Draw a t-SNE map of all sites' cases from the input of a network's last layer (FedSM, Fig. 3)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.learning.compute import Compute
from medsilo.learning.layers import head_layers
from results.analyses.analysis import AnalysisResult, Question, as_evaluated, part_of
from results.analyses.figures import COLOURS, MARKERS, panels
from results.analyses.finished import FinishedRun, drawn

CASES = 100
PERPLEXITY = 30.0
MOST_CLASSES = 12


@torch.no_grad()
def features(network: nn.Module, data: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the input of the network's last layer as [cases, features], averaged over spatial dimensions; also return
    the cases' targets.
    """
    heads = head_layers(network)
    if not heads:
        raise MedsiloError("this network has no linear or convolution layer whose inputs could be the features")
    seen: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor]) -> None:
        seen.append(inputs[0].flatten(2).mean(2).cpu() if inputs[0].ndim > 2 else inputs[0].cpu())

    hook = heads[0].register_forward_pre_hook(keep)
    targets = []
    try:
        for inputs, wanted in data:
            network.eval()(inputs)
            targets.append(wanted.cpu())
    finally:
        hook.remove()
    return torch.cat(seen), torch.cat(targets)


def embed(values: Tensor, seed: int) -> Tensor:
    """Map [cases, features] to [cases, 2] by t-SNE. The exact gradient makes the t-SNE map reproducible from its
    seed.
    """
    from sklearn.manifold import TSNE  # scikit-learn is slow to import

    if len(values) < 4:
        raise MedsiloError(f"{len(values)} cases are too few for a map; give more --cases")
    perplexity = min(PERPLEXITY, (len(values) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init="pca", method="exact", random_state=seed)
    return torch.from_numpy(tsne.fit_transform(values.double().numpy()))


def maps(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Draw a map of each run's validation cases, coloured by site and, if cases have classes, by class."""
    found: list[dict[str, Any]] = []
    for run in runs:
        compute = asked.settings.compute()
        network = part_of(run, asked.network).to(compute.device) if asked.network else _shared_model(run, compute)
        values: list[Tensor] = []
        classes: list[int | None] = []
        sites: list[str] = []
        for site in run.sites:
            cases = drawn(run.data(site, asked.settings).validation, asked.cases or CASES, asked.seed, site)
            own, targets = features(network, as_evaluated(run, network, cases, compute))
            values.append(own)
            classes += targets.tolist() if targets.ndim == 1 else [None] * len(own)
            sites += [site] * len(own)
        points = embed(torch.cat(values), asked.seed).tolist()
        found.append(
            {"run": run.label, "network": asked.network or "the whole model", "features": values[0].shape[1]}
            | {"points": [{"site": s, "class": c, "at": p} for s, c, p in zip(sites, classes, points, strict=True)]}
        )
    figure, axes = panels(len(runs), 2, 4.2, 3.6)
    for one, (by_site, by_class) in zip(found, axes, strict=True):
        _scatter(by_site, one["points"], "site")
        by_site.set_title(f"{one['run']}: by site", fontsize=9)
        if one["points"][0]["class"] is None:
            by_class.set_axis_off()
            continue
        _scatter(by_class, one["points"], "class")
        by_class.set_title(f"{one['run']}: by class", fontsize=9)
    return AnalysisResult({"maps": found}, {"tsne": figure})


def _scatter(panel: Axes, points: list[dict[str, Any]], key: str) -> None:
    groups = sorted({point[key] for point in points})
    for place, group in enumerate(groups):
        x, y = zip(*[point["at"] for point in points if point[key] == group], strict=True)
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        panel.scatter(x, y, s=14, c=colour, marker=marker, linewidths=0.6, label=str(group))
    panel.set(xticks=[], yticks=[])
    if len(groups) <= MOST_CLASSES:
        panel.legend(fontsize=7)


def _shared_model(run: FinishedRun, compute: Compute) -> nn.Module:
    """Return the model that all sites share; features of different models could not be compared in one map."""
    first, *others = [run.model(site, compute.device) for site in run.sites]
    for other in others:
        pairs = zip(first.state_dict().values(), other.state_dict().values(), strict=True)
        if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
            raise MedsiloError(
                f"{run.label}: its sites have models of their own, whose features have no space in common; give a run "
                "with one model, or --network for one that all share"
            )
    return first
