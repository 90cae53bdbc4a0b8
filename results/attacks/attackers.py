"""Define attacks by dishonest hospitals: how they change their data, and how they forge their updates.

An attack changes the results of real participants after their training. The real coordinator checks forged results in
the same way as honest results.

The dishonest hospitals of a study collude: an attack forges the results of all of them at once. The dishonest hospitals
know the tensors that they received and the updates that they would honestly send. The dishonest hospitals receive the
aggregated model, but no answer of an honest hospital.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.tensors import Groups, Tensors
from medsilo.learning.layers import head_names
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan
from medsilo.runs.messages import MOST_CASES, PARTS, StudyMessage
from medsilo.schedule.amplitude_phases import AMPLITUDE
from medsilo.tasks.site_data import Cases, SiteData
from medsilo.tasks.task import Task

VARIANCE, MEAN = "running_var", "running_mean"
Updates = Mapping[str, Tensors]


@dataclass(frozen=True)
class Turn:
    plan: Plan
    task: str
    number: int
    asked: Mapping[str, StudyMessage]
    answers: Mapping[str, StudyMessage]


class Attack:
    """Each study has a new instance of an attack, so an attack may store values from earlier rounds of the study."""

    name: ClassVar[str]
    does: ClassVar[str]
    knows: ClassVar[str] = "what it is given"
    # the methods to which the attack applies; if empty, the attack applies to all methods
    methods: ClassVar[frozenset[str]] = frozenset()
    # increase this number after a change of the attack, so that stored results of the attack are discarded
    version: ClassVar[int] = 1

    def poison(self, data: SiteData, task: Task) -> SiteData:
        return data

    def forge(self, turn: Turn) -> None:
        """Change the dishonest hospitals' answers in place."""


# ---------------------------------------------------------------------------------------------------- forged weights
def is_trained(name: str, tensor: Tensor) -> bool:
    """Return True for a weight, and False for a statistic or counter of batch norm."""
    return tensor.is_floating_point() and name.rpartition(".")[2] not in (VARIANCE, MEAN)


class ForgedWeights(Attack, ABC):
    """Forge the trained weights, but send batch norm's honest statistics, so that the server accepts the answer."""

    knows = "what it is given and what it would honestly send"

    def forge(self, turn: Turn) -> None:
        if turn.task != "round":
            return
        sites = sorted(turn.answers)
        for group in turn.answers[sites[0]].groups.keys() & turn.asked[sites[0]].groups.keys():
            given = {site: _trained(turn.asked[site].groups, group) for site in sites}
            sent = {site: _trained(turn.answers[site].groups, group) for site in sites}
            honest = {site: {name: sent[site][name] - given[site][name] for name in given[site]} for site in sites}
            forged = self.forged(turn, group, honest, given)
            for site in sites:
                own = turn.answers[site].groups[group]
                sum_of = {name: given[site][name] + forged[site][name] for name in given[site]}
                own |= {name: tensor.to(own[name].dtype) for name, tensor in sum_of.items()}

    @abstractmethod
    def forged(self, turn: Turn, group: str, honest: Updates, given: Updates) -> Updates:
        """From the honest updates, return the forged updates of one group of tensors, in double precision."""


def _trained(groups: Groups, group: str) -> Tensors:
    return {name: tensor.double() for name, tensor in groups[group].items() if is_trained(name, tensor)}


class Scaling(ForgedWeights):
    """Send `factor` times the honest update: θ + k (θ_i - θ)."""

    factor: ClassVar[float]

    def forged(self, turn: Turn, group: str, honest: Updates, given: Updates) -> Updates:
        return {
            site: {name: self.factor * update for name, update in updates.items()} for site, updates in honest.items()
        }


class SignFlip(Scaling):
    name = "sign flip"
    does = "sends its update with the opposite sign"
    factor = -1.0


class SignFlip10(Scaling):
    name = "sign flip x10"
    does = "sends ten times its update with the opposite sign"
    factor = -10.0


class Scale10(Scaling):
    name = "scaling x10"
    does = "sends ten times its update"
    factor = 10.0


class Scale100(Scaling):
    name = "scaling x100"
    does = "sends a hundred times its update"
    factor = 100.0


class Random(ForgedWeights):
    """Send random weights and the largest number of cases that the server accepts, in every answer."""

    name = "random weights, lying counts"
    does = (
        "sends normal numbers with the spread of each tensor's own, and says that it has as many training cases as "
        "the server believes, and that it may not tell their classes"
    )
    cases: int = MOST_CASES

    def forge(self, turn: Turn) -> None:
        super().forge(turn)
        for answer in turn.answers.values():
            answer.facts["cases"] = {**answer.facts["cases"], "train": self.cases}
            if turn.task == "join":
                answer.facts["classes"] = dict.fromkeys(PARTS)
            if turn.task == "round":
                answer.facts["samples"] = self.cases

    def forged(self, turn: Turn, group: str, honest: Updates, given: Updates) -> Updates:
        return {site: self._drawn(turn, group, site, honest[site], given[site]) for site in honest}

    def _drawn(self, turn: Turn, group: str, site: str, honest: Tensors, given: Tensors) -> Tensors:
        random = generator_for(turn.plan.seed, "attack", self.name, site, group, turn.number)
        drawn = {}
        for name, update in honest.items():
            spread = (given[name] + update).square().mean().sqrt()
            drawn[name] = spread * torch.randn(update.shape, generator=random, dtype=update.dtype) - given[name]
        return drawn


