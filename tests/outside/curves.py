"""A reader from another package for a format that medsilo does not know: breathing curves as text files with a number
in each line.
"""

from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import Classification, DataError, OwnFolder


class Curves(OwnFolder):
    """Cut curves into cases [1, steps]; the last incomplete piece of a curve belongs to no case."""

    title: ClassVar[str] = "Curves of breath: even or uneven"
    files: ClassVar[str] = "curves"
    channels: ClassVar[int] = 1
    goal: ClassVar[Classification] = Classification(("even", "uneven"))

    name: Literal["curves"] = "curves"
    steps: int = Field(16, ge=4, description="how many numbers of a curve the network reads")

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.steps)

    def default_network(self) -> str:
        return "activity-cnn"

    def across_patients(self) -> str:
        return super().across_patients()

    def cases_in(self, files: tuple[Path, ...]) -> Tensor:
        try:
            numbers = torch.tensor([float(line) for line in files[0].read_text("utf-8").split()])
        except ValueError as error:
            raise DataError("curves have lines that are no numbers; export them again") from error
        if len(numbers) < self.steps:
            raise DataError(f"curves have fewer than {self.steps} numbers; leave them out, or agree on task.steps")
        return numbers[: len(numbers) // self.steps * self.steps].reshape(-1, 1, self.steps)
