"""Differentially private steps (Abadi et al. 2016): each unit's gradient is clipped, and noise is added to their sum.

A unit is what one step draws and clips as one: a case, or a patient with all cases. Everything after the noise, such as
momentum, weight decay or a pull to other weights, tells no more of the cases. Gradients of single cases come from
Opacus, whose hooks are on a network only while a batch passes through it.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.learning.layers import is_frozen
from medsilo.learning.loop import Case, Compute, Lesson, LossFunction
from medsilo.learning.steps import Step, plain_step
from medsilo.privacy.noise import NoiseSource

AT_ONCE = 1 << 26  # numbers of single cases' gradients that are held at once
WITHIN = 1 - 1e-6  # of the bound, for what is rounded up, also by the noise's grid
COLUMNS = 1 << 18  # numbers of each case that are summed at once
SAME = 1e-2  # share by which the cases' gradients may miss the batch's through rounding
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# ---------------------------------------------------------------------------------------------------- which cases
class PoissonSample:
    """Units drawn for each step, each by itself with the same chance. `owners` tells whose the last batch's cases are.

    A batch has its units one after the other, and may be empty or larger than expected.
    """

    def __init__(
        self, units: Sequence[str] | None, cases: int, expected: float, secret: NoiseSource, size: int | None = None
    ) -> None:
        """units: the unit of each case, None where each is its own. expected: in a batch, on average, of so many in
        all: `size`, by default the cases."""
        names = range(cases) if units is None else units
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        self.members: list[list[int]] = [[] for _ in places]
        for case, name in enumerate(names):
            self.members[places[name]].append(case)
        known = cases if size is None else size
        self.rate = min(1.0, expected / known)
        self.expected = self.rate * known  # in a batch
        self.size = len(self.members) if size in (None, cases) else known  # units, as everybody may know
        self.secret = secret
        self.owners = torch.zeros(0, dtype=torch.int64)

    def batches(self, dataset: Dataset, steps: int, compute: Compute) -> Iterator[Case]:
        """Yield so many batches on the site's device."""
        drawn = [self.secret.drawn(len(self.members), self.rate) for _ in range(steps)]
        cases = [[case for unit in units for case in self.members[unit]] for units in drawn]
        loader = _loaded(dataset, [own for own in cases if own], compute)
        nothing: Case | None = None
        for units, own in zip(drawn, cases, strict=True):
            sizes = torch.tensor([len(self.members[unit]) for unit in units], dtype=torch.int64)
            self.owners = torch.repeat_interleave(torch.arange(len(units)), sizes)
            if own:
                inputs, targets = next(loader)
            else:
                nothing = nothing or _no_cases(dataset)
                inputs, targets = nothing
            yield inputs.to(compute.device, non_blocking=True), targets.to(compute.device, non_blocking=True)


def _loaded(dataset: Dataset, batches: Sequence[list[int]], compute: Compute) -> Iterator[Case]:
    """Return batches of these cases; of a data set in memory by one indexing each."""
    if isinstance(dataset, TensorDataset):
        return ((dataset.tensors[0][own], dataset.tensors[1][own]) for own in batches)
    return iter(DataLoader(dataset, batch_sampler=batches, num_workers=compute.workers))


def _no_cases(dataset: Dataset) -> Case:
    """Return a batch without cases, of the right shapes."""
    inputs, targets = dataset[0]
    return inputs[None][:0], torch.as_tensor(targets)[None][:0]


# ---------------------------------------------------------------------------------------------------- what is learned
def mixes_cases(module: nn.Module) -> str | None:
    """Return the kind of layer through which cases of a batch reach each other, or leave traces; None without one."""
    for layer in module.modules():
        if (isinstance(layer, _BatchNorm) and not is_frozen(layer)) or (
            isinstance(layer, _InstanceNorm) and layer.track_running_stats
        ):
            return type(layer).__name__
    return None


