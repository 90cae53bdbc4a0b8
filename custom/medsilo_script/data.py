"""Give medsilo's methods access to the data loaders of a user's training script."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.learning.compute import LossFunction
from medsilo.learning.seeds import seed_torch
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import DataPart

Metrics = Mapping[str, float]
Evaluate = Callable[[nn.Module], Metrics | float]
Batch = Callable[[Any], tuple[Tensor, Tensor]]
Samples = int | Mapping[DataPart, int] | None


def usual_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Split a batch into inputs and targets: the first two items of a list, or "image" and "label" of a MONAI
    dictionary.

    >>> usual_batch({"image": torch.zeros(2, 1), "label": torch.ones(2)})[1]
    tensor([1., 1.])
    """
    if isinstance(batch, Mapping):
        if "image" not in batch:
            raise MedsiloError(
                f"join: a batch has {', '.join(map(str, batch))}; give batch=, a function that returns its inputs and "
                "targets"
            )
        return batch["image"], batch.get("label", batch["image"])
    return (batch[0], batch[1]) if isinstance(batch, Sequence) and len(batch) > 1 else (batch, batch)


def refuse_beside_opacus(method: str) -> None:
    """Raise MedsiloError if a script uses Opacus and the method processes training data outside the script's steps.

    Opacus adds noise to the script's steps, but not to the passes over the data that the method makes.
    """
    if "opacus" in sys.modules:
        raise MedsiloError(
            f"join: this script imports Opacus, and {method} also computes results without noise from training data; "
            "take another method, such as FedAvg, or leave Opacus out"
        )


@dataclass
class Data:
    loader: Iterable[Any]
    validation: Iterable[Any] | None = None  # yields validation batches with labels, which FedSM needs
    # the number of training cases, or a mapping from each part of the data to its number of cases; by default, medsilo
    # counts the cases
    samples: Samples = None
    batch: Batch = usual_batch
    loss: LossFunction | None = None
    evaluate: Evaluate | None = None
    test: Evaluate | None = None
    # seed of the random numbers in each round, if the hospital's process outside the airlock has sent this seed
    repeats_from: int | None = field(default=None, init=False)
    passing: bool = field(default=False, init=False)  # True while a method iterates over a loader
    method: str = field(default="the method", init=False)

    def __post_init__(self) -> None:
        stated = self.samples if isinstance(self.samples, Mapping) else {}
        if odd := {*stated} - {*PARTS} or {part for part, number in stated.items() if number < 0}:
            raise MedsiloError(f"join: samples[{odd.pop()!r}] is wrong; give numbers of cases of {', '.join(PARTS)}")

    def cases(self, part: DataPart) -> int:
        """Return the number of training, validation or test cases, or 0 if the number is unknown. If the script does
        not state the number of cases, medsilo counts the cases in the loader.
        """
        if isinstance(self.samples, Mapping) and part in self.samples:
            return self.samples[part]
        if isinstance(self.samples, int) and part == "train":
            return self.samples
        loader: Any = {"train": self.loader, "validation": self.validation}.get(part)
        if isinstance(loader, Sequence):
            return sum(len(self.batch(batch)[0]) for batch in loader)
        try:
            return 0 if loader is None else len(loader.dataset)
        except (TypeError, AttributeError) as error:
            if part != "train":
                return 0
            raise MedsiloError("join: the loader does not say how many cases it has; give samples=") from error

    @property
    def steps(self) -> int:
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return 1

    def seed(self, seed: int) -> None:
        seed_torch(seed)
        if torch.cuda.is_initialized():  # CUDA is initialised only if the script uses a GPU
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # scripts may also use the random generators of Python and NumPy
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(seed)

    def batches(self, loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        refuse_beside_opacus(self.method)
        self.passing = True
        for batch in loader:
            inputs, targets = self.batch(batch)
            yield inputs.to(device), targets.to(device)
        self.passing = False

    def measured(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the training batches without changing the state of the script's random number generators."""
        generator: torch.Generator | None = getattr(self.loader, "generator", None)
        kept = None if generator is None else generator.get_state()
        with torch.random.fork_rng():
            yield from self.batches(self.loader, device)
        if generator is not None and kept is not None:
            generator.set_state(kept)
