"""The one training loop and the one evaluation loop of all methods."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset

from medsilo.core.errors import Refused
from medsilo.learning.compute import Case, Compute, LossFunction, Stop
from medsilo.learning.drawn import ChangedBatches, DrawnCases

FURTHEST = 1e15  # from 0, of an output that is scored: sums and squares of such numbers are finite

ObjectiveFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (network, inputs, targets) -> what is minimised
Closure = Callable[[], Tensor]  # computes gradients, returns the loss
Step = Callable[[Optimizer, Closure], Tensor]  # changes the weights by one mini-batch
TrainStep = Callable[[Tensor, Tensor], Tensor]  # (inputs, targets) -> loss, after the networks have learned from them


def plain_step(optimizer: Optimizer, closure: Closure) -> Tensor:
    """θ ← θ − lr · ∇ℓ(θ), whatever the optimizer makes of it."""
    loss = closure()
    optimizer.step()
    return loss


@dataclass(frozen=True)
class Watch:
    """A lesson from which no network learns: it looks at batches."""

    look: TrainStep

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.look(inputs, targets)


def batches(
    dataset: Dataset, batch_size: int, compute: Compute, shuffle: torch.Generator | None = None, whole: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """The data set in batches on the site's device; shuffled when a generator is given.

    A last training batch of one case is left out: batch norm can't be trained on it. `whole` leaves out none.
    """
    size = len(dataset)  # type: ignore[arg-type]
    drop_last = shuffle is not None and not whole and steps_in(size, batch_size) * batch_size < size
    order = RandomSampler(range(size), generator=shuffle) if shuffle else SequentialSampler(range(size))
    sampler: Any = BatchSampler(order, batch_size, drop_last)
    if isinstance(dataset, TensorDataset):  # lies in memory: one indexing per batch, not one per case
        for batch in DataLoader(ForCard(dataset) if compute.on_card else dataset, sampler=sampler, batch_size=None):
            yield compute.moved(*batch)
    else:
        yield from loaded(dataset, sampler, compute)


def loaded(dataset: Dataset, places: Iterable[list[int]], compute: Compute) -> Iterator[Case]:
    """Yield the batches of cases at these places on the site's device; a card changes there what changes as a batch."""
    try:
        yield from _loaded(dataset, places, compute)
    except RuntimeError as error:
        if not compute.workers or "shared memory" not in str(error):
            raise
        raise Refused(
            "the processes that read cases have no shared memory: set threads: 1 in medsilo.yaml, or give /dev/shm more"
        ) from error


def _loaded(dataset: Dataset, places: Iterable[list[int]], compute: Compute) -> Iterator[Case]:
    parallel: Any = {"num_workers": compute.workers, "pin_memory": compute.on_card}
    if not (isinstance(dataset, DrawnCases) and dataset.change):
        for inputs, targets in DataLoader(dataset, batch_sampler=places, **parallel):
            yield compute.moved(inputs, targets)
        return
    whole: Any = ChangedBatches(dataset, later=compute.on_card)
    for inputs, targets, *seeds in DataLoader(whole, sampler=places, batch_size=None, **parallel):
        batch = compute.moved(inputs, targets)
        yield dataset.changed(*batch, *seeds) if seeds else batch


class ForCard(Dataset):
    """Cases in memory, a batch at a time, copied once: to where a card reads them by itself."""

    def __init__(self, cases: TensorDataset) -> None:
        self.tensors = cases.tensors

    def __getitem__(self, places: list[int]) -> tuple[Tensor, ...]:
        index = torch.tensor(places)
        there = [torch.empty((len(index), *own.shape[1:]), dtype=own.dtype, pin_memory=True) for own in self.tensors]
        return tuple(torch.index_select(own, 0, index, out=to) for own, to in zip(self.tensors, there, strict=True))


def steps_in(cases: int, batch_size: int) -> int:
    """The mini-batches of one pass in training: a last one of one case is none, unless it is the only one."""
    return max(1, cases // batch_size + (cases % batch_size > 1))


def passed_through(
    layer: nn.Module, data: Iterator[tuple[Tensor, Tensor]], learns: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """Training data behind an input layer, which sees each batch once however often a step passes over it.

    What a layer finds wrong on a card it tells at the end (`end_pass`, if it has one): each batch would wait for it.
    """
    layer.train(learns)
    for inputs, targets in data:
        yield layer(inputs), targets
    getattr(layer, "end_pass", lambda: None)()


@dataclass(frozen=True)
class OutputLoss:
    """An objective that looks at a network's output alone, so that it is known case by case."""

    loss: LossFunction

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(model(inputs), targets)


def lesson(
    model: nn.Module, objective: ObjectiveFunction, optimizer: Optimizer, compute: Compute, step: Step = plain_step
) -> TrainStep:
    """One network learns from one batch."""
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
    data: Iterator[tuple[Tensor, Tensor]], lessons: Sequence[TrainStep], compute: Compute, stop: Stop = lambda: None
) -> float:
    """One pass over the data, every batch for all lessons in turn; returns the first's mean loss over cases."""
    total, cases = torch.zeros((), dtype=torch.float64, device=compute.device), 0
    for inputs, targets in data:
        stop()
        first, *_ = [learn(inputs, targets) for learn in lessons]
        total += first * len(inputs)
        cases += len(inputs)
    return float(total / cases)


def as_scored(output: Tensor, of_patients: bool) -> Tensor:
    """Return a network's output as it is scored; raises Refused where it is no number.

    of_patients: their answers leave rounded, and a study that stops would tell exactly whether there is one whom a
    crafted model answers with NaN. So what is no number counts as 0 there, and what is infinite as a large one.
    """
    if of_patients:
        return output.nan_to_num().clamp(-FURTHEST, FURTHEST)
    if bool(output.isnan().any()):  # of which argmax makes a class, too
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
    """Mean loss over cases, and what is measured of each case, [cases] float64."""
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
