"""The one training loop and the one evaluation loop of all methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset

from medsilo.core.errors import MedsiloError, Refused
from medsilo.learning.seeds import seed_for, seed_torch
from medsilo.learning.steps import Step, plain_step

LossFunction = Callable[[Tensor, Tensor], Tensor]
Case = tuple[Tensor, Tensor]  # inputs and targets, of one case or of a batch
Draw = Callable[[Case, int], Case]  # what is made of a case, by a seed
Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (network, inputs, targets) -> what is minimised
Lesson = Callable[[Tensor, Tensor], Tensor]  # (inputs, targets) -> loss, after the networks have learned from them


@dataclass(frozen=True)
class Watch:
    """A lesson from which no network learns: it looks at batches."""

    look: Lesson

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.look(inputs, targets)


CPU = torch.device("cpu")
Stop = Callable[[], None]  # raises when the run was told to stop; asked before every batch


@dataclass(frozen=True)
class Compute:
    """A site's device and precision. They come from the site's own settings, never from a plan."""

    device: torch.device = CPU
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    workers: int = 0

    @staticmethod
    def choose(device: str = "auto", **others: object) -> "Compute":
        """Turns a device's name into a device that is there: "auto", "cpu", "cuda" or "cuda:<n>"."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, number = device.partition(":")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise MedsiloError(
                f"device {device} was asked for, but this machine shows {torch.cuda.device_count()} CUDA devices; take "
                "cpu or auto (--device, or in the site's medsilo.yaml), or install a CUDA build of torch"
            )
        return Compute(device=torch.device(device), **others)  # type: ignore[arg-type]

    @contextmanager
    def reproducible(self, seed: int) -> Iterator[None]:
        """Everything drawn or summed inside is the same at every call: seeded, with a fixed number of threads."""
        threads = torch.get_num_threads()
        cudnn = torch.backends.cudnn.deterministic
        torch.set_num_threads(self.threads)
        torch.backends.cudnn.deterministic = True
        try:
            with torch.random.fork_rng():
                seed_torch(seed)
                yield
        finally:
            torch.set_num_threads(threads)
            torch.backends.cudnn.deterministic = cudnn

    def cast(self) -> AbstractContextManager:
        """Mixed precision, if the site asked for it."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is a finite number: exactly when the least and the greatest are. One pass, no copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


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
        loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    else:
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=compute.workers)
    for inputs, targets in loader:
        yield inputs.to(compute.device, non_blocking=True), targets.to(compute.device, non_blocking=True)


def steps_in(cases: int, batch_size: int) -> int:
    """The mini-batches of one pass in training: a last one of one case is none, unless it is the only one."""
    return max(1, cases // batch_size + (cases % batch_size > 1))


def passed_through(
    layer: nn.Module, data: Iterator[tuple[Tensor, Tensor]], learns: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """Training data behind an input layer, which sees each batch once however often a step passes over it."""
    layer.train(learns)
    return ((layer(inputs), targets) for inputs, targets in data)


@dataclass(frozen=True)
class OutputLoss:
    """An objective that looks at a network's output alone, so that it is known case by case."""

    loss: LossFunction

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(model(inputs), targets)


def lesson(
    model: nn.Module, objective: Objective, optimizer: Optimizer, compute: Compute, step: Step = plain_step
) -> Lesson:
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
    data: Iterator[tuple[Tensor, Tensor]], lessons: Sequence[Lesson], compute: Compute, stop: Stop = lambda: None
) -> float:
    """One pass over the data, every batch for all lessons in turn; returns the first's mean loss over cases."""
    total, cases = torch.zeros((), dtype=torch.float64, device=compute.device), 0
    for inputs, targets in data:
        stop()
        first, *_ = [learn(inputs, targets) for learn in lessons]
        total += first * len(inputs)
        cases += len(inputs)
    return float(total / cases)


class DrawnCases(Dataset):
    """Training cases as one epoch sees them: each drawn from its seed, so that workers change nothing.

    A case's seed follows from its place; or, where `names` are given, from its name: then no case changes another's.
    """

    def __init__(self, cases: Dataset, draw: Draw, seed: int, names: Sequence[str] | None = None) -> None:
        self.cases, self.draw, self.seed, self.names = cases, draw, seed, names

    def __len__(self) -> int:
        return len(self.cases)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Case:
        return self.draw(self.cases[index], seed_for(self.seed, self.names[index] if self.names else index))


def refuse_nan(output: Tensor) -> None:
    """Raise Refused where a network's output is no number, so that nothing is scored by it."""
    if bool(output.isnan().any()):
        raise Refused(
            "the model's output is NaN, so it is not scored; lower training.learning_rate, or the server's step if "
            "the plan has one"
        )


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