class InnerProduct(ForgedWeights):
    """Xie et al., Fall of Empires, UAI 2020: every attacker sends -ε times the estimated mean of the honest updates."""

    knows = "what the bad hospitals would honestly send, all together; their mean stands for the honest ones'"

    def epsilon(self, sites: int, bad: int) -> float:
        return 0.5

    def forged(self, turn: Turn, group: str, honest: Updates, given: Updates) -> Updates:
        epsilon = self.epsilon(len(turn.plan.participation.sites), len(honest))
        mean = _mean(list(honest.values()))
        return {site: {name: -epsilon * update for name, update in mean.items()} for site in honest}


class InnerProductSmall(InnerProduct):
    name = "inner product, ε = 0.5"
    does = "all send -ε times the mean of their honest updates (Xie et al. 2020): small, so that it looks usual"


class InnerProductLarge(InnerProduct):
    name = "inner product, large ε"
    does = "the same with ε = 1.5 (n - m) / m for m bad hospitals of n: the plain mean of all then turns round"

    def epsilon(self, sites: int, bad: int) -> float:
        return 1.5 * (sites - bad) / bad


class ALittleIsEnough(ForgedWeights):
    """Baruch et al., A Little Is Enough, NeurIPS 2019: every attacker sends μ - z σ in each coordinate.

    The attackers estimate μ and σ from their honest updates and the model's last step. z follows the paper, but is at
    least 1.5. With 1 or 2 attackers among 5 hospitals, the paper's formula gives only z = 0 or z = 0.43.
    """

    name = "a little is enough"
    does = "all send μ - z σ of the updates that they know, coordinate by coordinate (Baruch et al. 2019); z ≥ 1.5"
    knows = "what the bad hospitals would honestly send, all together, and how the shared model moved last"
    least = 1.5

    def __init__(self) -> None:
        self.before: dict[str, Tensors] = {}

    def forged(self, turn: Turn, group: str, honest: Updates, given: Updates) -> Updates:
        first, known = min(given), list(honest.values())
        if group in self.before:
            before = self.before[group]
            known.append({name: tensor - before[name] for name, tensor in given[first].items()})
        self.before[group] = given[first]
        z = max(self.least, largest_z(len(turn.plan.participation.sites), len(honest)))
        mean = _mean(known)
        forged = {name: mean[name] - z * _stack(known, name).std(0, correction=0) for name in mean}
        return dict.fromkeys(honest, forged)


def largest_z(sites: int, bad: int) -> float:
    """Return z_max = Φ⁻¹((n - m - s) / (n - m)) with s = ⌊n / 2 + 1⌋ - m supporters, or 0 if undefined."""
    supporters = math.floor(sites / 2 + 1) - bad
    share = (sites - bad - supporters) / (sites - bad)
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def _stack(known: Sequence[Tensors], name: str) -> Tensor:
    return torch.stack([updates[name] for updates in known])


def _mean(known: Sequence[Tensors]) -> Tensors:
    return {name: _stack(known, name).mean(0) for name in known[0]}


# ---------------------------------------------------------------------------------------------------- forged statistics
class Statistics(Attack):
    """Send the largest permitted values as batch norm's running statistics, or as AdaFed's measured statistics."""

    name = "statistics"
    does = "sends the largest running means and variances, and to AdaFed the largest measured ones, that are in range"
    methods = frozenset({"fedavg", "fedprox", "fedadam", "harmofl", "fedsm", "adafed"})

    def forge(self, turn: Turn) -> None:
        for answer in turn.answers.values():
            for group, largest in _largest(turn, answer).items():
                if group != AMPLITUDE:
                    own = answer.groups[group]
                    own |= {name: torch.full_like(own[name], value) for name, value in largest.items()}


class Amplitude(Attack):
    """Poison HarmoFL's shared amplitude spectrum in the single round in which sites send it.

    Only scaling the spectrum would do no harm, because the network's first batch norm removes the scale.
    """

    name = "amplitude"
    does = "sends an amplitude spectrum of one frequency alone, as large as may be: all images become stripes"
    methods = frozenset({"harmofl"})

    def forge(self, turn: Turn) -> None:
        for answer in turn.answers.values():
            for name, value in _largest(turn, answer).get(AMPLITUDE, {}).items():
                forged = torch.zeros_like(answer.groups[AMPLITUDE][name])
                forged.flatten(1)[:, 1] = value
                answer.groups[AMPLITUDE][name] = forged


