"""FedSM's super model, in which a selector chooses a model for each image. A saved super model is a folder with
safetensors files, the plan and a manifest. The manifest contains the hash of each file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import not_
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors, write_json, write_text
from medsilo.core.section import Section
from medsilo.core.text import is_safe_name
from medsilo.models.network import Network
from medsilo.plan import Plan, load_plan
from medsilo.registry import NETWORKS

THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # the thresholds that are tried by default
EQUAL = 1e-9  # mean scores whose difference is smaller than this number count as equal


@dataclass(frozen=True)
class Tuning:
    """The tried thresholds in ascending order; for each threshold, the number of scored cases and the mean score."""

    curve: tuple[tuple[float, int, float], ...]

    @property
    def threshold(self) -> float:
        """Return the middle of the range of best thresholds; near an end of the range, a new image may get the wrong
        model.
        """
        low, high = self.plateau
        return low if low == high else round((low + high) / 2, 6)

    @property
    def plateau(self) -> tuple[float, float]:
        """Return the ends of the longest range of thresholds that all have the best mean score."""
        best = max(score for _, _, score in self.curve)
        runs = groupby(self.curve, lambda point: best - point[2] <= EQUAL)
        plateaus = [[gamma for gamma, _, _ in run] for is_best, run in runs if is_best]
        return max(((plateau[0], plateau[-1]) for plateau in plateaus), key=lambda ends: (ends[1] - ends[0], ends[1]))


def tune(counts: Mapping[float, tuple[int, float]]) -> Tuning:
    """Compute each threshold's mean score: the sum of scores over all hospitals, divided by the number of scored
    cases.
    """
    return Tuning(tuple((float(gamma), cases, score / cases) for gamma, (cases, score) in sorted(counts.items())))


MANIFEST, PLAN = "supermodel.json", "plan.yaml"
GLOBAL_FILE, SELECTOR_FILE, PERSONAL = "global.safetensors", "selector.safetensors", "personal"
GLOBAL = "global"  # the name of the model that all hospitals share
Tensors = Mapping[str, Tensor]
Rule = Literal["threshold", "argmax", "mixture"]


@dataclass(frozen=True)
class Origin:
    """Facts about a super model's study, from which a program can rebuild the networks of the super model."""

    plan: Plan
    selector: Network  # the selector's network, described in the same way as a network in a plan
    # for each site, the labels that the site did not annotate
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Manifest(Section):
    format: Literal[1] = 1
    rule: Rule
    threshold: float | None = Field(ge=0, le=1)
    sites: tuple[str, ...]
    agreed: tuple[str, ...]
    selector: dict[str, Any]
    absent: dict[str, tuple[str, ...]] = Field({}, exclude_if=not_)
    plan_hash: str
    packages: dict[str, dict[str, str]]
    files: dict[str, str]  # for each file name, the SHA-256 of the file


