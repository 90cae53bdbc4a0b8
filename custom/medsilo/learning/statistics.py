"""Measure the exact mean and variance of the inputs of a network's layers over a site's data (AdaFed, Equation 3)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError, Refused
from medsilo.learning.layers import batch_norm_layers, head_layers, local_norms

Statistics = list[tuple[Tensor, Tensor]]  # for each layer: (mean [channels], population variance [channels])
Layers = Literal["all", "last"]

# For each choice of layers to measure: the function that returns the layers, and the words for the layers in an error
# message.
MEASURED: Mapping[Layers, tuple[Callable[[nn.Module], Sequence[nn.Module]], str]] = {
    "all": (local_norms, "norm"),
    "last": (head_layers, "linear or convolution layer to measure the features before"),
}
PORTION = 1 << 18  # number of values that are summed at a time, so that temporary tensors fit into a CPU's cache


class ChannelMoments:
    """Computes the mean and population variance of each channel in double precision."""

    def __init__(self, channels_last: bool = False) -> None:
        self.channels_last = channels_last
        self.count = self.portions = 0
        self.centre = self.sums = self.squares = torch.zeros(0)

    def add(self, values: Tensor) -> None:
        """To keep single precision sufficient, the method does not sum the samples, but their differences from a centre
        near the mean. At first, the centre is the mean of the first portion of samples. After 2, 4, 8, ... portions of
        samples, the centre moves to the mean of all samples so far.

        Args:
            values: [batch, channels, ...], or [batch, ..., channels] if `channels_last` is true.
        """
        if values.numel():
            for portion in values.detach().split(max(1, PORTION * len(values) // values.numel())):
                self._add(portion)

    def _add(self, values: Tensor) -> None:
        channel = values.ndim - 1 if self.channels_last else 1
        axes = [axis for axis in range(values.ndim) if axis != channel]
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        if not self.count:
            self.centre = values.mean(axes)
            self.sums = torch.zeros_like(self.centre, dtype=torch.float64)
            self.squares = self.sums.clone()
        around = values - self.centre.view([-1] + [1] * (values.ndim - 1 - channel))
        self.sums += around.sum(axes)
        self.squares += around.square_().sum(axes)
        self.count += values.numel() // values.shape[channel]
        self.portions += 1
        if self.portions & (self.portions - 1) == 0:
            self._move()

    def _move(self) -> None:
        centre = self.mean.to(self.centre.dtype)
        step = centre.double() - self.centre.double()
        self.squares += step * (self.count * step - 2 * self.sums)
        self.sums -= self.count * step
        self.centre = centre

    @property
    def mean(self) -> Tensor:
        return self.centre.double() + self.sums / self.count

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.count - (self.sums / self.count).square()).clamp(min=0)


def measured_layers(model: nn.Module, layers: Layers = "all") -> list[nn.Module]:
    of, called = MEASURED[layers]
    if not (found := of(model)):
        raise MedsiloError(f"the network has no {called}; choose another network")
    return list(found)


def input_channels(layer: nn.Module) -> int:
    for name in ("num_features", "num_channels", "in_features", "in_channels"):
        if hasattr(layer, name):
            return int(getattr(layer, name))
    raise MedsiloError(
        f"{type(layer).__name__} does not state its number of channels; choose a network with batch norm"
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the context, put a network into evaluation mode; at the end, restore the mode of each layer."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def passes(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str,
    watched: Sequence[nn.Module],
    look: Callable[[int, Tensor], None],
) -> Iterator[None]:
    """Pass each batch through a network in evaluation mode, and yield None after each batch.

    Args:
        loader: batches of inputs, or tuples whose first item is a batch of inputs
        watched: the layers whose inputs are observed
        look: a function that receives the index in `watched` and the input of each watched layer
    """
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, place=place: look(place, inputs[0]))
        for place, layer in enumerate(watched)
    ]
    try:
        with evaluating(model):
            for batch in loader:
                model((batch[0] if isinstance(batch, (tuple, list)) else batch).to(device, non_blocking=True))
                yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def batch_norm_input_statistics(
    model: nn.Module, loader: Iterable[Any], device: torch.device | str = "cpu", layers: Layers = "all"
) -> Statistics:
    """Return the mean and population variance of each measured layer's inputs over all samples and positions.

    The data pass through the network once, and the statistics do not depend on the batch size. For each measured layer,
    the result contains (mean [channels], variance [channels]) in double precision.

    Args:
        loader: batches of inputs, or tuples whose first item is a batch of inputs
    """
    watched = measured_layers(model, layers)
    moments = [ChannelMoments(channels_last=isinstance(layer, nn.Linear)) for layer in watched]
    for _ in passes(model, loader, device, watched, lambda place, values: moments[place].add(values)):
        pass
    if not all(moment.count for moment in moments):
        raise MedsiloError("no statistics: there are no samples, or a layer of the network is never used")
    return [(own.mean.cpu(), own.variance.cpu()) for own in moments]


@torch.no_grad()
def moments_of_cases(
    model: nn.Module, loader: Iterable[Any], device: torch.device | str = "cpu", layers: Layers = "all"
) -> Iterator[Tensor]:
    """For each batch, yield a tensor that contains, for each case, the mean and the mean square of every input channel
    of the measured layers.

    A batch's tensor has the shape [cases, 2 · channels of all measured layers]. The rows of the tensor are divided by
    √(2 · channels), so that the norm of a row is a root mean square.
    """
    watched = measured_layers(model, layers)
    seen: dict[int, Tensor] = {}

    def keep(index: int, values: Tensor) -> None:
        values = values.detach().double()
        values = values.movedim(-1, 1) if isinstance(watched[index], nn.Linear) else values
        values = values.flatten(2) if values.ndim > 2 else values[..., None]
        seen[index] = torch.cat([values.mean(2), values.square().mean(2)], dim=1)

    for _ in passes(model, loader, device, watched, keep):
        found = torch.cat([seen[place] for place in range(len(watched))], dim=1)
        yield found / math.sqrt(found.shape[1])


def statistics_from(moments: Tensor, channels: Sequence[int]) -> Statistics:
    """Convert means and mean squares, averaged over all cases, to means and variances of channels.

    Privacy noise may cause negative variances, which become 0.
    """
    found = []
    for own in (moments.double() * math.sqrt(len(moments))).split([2 * count for count in channels]):
        mean, square = own.chunk(2)
        found.append((mean, (square - mean.square()).clamp(min=0)))
    return found


def running_statistics(model: nn.Module) -> Statistics:
    found = [(layer.get_buffer("running_mean"), layer.get_buffer("running_var")) for layer in batch_norm_layers(model)]
    return [(mean.double(), variance.double()) for mean, variance in found]


class StatisticsHolder(nn.Module):
    """The feature statistics of a site and the number of samples, which is 0 until statistics are stored.

    The plan's transport.precision does not round the statistics, because AdaFed's weights W depend on small differences
    between statistics.
    """

    samples: Tensor

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        for layer, count in enumerate(channels):
            for name in ("mean", "variance"):
                self.register_buffer(f"layer{layer}_{name}", torch.zeros(count, dtype=torch.float64))

    @torch.no_grad()
    def take(self, statistics: Statistics, samples: int) -> None:
        self.samples.fill_(samples)
        for layer, (mean, variance) in enumerate(statistics):
            self.get_buffer(f"layer{layer}_mean").copy_(mean)
            self.get_buffer(f"layer{layer}_variance").copy_(variance)


def statistics_of(tensors: Mapping[str, Tensor]) -> Statistics:
    return [(tensors[f"layer{n}_mean"], tensors[f"layer{n}_variance"]) for n in range((len(tensors) - 1) // 2)]


@torch.no_grad()
def adapt_batch_norm(model: nn.Module, data: Callable[[], Iterable[Tensor]]) -> None:
    """Set each batch norm's running statistics to the statistics of its inputs over all cases (AdaBN, Li et al. 2017).

    The running statistics become those that the network would have if it had trained, without dropout, on a single
    batch with all cases. Raises Refused if the data have fewer than two cases.

    Args:
        model: the network, which is changed in place
        data: a function that returns an iterator over batches of inputs, and is called for each batch norm
    """
    if sum(map(len, data())) < 2:
        raise Refused("batch norm's statistics need two cases at least, and this hospital has fewer")
    model.eval()
    layers = batch_norm_layers(model)
    for _ in layers:
        found = batch_norm_input_statistics(model, data(), next(model.parameters()).device)
        for layer, (mean, variance) in zip(layers, found, strict=True):
            if layer.running_mean is not None:
                for name, own in (("mean", mean), ("var", variance)):
                    layer.get_buffer(f"running_{name}").copy_(own)
                layer.get_buffer("num_batches_tracked").fill_(1)
