"""Processes that train one network together: each takes its share of every batch, and gradients are averaged.

Every process runs the same method on the same draws, so that whatever comes after a gradient (corrections, momentum,
perturbations, further networks) is the same in all of them without another word between them.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Team:
    """A process that trains by itself: it takes whole batches, and its gradients are the batch's."""

    whole: int | None = None  # cases of the whole batch at hand, where it is shared out

    def share(self, batch: list[int]) -> list[int]:
        """Return the cases of a batch that this process takes."""
        return batch

    def begin(self, cases: int) -> None:
        """Set the number of cases in the whole batch at hand."""

    def weight(self) -> float:
        """Return how much a case of the batch at hand counts here in a sum over the cases of all processes."""
        return 1.0

    def average(self, gradients: Sequence[Tensor | None], loss: Tensor, cases: float) -> Tensor:
        """Make the gradients those of the whole batch, in place; returns the whole batch's loss.

        cases: on which the gradients and the loss rest here, which both are means over.
        """
        return loss

    def told(self, number: float | None) -> float | None:
        """Return the number that the first process found."""
        return number


ALONE = Team()


class ProcessTeam(Team):
    """One of several processes, which add up their numbers by one of torch's process groups."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self.group, self.rank, self.size, self.device = group, rank, size, device

    def share(self, batch: list[int]) -> list[int]:
        """Return every `size`-th case; of a batch with fewer cases than processes, each takes all."""
        return batch if len(batch) < self.size else batch[self.rank :: self.size]

    def begin(self, cases: int) -> None:
        self.whole = cases

    def weight(self) -> float:
        return 1 / self.size if self.whole is not None and self.whole < self.size else 1.0

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor | None], loss: Tensor, cases: float) -> Tensor:
        there = [own for own in gradients if own is not None]
        numbers = [*(own.flatten() for own in there), loss.view(1), torch.ones(1, device=self.device)]
        together = torch.cat(numbers) * cases
        self.group.allreduce([together]).wait()
        *means, mean_loss, _ = (together / together[-1]).split([len(own) for own in numbers])
        for own, mean in zip(there, means, strict=True):
            own.copy_(mean.view_as(own))
        return mean_loss[0].to(loss.dtype)

    def told(self, number: float | None) -> float | None:
        own = 0.0 if self.rank else math.nan if number is None else number
        found = torch.tensor([own], dtype=torch.float64, device=self.device)
        self.group.allreduce([found]).wait()
        return None if found.isnan() else float(found)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return a hash of tensors' bits, in their order."""
    known = hashlib.sha256()
    for tensor in tensors:
        known.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return known.hexdigest()
