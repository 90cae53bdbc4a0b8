"""Differentially private SGD (Abadi et al. 2016): the gradient of each privacy unit is clipped, and noise is added to
the sum of gradients.

A privacy unit is one case, or all cases of one patient. The cases of a patient are sampled together, and the sum of
these cases' gradients is clipped. Momentum, weight decay and a proximal term act after the noise was added, so these
operations disclose nothing about the cases. To compute the gradients of single cases, each case needs its own copy of
the network's weights (`torch.vmap`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.learning.compute import Case, Compute, LossFunction, part_of
from medsilo.learning.loop import ForCard, Step, TrainStep, loaded, plain_step
from medsilo.learning.steps import called_with
from medsilo.privacy.noise import NoiseSource

# gradients are computed for each case; this is the maximum number of gradient values in memory at a time
AT_ONCE = 1 << 26
# gradients are clipped to this fraction of the clipping bound, so that rounding errors lift no gradient above the bound
WITHIN = 1 - 1e-6
COLUMNS = 1 << 18  # number of values of each privacy unit's gradient that are summed at a time, to save memory


# --------------------------------------------------------------------------------------------------- Poisson sampling
class PoissonSample:
    """Samples the privacy units of each training step at random, each independently and with the same probability.

    A sampled batch may be empty, or larger than expected. The cases of a privacy unit are consecutive in a batch. The
    attribute `owners` contains the privacy unit of each case in the last batch.
    """

    def __init__(
        self, units: Sequence[str] | None, cases: int, expected: float, secret: NoiseSource, size: int | None = None
    ) -> None:
        """Group the cases by privacy unit; if no units are given, each case is its own privacy unit.

        Args:
            size: The public number of all units. None: the number of cases.
        """
        members = defaultdict[object, list[int]](list)
        for case, unit in enumerate(range(cases) if units is None else units):
            members[unit].append(case)
        self.members = list(members.values())
        known = cases if size is None else size
        self.rate = min(1.0, expected / known)
        self.expected = self.rate * known  # the expected number of units in a batch
        # the number of all privacy units, which is public
        self.size = len(self.members) if size in (None, cases) else known
        self.secret = secret
        self.owners = torch.zeros(0, dtype=torch.int64)

    def batches(self, dataset: Dataset, steps: int, compute: Compute) -> Iterator[Case]:
        drawn = [self.secret.poisson_sample(len(self.members), self.rate) for _ in range(steps)]
        cases = [[case for unit in units for case in self.members[unit]] for units in drawn]
        loader = _loaded(dataset, [own for own in cases if own], compute)
        for units, own in zip(drawn, cases, strict=True):
            owners = [place for place, unit in enumerate(units) for _ in self.members[unit]]
            self.owners = torch.tensor(owners, dtype=torch.int64)
            yield next(loader) if own else compute.moved(*_no_cases(dataset))


def _loaded(dataset: Dataset, batches: Sequence[list[int]], compute: Compute) -> Iterator[Case]:
    if isinstance(dataset, TensorDataset):
        cases: Any = ForCard(dataset) if compute.on_card else dataset
        return (compute.moved(*cases[batch]) for batch in batches)
    return loaded(dataset, batches, compute)


def _no_cases(dataset: Dataset) -> Case:
    inputs, targets = dataset[0]
    return inputs[None][:0], torch.as_tensor(targets)[None][:0]


@dataclass
class PrivateSteps:
    """For all training steps of one round: the Poisson sample, the clipping bound and the noise. All networks train on
    the same Poisson sample.

    Args:
        noise: The standard deviation of the noise on a summed gradient, divided by the clipping bound.
        exact_networks: The names of networks that train without noise, because the site does not send them.
    """

    sample: PoissonSample
    bound: float  # the clipping bound: largest norm of a privacy unit's gradient
    noise: float
    secret: NoiseSource
    exact_networks: tuple[str, ...] = ()
    releasing: float = math.inf  # noise multiplier with which means over cases are released
    clip: float = 1.0  # the norm to which a privacy unit's vector is clipped before a noisy mean is computed

    def train_step(
        self, model: nn.Module, loss: LossFunction, optimizer: Optimizer, step: Step = plain_step
    ) -> TrainStep:
        model.train()

        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                return self.gradient(model, loss, inputs, targets)

            return step(optimizer, closure)

        return learn

    @staticmethod
    def unless_empty(inner: TrainStep) -> TrainStep:
        """Return a training step that skips an empty batch, because a Poisson sample may be empty."""

        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            return inner(inputs, targets) if len(inputs) else torch.zeros((), device=inputs.device)

        return learn

    def gradient(self, model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor) -> Tensor:
        """Set the weights' gradients to (Σ clip(∇ of a unit) + noise) / expected number of units, where a unit is a
        case or a patient.

        The method returns the mean loss over cases without noise, so the site must not send the returned loss.
        """
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = None
        clipped = ClippedSum(weights, self.bound)
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for part in self._portions(len(inputs), sum(weight.numel() for weight in weights)):
            losses, gradients = gradients_of_cases(model, loss, inputs[part], part_of(targets, part))
            total += losses.sum()
            clipped.add(gradients, self.sample.owners[part])
        clipped.finish()
        exact = torch.cat([own.flatten() for own in clipped.total])
        noisy = self.secret.with_normal(exact, self.noise * self.bound) / self.sample.expected
        for weight, own in zip(weights, noisy.split([w.numel() for w in weights]), strict=True):
            weight.grad = own.view_as(weight).to(weight.dtype)
        return total / max(1, len(inputs))

    def noisy_mean(self, vectors: Iterable[Tensor]) -> Tensor:
        """Return (Σ clip(mean vector of a unit) + noise) / number of units, where a unit is a case or a patient.

        In the privacy account, the noisy mean counts as one release. To save memory, the method keeps a privacy unit's
        vectors only until the last case of the unit was read.

        Args:
            vectors: The vectors of all cases in order, as batches [cases, length].
        """
        unit_of = {case: unit for unit, member in enumerate(self.sample.members) for case in member}
        left = [len(own) for own in self.sample.members]
        parts: dict[int, Tensor] = {}
        total, cases = torch.zeros(0, dtype=torch.float64), 0
        for batch in vectors:
            for own in batch.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0):
                unit = unit_of[cases]
                total = total if len(total) else torch.zeros_like(own)
                parts[unit] = parts.get(unit, torch.zeros_like(own)) + own
                left[unit] -= 1
                cases += 1
                if not left[unit]:
                    mean = parts.pop(unit) / len(self.sample.members[unit])
                    total += mean * min(1.0, WITHIN * self.clip / max(float(mean.norm()), 1e-300))
        return self.secret.with_normal(total, self.releasing * self.clip) / self.sample.size

    def _portions(self, cases: int, weights: int) -> Iterator[slice]:
        """Split a batch into slices, so that the gradients of a slice's cases fit into memory."""
        usual = round(self.sample.expected + 3 * math.sqrt(self.sample.expected))
        most = max(1, min(usual, AT_ONCE // max(weights, 1)))
        return (slice(first, min(first + most, cases)) for first in range(0, cases, most))


def gradients_of_cases(
    model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of each case, and for each trainable weight a tensor [cases, ...] of the cases' gradients.

    The loss function is called for one case at a time, because a loss function may mix the cases of a batch.
    """
    learning = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    each = {name: own.expand(len(inputs), *own.shape).requires_grad_() for name, own in learning.items()}

    def of(weights: dict[str, Tensor], case: Tensor) -> Tensor:
        return called_with(model, weights, case[None])[0]

    try:
        output = torch.vmap(of, randomness="different")(each, inputs)
    except RuntimeError as error:
        if "memory" in str(error):
            raise
        raise MedsiloError(
            "privacy: a layer of the network does not support per-case gradients; choose another network",
            private=str(error),
        ) from error
    singly = [slice(case, case + 1) for case in range(len(output))]
    losses = torch.stack([loss(output[case], part_of(targets, case)) for case in singly])
    gradients = torch.autograd.grad(losses.sum(), list(each.values()), materialize_grads=True)
    return losses.detach(), list(gradients)


class ClippedSum:
    """Clips the gradient of each privacy unit, and sums the clipped gradients.

    The cases of one patient may be spread over consecutive batches.
    """

    def __init__(self, weights: Sequence[Tensor], bound: float) -> None:
        self.bound = bound
        self.total = [torch.zeros(weight.shape, dtype=torch.float64, device=weight.device) for weight in weights]
        # The last privacy unit and the sum of its gradients are kept, because the next batch may contain more cases of
        # this unit.
        self.open: tuple[int, list[Tensor]] | None = None

    def add(self, gradients: Sequence[Tensor], owners: Tensor) -> None:
        gradients = _without_infinite(gradients)
        units, places = owners.unique_consecutive(return_inverse=True)
        if len(units) < len(owners):
            there = places.to(gradients[0].device, non_blocking=True)
            gradients = [
                gradient.new_zeros(len(units), *gradient.shape[1:]).index_add_(0, there, gradient)
                for gradient in gradients
            ]
        if self.open and self.open[0] == int(units[0]):
            rests = zip(gradients, self.open[1], strict=True)
            gradients = [torch.cat([own[:1] + before, own[1:]]) for own, before in rests]
        elif self.open:
            self._clip([own[None] for own in self.open[1]])
        self._clip([own[:-1] for own in gradients])
        self.open = int(units[-1]), [own[-1].clone() for own in gradients]

    def finish(self) -> None:
        """After the last batch, clip the gradient of the last privacy unit, and add the clipped gradient to the sum."""
        if self.open:
            self._clip([own[None] for own in self.open[1]])
            self.open = None

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        if not len(gradients[0]):
            return
        parts = [torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64) for gradient in gradients]
        lengths = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        # if a norm is 0, the division gives infinity, and the clipping factor is 1
        factors = (WITHIN * self.bound / lengths).clamp(max=1.0)
        for total, own in zip(self.total, gradients, strict=True):
            whole, each = total.view(-1), own.flatten(1)
            # norms are computed in float64, because the rounding errors of float32 exceed the margin WITHIN
            for start in range(0, len(whole), COLUMNS):
                whole[start : start + COLUMNS] += factors @ each[:, start : start + COLUMNS].double()


def _without_infinite(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Set all gradients of a case to 0 if at least one gradient value of this case is not finite.

    An infinite gradient would make the sum over privacy units infinite, and no noise hides infinity. On a GPU, the
    function copies no result to the CPU, because a copy would wait for the GPU.
    """
    if gradients[0].device.type == "cpu":
        finite = torch.stack([gradient.flatten(1).sum(1).isfinite() for gradient in gradients]).all(0)
        if bool(finite.all()):
            return list(gradients)
    exactly = torch.stack([own.flatten(1).isfinite().all(1) for own in gradients]).all(0)
    return [own.masked_fill(~exactly.view(-1, *[1] * (own.ndim - 1)), 0) for own in gradients]
