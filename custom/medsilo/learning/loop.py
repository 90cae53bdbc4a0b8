"""The one training loop and the one evaluation loop of all methods."""

import os
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
from medsilo.learning.undrawn import know_marks

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
ONE_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # with which cuBLAS sums in one order
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
        if kind == "cuda":
            os.environ.setdefault(*ONE_WORKSPACE)
        return Compute(device=torch.device(device), **others)  # type: ignore[arg-type]

    @property
    def on_card(self) -> bool:
        """Return whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def told(self) -> str:
        """Return the device by name, and how exactly it computes."""
        if not self.on_card:
            return f"{self.device}, {self.precision}"
        convolutions = ", convolutions in TF32" if torch.backends.cudnn.allow_tf32 else ""
        products = ", matrix products in TF32" if torch.backends.cuda.matmul.allow_tf32 else ""
        name = torch.cuda.get_device_name(self.device)
        return f"{self.device} ({name}), {self.precision}{convolutions}{products}"

    @contextmanager
    def reproducible(self, seed: int) -> Iterator[None]:
        """Everything drawn or summed inside is the same at every call: seeded, with a fixed number of threads.

        Of several cards only the own is touched. What a card can sum in one order only it does; what has no such order
        there goes on, and torch warns of it.
        """
        threads = torch.get_num_threads()
        cudnn, sums = torch.backends.cudnn.deterministic, torch.get_deterministic_debug_mode()
        memory: Any = torch.utils.deterministic
        fills = memory.fill_uninitialized_memory
        torch.set_num_threads(self.threads)
        torch.backends.cudnn.deterministic = True
        if self.on_card:
            torch.set_deterministic_debug_mode("warn")
            memory.fill_uninitialized_memory = False  # it only hides what reads before it writes
        try:
            with torch.random.fork_rng(devices=[self.device] if self.on_card else []):
                seed_torch(seed, self.device)
                yield
        finally:
            torch.set_num_threads(threads)
            torch.backends.cudnn.deterministic = cudnn
            torch.set_deterministic_debug_mode(sums)
            memory.fill_uninitialized_memory = fills
            if self.on_card:
                torch.cuda.empty_cache()  # between two answers the card is another study's

    def moved(self, inputs: Tensor, targets: Tensor) -> Case:
        """Return a batch on the device, without waiting for it. What a loss asks of labels is read before."""
        there = targets.to(self.device, non_blocking=True)
        return inputs.to(self.device, non_blocking=True), know_marks(there, targets)

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
        loader = DataLoader(ForCard(dataset) if compute.on_card else dataset, sampler=sampler, batch_size=None)
    else:
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=compute.workers, pin_memory=compute.on_card)
    for inputs, targets in loader:
        yield compute.moved(inputs, targets)


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