@dataclass
class PrivateSteps:
    """The tools that private lessons of a round share: the sample, the bound, the noise.

    noise: its standard deviation over the bound, of one network's gradient in one step. at_home: networks that learn by
    exact steps, since nothing of them leaves.
    """

    sample: PoissonSample
    bound: float  # on the length of a unit's gradient
    noise: float
    secret: NoiseSource
    at_home: tuple[str, ...] = ()
    releasing: float = math.inf  # noise on a mean over units that leaves, over the bound
    clip: float = 1.0  # the bound on a unit's part of such a mean
    checked: set[str] = field(default_factory=set, init=False)  # networks whose cases' gradients make a batch's

    def lesson(
        self, name: str, model: nn.Module, loss: LossFunction, optimizer: Optimizer, step: Step = plain_step
    ) -> Lesson:
        """Return how one network learns from a batch, with noisy gradients in place of exact ones."""
        model.train()

        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                return self.gradient(name, model, loss, inputs, targets)

            return step(optimizer, closure)

        return learn

    def gradient(self, name: str, model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor) -> Tensor:
        """Put (Σ_units clip(∇ of the unit) + noise) / expected cases into the weights; returns the mean loss.

        The mean loss is exact: it must not leave as it is.
        """
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = None
        clipped = ClippedSum(weights, self.bound)
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        with gradients_of_cases(model) as gradients:
            for part in self._portions(len(inputs), sum(weight.numel() for weight in weights)):
                here = inputs[part].detach()
                if here.is_floating_point() and name in self.checked:
                    here.requires_grad_()
                losses = losses_of_cases(model(here), targets[part], loss)
                total += losses.detach().sum()
                clipped.add(gradients(losses.sum(), here, weights), self.sample.owners[part])
                self.checked.add(name)
            clipped.finish()
        exact = torch.cat([own.flatten() for own in clipped.total])
        noisy = self.secret.with_normal(exact, self.noise * self.bound) / self.sample.expected
        for weight, own in zip(weights, noisy.split([w.numel() for w in weights]), strict=True):
            weight.grad = own.view_as(weight).to(weight.dtype)
        return total / max(1, len(inputs))

    def noisy_mean(self, vectors: Iterable[Tensor]) -> Tensor:
        """Return (Σ_units clip(mean of the unit's vectors) + noise) / units: one release.

        vectors: [cases, length] each, of all cases in their order. No more than the units whose cases are not complete
        are held.
        """
        unit_of = {case: unit for unit, own in enumerate(self.sample.members) for case in own}
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
        """Yield the cases that are computed together: about as many as in a batch, and no more than memory is for."""
        usual = round(self.sample.expected + 3 * math.sqrt(self.sample.expected))
        most = max(1, min(usual, AT_ONCE // max(weights, 1)))
        return (slice(first, min(first + most, cases)) for first in range(0, cases, most))


def unless_empty(inner: Lesson) -> Lesson:
    """Return the lesson that leaves out batches without cases, which a Poisson sample may bring."""

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        return inner(inputs, targets) if len(inputs) else torch.zeros((), device=inputs.device)

    return learn


def losses_of_cases(output: Tensor, targets: Tensor, loss: LossFunction) -> Tensor:
    """Return the loss of every case by itself: a loss of a batch may mix its cases."""
    return torch.stack([loss(output[case : case + 1], targets[case : case + 1]) for case in range(len(output))])


class ClippedSum:
    """The sum of units' gradients, each cut to the bound. A unit's cases may come in several portions, in order."""

    def __init__(self, weights: Sequence[Tensor], bound: float) -> None:
        self.bound = bound
        self.total = [torch.zeros(weight.shape, dtype=torch.float64, device=weight.device) for weight in weights]
        self.open: tuple[int, list[Tensor]] | None = None  # the unit whose cases may go on, and its gradient so far

    def add(self, gradients: Sequence[Tensor], owners: Tensor) -> None:
        """Add the gradients of cases, [cases, ...] each, whose units these are."""
        gradients = _without_infinite(gradients)
        units, places = owners.unique_consecutive(return_inverse=True)
        if len(units) < len(owners):
            gradients = [_summed(own, places.to(own.device), len(units)) for own in gradients]
        if self.open and self.open[0] == int(units[0]):
            for own, before in zip(gradients, self.open[1], strict=True):
                own[0] += before
        elif self.open:
            self._clip([own[None] for own in self.open[1]])
        self._clip([own[:-1] for own in gradients])
        self.open = int(units[-1]), [own[-1].clone() for own in gradients]

    def finish(self) -> None:
        """Close the last unit."""
        if self.open:
            self._clip([own[None] for own in self.open[1]])
            self.open = None

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        if not len(gradients[0]):
            return
        parts = [torch.linalg.vector_norm(own.flatten(1), dim=1, dtype=torch.float64) for own in gradients]
        lengths = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        factors = (WITHIN * self.bound / lengths).clamp(max=1.0)  # a length of 0 gives 1
        for total, own in zip(self.total, gradients, strict=True):
            whole, each = total.view(-1), own.flatten(1)
            for start in range(0, len(whole), COLUMNS):  # float32 would round by more than the bound has to spare
                whole[start : start + COLUMNS] += factors @ each[:, start : start + COLUMNS].double()


def _without_infinite(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients with nothing in place of those of a case that have a value which is not finite.

    Such a case would make the sum infinite whatever the others are, which no noise hides.
    """
    finite = torch.stack([own.flatten(1).sum(1).isfinite() for own in gradients]).all(0)
    if bool(finite.all()):
        return list(gradients)
    exactly = torch.stack([own.flatten(1).isfinite().all(1) for own in gradients]).all(0)
    return [own.masked_fill(~exactly.view(-1, *[1] * (own.ndim - 1)), 0) for own in gradients]


def _summed(gradients: Tensor, places: Tensor, units: int) -> Tensor:
    return gradients.new_zeros(units, *gradients.shape[1:]).index_add_(0, places, gradients)


# ---------------------------------------------------------------------------------------------------- Opacus
Gradients = Callable[
    [Tensor, Tensor, Sequence[Tensor]], list[Tensor]
]  # (sum of losses, inputs, weights) -> [cases, ...]


@contextmanager
def gradients_of_cases(model: nn.Module) -> Iterator[Gradients]:
    """Give a function that returns the gradient of each case of what passed through the model inside the block.

    Where the inputs require a gradient, the weights' own over the batch are not worked out. Where they don't, the sum
    of the cases' is held against it: a network may use a layer's weights in ways that its hooks don't see.
    """
    in_place = [layer for layer in model.modules() if getattr(layer, "inplace", False) is True]
    for layer in in_place:  # backward hooks and layers that write into their input exclude each other
        layer.inplace = False  # type: ignore[assignment]
    hooks = None
    try:
        hooks = _hooked(model)

        def gradients(losses: Tensor, inputs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
            losses.backward(inputs=[inputs] if inputs.requires_grad else None)
            found = [_taken(weight) for weight in weights]
            _check_whole(found, weights)
            cases = next((len(own) for own in found if own is not None), 0)
            return [
                own if own is not None else weight.new_zeros(cases, *weight.shape)
                for own, weight in zip(found, weights, strict=True)
            ]

        yield gradients
    finally:
        if hooks is not None:
            hooks.cleanup()
            for layer in model.modules():
                layer.__dict__.pop("activations", None)
                layer.__dict__.pop("max_batch_len", None)
        for layer in in_place:
            layer.inplace = True  # type: ignore[assignment]


def _hooked(model: nn.Module) -> Any:
    try:
        return _hooks()(model, loss_reduction="sum")
    except NotImplementedError as error:
        raise MedsiloError(
            "privacy: a layer of this network keeps numbers of the batch, so gradients of single cases don't exist; "
            "choose a network without it"
        ) from error


def _taken(weight: Any) -> Tensor | None:
    """Take the gradients of a weight's cases off it; None where nothing passed it."""
    own, weight.grad_sample = weight.grad_sample, None
    return own


def _check_whole(found: Sequence[Tensor | None], weights: Sequence[Tensor]) -> None:
    """Raise MedsiloError where the cases' gradients do not add up to the batch's, if that was worked out; forget it.

    What is missing in them is clipped and noised by nobody, but is not used either: it would only not be learned.
    """
    missed = whole = 0.0
    for own, weight in zip(found, weights, strict=True):
        together, weight.grad = weight.grad, None
        if together is not None:
            missed += float((together if own is None else together - own.sum(0)).square().sum())
            whole += float((together if own is None else own.flatten(1)).square().sum())
    if math.isfinite(missed) and missed > SAME**2 * whole:
        raise MedsiloError(
            "privacy: this network uses a layer's weights outside that layer, so they have no gradients of single "
            "cases; choose another network"
        )


@cache
def _hooks() -> type[Any]:
    """Return Opacus's hooks, with convolutions that cost what their gradients cost without it."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
    try:
        from opacus.grad_sample.grad_sample_module import GradSampleModule  # takes seconds
    except ImportError as error:
        raise MedsiloError(
            "privacy: gradients of single cases need Opacus, which is not installed; install medsilo[dp]"
        ) from error

    class GradientsOfCases(GradSampleModule):
        GRAD_SAMPLERS: Mapping[type[nn.Module], Any] = {
            **GradSampleModule.GRAD_SAMPLERS,
            **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED), _of_convolution),
        }

    return GradientsOfCases


def _of_convolution(layer: _ConvNd, activations: Sequence[Tensor], gradients: Tensor) -> dict[Tensor, Tensor]:
    """Return the gradients of a convolution for each case, one case after the other.

    Opacus unfolds the inputs, which takes as often their memory as the kernel has values, and works transposed ones out
    twice.
    """
    inputs = activations[0].to(gradients.dtype)
    inputs, padding = _padded(layer, inputs)
    transposed = isinstance(layer, _ConvTransposeNd)

    def of(case: int) -> Tensor:
        return torch.ops.aten.convolution_backward(
            gradients[case : case + 1],
            inputs[case : case + 1],
            layer.weight,
            None,
            layer.stride,
            padding,
            layer.dilation,
            transposed,
            layer.output_padding,
            layer.groups,
            [False, True, False],
        )[1]

    found: dict[Tensor, Tensor] = {}
    if layer.weight.requires_grad:
        each = [of(case) for case in range(len(inputs))]
        found[layer.weight] = torch.stack(each) if each else layer.weight.new_zeros(0, *layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = gradients.flatten(2).sum(2)
    return found


def _padded(layer: _ConvNd, inputs: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return the inputs and the padding that is left to do, where a layer's own words or modes decide it."""
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = nn.functional.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
        return padded, [0] * len(layer.kernel_size)
    return inputs, layer.padding
