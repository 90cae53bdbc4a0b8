"""Define the training loop and the evaluation loop, which all methods use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset

from medsilo.core.errors import Refused
from medsilo.learning.compute import Case, Compute, LossFunction, Stop
from medsilo.learning.sampling import ChangedBatches, DrawnCases

FURTHEST = 1e15  # limit on the absolute values of a network's outputs in scoring, so that sums of squares stay finite

ObjectiveFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (network, inputs, targets) -> loss
Closure = Callable[[], Tensor]  # computes the gradients of one mini-batch, and returns the loss
Step = Callable[[Optimizer, Closure], Tensor]  # makes one optimizer step, and returns the loss
TrainStep = Callable[[Tensor, Tensor], Tensor]  # trains on the batch (inputs, targets), and returns the loss


def plain_step(optimizer: Optimizer, closure: Closure) -> Tensor:
    loss = closure()
    optimizer.step()
    return loss


@dataclass(frozen=True)
class Watch:
    """Calls a function on each training batch, but trains no network."""

    look: TrainStep

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.look(inputs, targets)


def batches(
    dataset: Dataset, batch_size: int, compute: Compute, shuffle: torch.Generator | None = None, whole: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a data set on the site's device, either in order or in an order shuffled by a random
    generator.

    Args:
        whole: Whether to keep a last shuffled batch that has only one case, although batch norm can't train on it.
    """
    size = len(dataset)  # type: ignore[arg-type]
    drop_last = shuffle is not None and not whole and steps_in(size, batch_size) * batch_size < size
    order = RandomSampler(range(size), generator=shuffle) if shuffle else SequentialSampler(range(size))
    sampler: Any = BatchSampler(order, batch_size, drop_last)
    if isinstance(dataset, TensorDataset):  # the data are in memory, so it is fastest to index the data once per batch
        for batch in DataLoader(ForCard(dataset) if compute.on_card else dataset, sampler=sampler, batch_size=None):
            yield compute.moved(*batch)
    else:
        yield from loaded(dataset, sampler, compute)


def loaded(dataset: Dataset, batches: Iterable[list[int]], compute: Compute) -> Iterator[Case]:
    """Yield batches on the site's device; if the device is a GPU, the GPU augments whole batches.

    Args:
        batches: The indices of the cases in each batch.
    """
    try:
        yield from _loaded(dataset, batches, compute)
    except RuntimeError as error:
        if not compute.workers or "shared memory" not in str(error):
            raise
        raise Refused(
            "the processes that read cases have no shared memory: set threads: 1 in medsilo.yaml, or enlarge /dev/shm"
        ) from error


def _loaded(dataset: Dataset, batches: Iterable[list[int]], compute: Compute) -> Iterator[Case]:
    parallel: Any = {"num_workers": compute.workers, "pin_memory": compute.on_card}
    if not (isinstance(dataset, DrawnCases) and dataset.change):
        for inputs, targets in DataLoader(dataset, batch_sampler=batches, **parallel):
            yield compute.moved(inputs, targets)
        return
    whole: Any = ChangedBatches(dataset, later=compute.on_card)
    for inputs, targets, *seeds in DataLoader(whole, sampler=batches, batch_size=None, **parallel):
        batch = compute.moved(inputs, targets)
        yield dataset.changed(*batch, *seeds) if seeds else batch


class ForCard(Dataset):
    """A data set whose batches are copied into pinned memory, which a GPU can read asynchronously."""

    def __init__(self, cases: TensorDataset) -> None:
        self.tensors = cases.tensors

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, ...]:
        index = torch.tensor(indices)
        there = [
            torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True) for tensor in self.tensors
        ]
        return tuple(torch.index_select(own, 0, index, out=to) for own, to in zip(self.tensors, there, strict=True))


def steps_in(cases: int, batch_size: int) -> int:
    """Return the number of mini-batches in one training epoch.

    The last batch of an epoch does not count if it has only one case, unless it is the only batch.
    """
    return max(1, cases // batch_size + (cases % batch_size > 1))


def passed_through(
    layer: nn.Module, data: Iterator[tuple[Tensor, Tensor]], learns: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """Errors of an input layer on a GPU are raised only at the end of the epoch, so that no batch waits for the GPU."""
    layer.train(learns)
    for inputs, targets in data:
        yield layer(inputs), targets
    getattr(layer, "end_pass", lambda: None)()


@dataclass(frozen=True)
class OutputLoss:
    """An objective that depends only on a network's outputs and the targets, so that it can be computed for each single
    case.
    """

    loss: LossFunction

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(model(inputs), targets)


def train_step(
    model: nn.Module, objective: ObjectiveFunction, optimizer: Optimizer, compute: Compute, step: Step = plain_step
) -> TrainStep:
    model.train()

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            with compute.cast():
                loss = objective(model, inputs, targets)
            loss.backward()
            return loss.detach()

        return step(optimizer, closure)

    return learn


def train_epoch(
    data: Iterator[tuple[Tensor, Tensor]], train_steps: Sequence[TrainStep], compute: Compute, stop: Stop = lambda: None
) -> float:
    """Apply all training step functions to each batch. Return the mean loss over cases, as computed by the first
    training step function.
    """
    total, cases = torch.zeros((), dtype=torch.float64, device=compute.device), 0
    for inputs, targets in data:
        stop()
        first, *_ = [learn(inputs, targets) for learn in train_steps]
        total += first * len(inputs)
        cases += len(inputs)
    return float(total / cases)


def as_scored(output: Tensor, of_patients: bool) -> Tensor:
    """If the inputs are patients' data, replace NaN in a network's output by 0, and infinity by a large value.

    If NaN raised an error, a crafted model could disclose whether a hospital has a certain case. If the inputs are not
    patients' data, the function raises Refused for NaN.
    """
    if of_patients:
        return output.nan_to_num().clamp(-FURTHEST, FURTHEST)
    if bool(output.isnan().any()):  # NaN is refused, because argmax would turn NaN into a class
        raise Refused(
            "the model's output is NaN, so it is not scored; lower training.learning_rate, or the server's step if "
            "the plan has one"
        )
    return output


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Iterator[Case],
    loss_function: LossFunction,
    measure: Callable[[Tensor, Tensor], dict[str, Tensor]],
    compute: Compute,
    stop: Stop = lambda: None,
    infer: Callable[[nn.Module, Tensor], Tensor] = lambda model, inputs: model(inputs),
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over cases, and, for each metric, a float64 tensor with one value per case."""
    model.eval()
    loss, cases = torch.zeros((), dtype=torch.float64, device=compute.device), 0
    measured: dict[str, list[Tensor]] = {}
    for inputs, targets in data:
        stop()
        with compute.cast():
            output = infer(model, inputs)
        output = output.float()
        loss += loss_function(output, targets) * len(inputs)
        cases += len(inputs)
        for name, values in measure(output, targets).items():
            measured.setdefault(name, []).append(values.double())
    return float(loss / cases), {name: torch.cat(values).cpu() for name, values in measured.items()}
