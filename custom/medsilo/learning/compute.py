"""The device and precision of a party, and types of what it computes: what the server, too, knows of training."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.learning.seeds import seed_torch

LossFunction = Callable[[Tensor, Tensor], Tensor]

Case = tuple[Tensor, Tensor]  # inputs and targets, of one case or of a batch

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
                f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices; give cpu or auto "
                f"(--device, medsilo.yaml), or install a CUDA build of torch"
            )
        if kind == "cuda":
            os.environ.setdefault(*ONE_WORKSPACE)
        return Compute(device=torch.device(device), **others)  # type: ignore[arg-type]

    @property
    def on_card(self) -> bool:
        """Return whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def description(self) -> str:
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


# ---------------------------------------------------------------------- labels that a hospital did not draw
KNOWN = "known_marks"  # of labels on a card
BYTE = 8


def marks_in(target: Tensor) -> list[int]:
    """Return the mark of each case, [cases, ...]: the same at all of its places but those that were filled up."""
    if known := getattr(target, KNOWN, None):
        return known
    if target.is_floating_point() or target.dtype == torch.uint8 or not target.numel() or int(target.max()) <= 255:
        return [0] * len(target)
    return (target.view(len(target), -1).amax(1) >> BYTE << BYTE).tolist()


def labels_in(target: Tensor) -> Tensor:
    """Return labels without marks."""
    return target & 255 if not target.is_floating_point() and target.dtype != torch.uint8 else target


def know_marks(target: Tensor, read_from: Tensor) -> Tensor:
    """Return these labels, which know their marks from the same ones in memory: else each loss waits for the card."""
    if target.device.type != "cpu":
        setattr(target, KNOWN, marks_in(read_from))
    return target


def part_of(target: Tensor, cases: slice) -> Tensor:
    """Return the labels of some cases, which know their marks if the others did."""
    part, known = target[cases], getattr(target, KNOWN, None)
    if known:
        setattr(part, KNOWN, known[cases])
    return part