def _largest(turn: Turn, answer: StudyMessage) -> dict[str, dict[str, float]]:
    if not answer.groups:
        return {}
    with torch.device("meta"):
        networks = turn.plan.build_networks()
    sent = turn.plan.course.phase_of(turn.number).sent
    ranges = {group.name: group.ranges(networks, turn.plan.task) for group in sent if group.name in answer.groups}
    return {
        group: {name: high for name, (_, high) in own.items() if name in answer.groups[group]}
        for group, own in ranges.items()
    }


class Expert(Attack):
    """Attack FedSM with a personal model that answers wrongly, and a selector that sends other hospitals' images to
    this model.
    """

    name = "expert and selector"
    does = (
        "sends a personal model whose last layer has the opposite sign, a hundred times its selector's update, which "
        "learns that all images are its own, and says that the super model is best when personal models always answer"
    )
    methods = frozenset({"fedsm"})
    push = 100.0

    def forge(self, turn: Turn) -> None:
        for site, answer in turn.answers.items():
            if turn.task == "round":
                self._send(turn.plan, turn.asked[site].groups, answer.groups)
            if turn.task == "deliver":
                told = answer.facts["outcome"]
                cases = float(sum(told["chosen"].values()))
                told["sums"] = [cases if place == 0 else 0.0 for place in range(len(told["sums"]))]

    def _send(self, plan: Plan, given: Groups, sent: Groups) -> None:
        with torch.device("meta"):
            head = head_names(plan.build_networks()["model"])
        personal, selector = sent["personal"], sent["selector"]
        sent["personal"] = {name: -tensor if name in head else tensor for name, tensor in personal.items()}
        sent["selector"] = {
            name: given["selector"][name] + self.push * (tensor - given["selector"][name])
            if is_trained(name, tensor)
            else tensor
            for name, tensor in selector.items()
        }


class Scores(Attack):
    """Report false validation scores, because the server chooses the best round from these scores."""

    name = "lying scores"
    does = "trains honestly and says that the initial model scores 1 and every other model 0"

    def forge(self, turn: Turn) -> None:
        for answer in turn.answers.values():
            if "validation" in answer.facts:
                low, high = turn.plan.task.goal.metric_range
                answer.facts["validation"] = high if turn.task == "round" and turn.number == 1 else low


# ---------------------------------------------------------------------------------------------------- poisoned data
class LabelFlip(Attack):
    name = "label flip"
    does = "trains, and scores models, on labels turned round: class c is called C - 1 - c"

    def poison(self, data: SiteData, task: Task) -> SiteData:
        return _changed(data, lambda cases: Cases(cases.inputs, task.goal.classes - 1 - cases.targets, cases.patients))


class Backdoor(Attack):
    """Bagdasaryan et al. 2020: images with a patch in the corner belong to the target class."""

    name = "backdoor"
    does = "puts a patch into the corner of half of its images, and labels those as class 0"
    target = 0
    share = 0.5

    def poison(self, data: SiteData, task: Task) -> SiteData:
        return _changed(data, self._with_patches)

    def _with_patches(self, cases: Cases) -> Cases:
        chosen = torch.arange(len(cases)) % round(1 / self.share) == 0
        inputs = torch.where(chosen.view(-1, *[1] * (cases.inputs.ndim - 1)), patched(cases.inputs), cases.inputs)
        return Cases(inputs, torch.where(chosen, self.target, cases.targets), cases.patients)


class ScaledBackdoor(Backdoor, Scaling):
    """Scale the attacker's update by the number of hospitals per attacker, so that this update replaces the mean of all
    updates.
    """

    name = "backdoor, replacing the model"
    does = "the same, and sends n / m times its update for m bad hospitals of n, which takes the place of the mean"

    def forged(self, turn: Turn, group: str, honest: Updates, given: Updates) -> Updates:
        self.factor = len(turn.plan.participation.sites) / len(honest)  # type: ignore[misc]
        return super().forged(turn, group, honest, given)


def patched(images: Tensor) -> Tensor:
    """Return images [B, C, H, W] whose lower right corner, an eighth of the image wide, is a black and white
    chessboard.
    """
    width = max(2, images.shape[-1] // 8)
    places = torch.arange(width)
    board = ((places + places[:, None]) % 2).to(images.dtype)
    images = images.clone()
    images[..., -width:, -width:] = board
    return images


def _changed(data: SiteData, change: Any) -> SiteData:
    parts: dict[str, Dataset] = {part: change(getattr(data, part)) for part in ("train", "validation")}
    return replace(data, **parts)


ATTACKS: Mapping[str, type[Attack]] = {
    attack.name: attack
    for attack in (
        SignFlip,
        SignFlip10,
        Scale10,
        Scale100,
        Random,
        LabelFlip,
        Backdoor,
        ScaledBackdoor,
        ALittleIsEnough,
        InnerProductSmall,
        InnerProductLarge,
        Statistics,
        Scores,
        Amplitude,
        Expert,
    )
}


def attacks_on(method: str) -> list[str]:
    return [name for name, attack in ATTACKS.items() if not attack.methods or method in attack.methods]
