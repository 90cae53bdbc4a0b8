"""The data of a user's own script: its loaders, as methods pass over them."""

import random
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
    """Return inputs and targets of a batch: the first two of a list, or "image" and "label" of MONAI's dictionary.

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


@dataclass
class Data:
    """What a script lets a method pass over, and how; and the functions by which it scores a model."""

    loader: Iterable[Any]  # the training batches
    validation: Iterable[Any] | None = None  # for FedSM's threshold
    samples: Samples = None  # training cases, or those of parts; by default those of the loaders' data sets
    batch: Batch = usual_batch
    loss: LossFunction | None = None  # for methods whose objective is more than the script's loss
    evaluate: Evaluate | None = None
    test: Evaluate | None = None  # scores the model that was chosen, once
    passing: bool = field(default=False, init=False)  # whether a method is in a pass of its own

    def __post_init__(self) -> None:
        stated = self.samples if isinstance(self.samples, Mapping) else {}
        if odd := {*stated} - {*PARTS} or {part for part, number in stated.items() if number < 0}:
            raise MedsiloError(f"join: samples has {odd.pop()!r} wrong; give cases of {', '.join(PARTS)}")

    def cases(self, part: DataPart) -> int:
        """Return the cases of a part, as the script states or a loader counts them; 0 where nobody knows."""
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
        """Return the batches of a pass."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return 1

    def seed(self, seed: int) -> None:
        """Let all chance of a round follow from a number, also where the script's process is another one."""
        seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # by which scripts draw
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(seed)

    def batches(self, loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pass."""
        self.passing = True
        for batch in loader:
            inputs, targets = self.batch(batch)
            yield inputs.to(device), targets.to(device)
        self.passing = False

    def measured(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pass over the training data that leaves the script's random numbers as they were."""
        generator: torch.Generator | None = getattr(self.loader, "generator", None)
        kept = None if generator is None else generator.get_state()
        with torch.random.fork_rng():
            yield from self.batches(self.loader, device)
        if generator is not None and kept is not None:
            generator.set_state(kept)