class SuperModel(nn.Module):
    """FedSM's super model (Algorithm 2): a global model, the personal models of hospitals that share their models, and
    the selector f_s.

    Rules:
    - "threshold" (FedSM): the selector has one output per site. The personal model of the most likely site predicts if
      the selector's probability of the site is strictly above `threshold`; otherwise, the global model predicts.
    - "argmax" (FedSM-extra): output 0 of the selector is for the global model, and each further output is for a site.
      The model that belongs to the selector's most likely output predicts.
    - "mixture" (ensemble): the selector's outputs have the same meaning as for "argmax". All models predict, and the
      selector's probabilities are the weights with which the predictions are mixed.

    Args:
        global_model: the model for images that resemble no hospital's
        personal: the shared personal models, by hospital
        selector: the network that assigns an image to a hospital
        threshold: the least probability of a personal model; only for "threshold"
        sites: all hospitals of the selector; the global model answers for hospitals that are not in `personal`
        rule: the rule for choosing a model, see above
        origin: facts about the study, which are only needed for saving

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> shared, own, selector = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
    >>> model = SuperModel(shared, {"a": own}, selector, threshold=0.9)
    >>> output, experts, confidence = model.answer(torch.ones(3, 4))
    >>> output.shape, experts
    (torch.Size([3, 2]), ['a', 'a', 'a'])
    """

    def __init__(
        self,
        global_model: nn.Module,
        personal: dict[str, nn.Module],
        selector: nn.Module,
        threshold: float | None = None,
        *,
        sites: Sequence[str] | None = None,
        rule: Rule = "threshold",
        origin: Origin | None = None,
    ) -> None:
        super().__init__()
        self.origin = origin
        self.sites = tuple(sorted(personal if sites is None else sites))
        if GLOBAL in self.sites:
            raise MedsiloError(f"a site is named '{GLOBAL}', which is the shared model's name; rename the site")
        if unknown := sorted(personal.keys() - set(self.sites)):
            raise MedsiloError(f"`sites` lacks '{unknown[0]}', which has a personal model; add it to `sites`")
        if (rule == "threshold") == (threshold is None):
            raise MedsiloError(f"rule '{rule}' {'needs a' if threshold is None else 'has no'} threshold (gamma)")
        if threshold is not None and not 0 <= threshold <= 1:
            raise MedsiloError(f"threshold (gamma) {threshold:g} lies outside 0 to 1; choose one within")
        self.rule, self.threshold = rule, threshold
        self.agreed = tuple(sorted(personal))  # the sites that share their personal models
        self.global_model, self.selector = global_model, selector
        # A ModuleList is used, because a ModuleDict forbids dots in names, and names of sites may contain dots.
        self.personal = nn.ModuleList(personal[site] for site in self.agreed)
        # For each output of the selector, the name of the model that belongs to the output.
        answering = tuple(site if site in personal else GLOBAL for site in self.sites)
        self.labels = answering if rule == "threshold" else (GLOBAL, *answering)

    def expert(self, name: str) -> nn.Module:
        """Return the model with this name: the global model for "global", or the shared personal model of the named
        site.
        """
        return self.global_model if name == GLOBAL else self.personal[self.agreed.index(name)]

    def probabilities(self, x: Tensor) -> Tensor:
        """Return the selector's probabilities, softmax(f_s(x)), as a float64 tensor [B, outputs]."""
        scores = self.selector(x).double()
        if scores.shape[1] != len(self.labels):
            raise MedsiloError(
                f"the selector has {scores.shape[1]} outputs, and rule '{self.rule}' with {len(self.sites)} sites "
                f"needs {len(self.labels)}; use the selector that these sites trained"
            )
        if not scores.isfinite().all():
            raise MedsiloError("the selector's output is NaN or infinite; check the image's values")
        return scores.softmax(1)

    def choose(self, x: Tensor) -> tuple[list[str], Tensor]:
        """Return, for each image, the site whose model predicts, and the selector's greatest probability, [B]."""
        return self.chosen(self.probabilities(x))

    def chosen(self, probabilities: Tensor) -> tuple[list[str], Tensor]:
        """Return, for each image, the chosen site and the selector's greatest probability. With the rule "mixture", all
        models predict, and the returned site is the site with the largest weight.
        """
        confidence, most_likely = probabilities.max(1)
        sure = [True] * len(confidence) if self.threshold is None else (confidence > self.threshold).tolist()
        picks = zip(most_likely.tolist(), sure, strict=True)
        return [self.labels[index] if is_sure else GLOBAL for index, is_sure in picks], confidence

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [B, classes, ...] of the super model. For the rule "mixture", return the logarithm of the
        mixed probabilities.
        """
        return self.answer(x)[0]

    def answer(self, x: Tensor) -> tuple[Tensor, list[str], Tensor]:
        """Return the super model's output, the chosen experts and the selector's confidence. The selector and each
        expert process an image at most once.
        """
        probabilities = self.probabilities(x)
        names, confidence = self.chosen(probabilities)
        output = self._mixed(x, probabilities) if self.rule == "mixture" else self._routed(x, names)
        return output, names, confidence

    def _routed(self, x: Tensor, names: list[str]) -> Tensor:
        """Run each chosen expert once on its images, and return the outputs in the order of the images."""
        rows, outputs = [], []
        for name in sorted(set(names)):
            own = torch.tensor([row for row, chosen in enumerate(names) if chosen == name], device=x.device)
            rows.append(own)
            outputs.append(self.expert(name)(x[own]))
        return torch.cat(outputs)[torch.cat(rows).argsort()]

    def _mixed(self, x: Tensor, probabilities: Tensor) -> Tensor:
        """Return the logarithm of the mixed prediction h = sum_k y_k h_k (Section 3.1.1).

        The function computes with logarithms, so that small probabilities do not become 0 and lose their gradients.
        """
        logarithms = {name: functional.log_softmax(self.expert(name)(x), 1) for name in sorted(set(self.labels))}
        outputs = torch.stack([logarithms[name] for name in self.labels])  # [outputs, B, classes, ...]
        weights = probabilities.log().to(outputs.dtype).T
        return (outputs + weights.reshape(*weights.shape, *(1,) * (outputs.dim() - 2))).logsumexp(0)

    # ------------------------------------------------------------------ its folder
    def save(self, folder: Path) -> None:
        """Write the super model into a folder that another hospital can load. Saving needs `origin`.

        The manifest is written last, so that a folder with a manifest has all files of the super model.
        """
        origin = self.origin
        if origin is None:
            raise MedsiloError(
                "the super model has no `origin`, which saving needs; create the super model with assemble()"
            )
        (folder / MANIFEST).unlink(missing_ok=True)
        # models of hospitals that no longer share theirs
        for old in (folder / PERSONAL).glob("*.safetensors"):
            old.unlink()
        networks = {GLOBAL_FILE: self.global_model, SELECTOR_FILE: self.selector}
        networks |= {_personal_file(site): self.expert(site) for site in self.agreed}
        for name, network in networks.items():
            save_tensors(folder / name, network.state_dict(), {"plan_hash": origin.plan.hash})
        weight_cache.keep_beside(origin.plan.network.files, folder / model_folders.FOLDER)
        write_text(folder / PLAN, origin.plan.to_yaml())
        manifest = Manifest(
            rule=self.rule,
            threshold=self.threshold,
            sites=self.sites,
            agreed=self.agreed,
            selector=origin.selector.model_dump(mode="json"),
            absent=dict(origin.absent),
            plan_hash=origin.plan.hash,
            packages=origin.plan.code,
            files={name: weight_cache.hash_of_file(folder / name) for name in _files(self.agreed)},
        )
        write_json(folder / MANIFEST, manifest.model_dump(mode="json"))

    @staticmethod
    def load(folder: Path, plan: Plan | None = None) -> "SuperModel":
        """Load a super model from a folder. Raises MedsiloError if a file of the super model was changed.

        Args:
            folder: the super model's folder
            plan: the study's plan, if the caller has the plan already
        """
        manifest = read_manifest(folder)
        for name in _files(manifest.agreed):
            _check(folder / name, name, manifest.files.get(name))
        known = plan if plan and plan.hash == manifest.plan_hash else load_plan(folder / PLAN)
        origin = Origin(known, _network(manifest.selector), manifest.absent)
        tensors = {name: load_tensors(folder / name)[0] for name in _files(manifest.agreed) if name.endswith("tensors")}
        return assemble(
            origin,
            tensors[GLOBAL_FILE],
            {site: tensors[_personal_file(site)] for site in manifest.agreed},
            tensors[SELECTOR_FILE],
            manifest.threshold,
            sites=manifest.sites,
            rule=manifest.rule,
        )


def assemble(
    origin: Origin,
    global_model: Tensors,
    personal: Mapping[str, Tensors],
    selector: Tensors,
    threshold: float | None = None,
    *,
    sites: Iterable[str],
    rule: Rule = "threshold",
) -> SuperModel:
    """Build a super model in evaluation mode from the tensors of its networks. The mapping `personal` contains the
    personal models of sites that agreed to share their personal models.
    """
    sites, plan = sorted(sites), origin.plan
    outputs = len(sites) + (rule != "threshold")

    def expert(name: str, tensors: Tensors) -> nn.Module:
        return filled(plan.network.build(plan.task.channels, plan.task.goal.outputs), name, tensors)

    precision = next(tensor.dtype for tensor in selector.values() if tensor.is_floating_point())
    # the initial random weights are replaced by the loaded tensors, so the caller's random generator stays unchanged
    with torch.random.fork_rng(devices=[]):
        model = SuperModel(
            expert("the global model", global_model),
            {site: expert(f"the personal model of {site}", tensors) for site, tensors in personal.items()},
            filled(origin.selector.build(plan.task.channels, outputs).to(precision), "the selector", selector),
            threshold,
            sites=sites,
            rule=rule,
            origin=origin,
        )
    return model.eval()


def filled(network: nn.Module, name: str, tensors: Tensors) -> nn.Module:
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        message = f"{name} has other tensors than the plan's network; use the plan it was trained with"
        raise MedsiloError(message, private=str(error)) from error
    return network


def read_manifest(folder: Path) -> Manifest:
    manifest = Manifest.in_file(folder / MANIFEST, MANIFEST, "fetch the super model again")
    for site in (*manifest.sites, *manifest.agreed):
        if not is_safe_name(site):
            raise MedsiloError(f"{MANIFEST}: site name {site!r} has odd characters; fetch the super model again")
    return manifest


def _files(agreed: Iterable[str]) -> list[str]:
    return [PLAN, GLOBAL_FILE, SELECTOR_FILE, *map(_personal_file, agreed)]


def _personal_file(site: str) -> str:
    return f"{PERSONAL}/{site}.safetensors"


def _check(path: Path, name: str, expected: str | None) -> None:
    if expected is None or not path.is_file():
        raise MedsiloError(f"{name} is missing from the super model; fetch the super model again", private=str(path))
    if weight_cache.hash_of_file(path) != expected:
        message = f"{name} is not the file that {MANIFEST} was written for (its SHA-256 differs); fetch it again"
        raise MedsiloError(message, private=str(path))


def _network(section: dict[str, Any]) -> Network:
    try:
        return NETWORKS[section["name"]].model_validate(section)
    except (KeyError, TypeError, ValidationError) as error:
        message = f"{MANIFEST}: selector: this medsilo has no such network; install the version that wrote it"
        raise MedsiloError(message, private=str(section)) from error
