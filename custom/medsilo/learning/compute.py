"""Define the device and the numerical precision with which sites and the server compute."""

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

Case = tuple[Tensor, Tensor]  # (inputs, targets) of one case or of one batch

CPU = torch.device("cpu")

# environment variable that makes the order of cuBLAS's sums deterministic
ONE_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"

# a function that is called before every batch, and that raises an error if the run should stop
Stop = Callable[[], None]


@dataclass(frozen=True)
class Compute:
    device: torch.device = CPU
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    workers: int = 0

    @staticmethod
    def choose(device: str = "auto", **others: object) -> "Compute":
        """Return the settings for a device. Raises MedsiloError if this machine lacks the device.

        Args:
            device: "cpu", "cuda", "cuda:<n>", or "auto" for a GPU if this machine has one.
        """
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
        return self.device.type == "cuda"

    @property
    def description(self) -> str:
        if not self.on_card:
            return f"{self.device}, {self.precision}"
        convolutions = ", convolutions in TF32" if torch.backends.cudnn.allow_tf32 else ""
        products = ", matrix products in TF32" if torch.backends.cuda.matmul.allow_tf32 else ""
        name = torch.cuda.get_device_name(self.device)
        return f"{self.device} ({name}), {self.precision}{convolutions}{products}"

    @contextmanager
    def reproducible(self, seed: int) -> Iterator[None]:
        """Within the context, seed all generators of random numbers, and use deterministic operations.

        If a GPU operation has no deterministic version, PyTorch logs a warning and continues.
        """
        threads = torch.get_num_threads()
        cudnn, sums = torch.backends.cudnn.deterministic, torch.get_deterministic_debug_mode()
        memory: Any = torch.utils.deterministic
        fills = memory.fill_uninitialized_memory
        torch.set_num_threads(self.threads)
        torch.backends.cudnn.deterministic = True
        if self.on_card:
            torch.set_deterministic_debug_mode("warn")
            # new memory stays unfilled, because filling takes time and helps only in debugging
            memory.fill_uninitialized_memory = False
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
                # the memory is released, because another study may use the GPU before the present study trains again
                torch.cuda.empty_cache()

    def moved(self, inputs: Tensor, targets: Tensor) -> Case:
        """Start an asynchronous copy of a batch to the device.

        Marks of structures without annotations are read from the CPU's copy of the labels, so that no loss function
        waits for the GPU.
        """
        there = targets.to(self.device, non_blocking=True)
        return inputs.to(self.device, non_blocking=True), know_marks(there, targets)

    def cast(self) -> AbstractContextManager:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


# ---------------------------------------------------------------------- structures that a hospital did not annotate

# attribute of a label tensor on a GPU: for each case, a number that marks the structures without annotations
KNOWN = "known_marks"
BYTE = 8


def marks_in(target: Tensor) -> list[int]:
    """Return a number for each case of the labels [cases, ...]; the bits of this number mark the structures without
    annotations. Padded pixels contain no mark, so the function uses the maximum over a case's pixels.
    """
    if known := getattr(target, KNOWN, None):
        return known
    if target.is_floating_point() or target.dtype == torch.uint8 or not target.numel() or int(target.max()) <= 255:
        return [0] * len(target)
    return (target.view(len(target), -1).amax(1) >> BYTE << BYTE).tolist()


def labels_in(target: Tensor) -> Tensor:
    """Remove from labels the bits that mark structures without annotations."""
    return target & 255 if not target.is_floating_point() and target.dtype != torch.uint8 else target


def know_marks(target: Tensor, read_from: Tensor) -> Tensor:
    """Attach to a tensor of labels on a GPU the marks of the structures that were not annotated in each case. The marks
    are read from a copy of the labels in the CPU's memory, so that no loss function waits for the GPU.

    Args:
        read_from: A copy of the labels in the CPU's memory.
    """
    if target.device.type != "cpu":
        setattr(target, KNOWN, marks_in(read_from))
    return target


def part_of(target: Tensor, cases: slice) -> Tensor:
    """Return the labels of the chosen cases; marks of missing annotations that are attached to the labels stay
    attached.
    """
    part, known = target[cases], getattr(target, KNOWN, None)
    if known:
        setattr(part, KNOWN, known[cases])
    return part
