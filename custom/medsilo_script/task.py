"""Describe the task of a user's script by the name of its metric, because only the script knows data and loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from medsilo.core.errors import DataError, MedsiloError
from medsilo.models.network import Network
from medsilo.runs.schema import FURTHEST
from medsilo.tasks.objective import Objective
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.task import Task


class ScriptObjective(Objective):
    """The objective of a script that computes its metric itself; higher values are better."""

    metric_range = (-FURTHEST, FURTHEST)
    outputs = 1

    def __init__(self, metric: str) -> None:
        self.metric = metric

    @property
    def layout(self) -> dict[str, int]:
        return {}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        raise MedsiloError("medsilo cannot compute the loss of a training script")

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the accuracy of each case: the fraction of the case's positions, such as pixels, with the right class.
        A super model uses the accuracies of cases to choose its threshold.
        """
        found = output.argmax(1)
        return (found == target.reshape(found.shape)).float().reshape(len(found), -1).mean(1)


class ScriptTask(Task):
    """The task of a user's training script, to whose data and loss medsilo has no access."""

    title = "a training script of its own"
    scripted: ClassVar[bool] = True

    name: Literal["script"] = "script"
    metric: str = Field("accuracy", min_length=1, max_length=60, description="the name of the script's metric")
    lower_is_better: bool = Field(False, description="whether a lower value of the metric is better")
    logs: tuple[Annotated[str, Field(min_length=1, max_length=60)], ...] = Field(
        (),
        max_length=100,
        description="names of numbers that the script logs and the server's tracker receives, besides `metric`",
    )
    repeats: bool = Field(
        False,
        description="whether sites seed the script's random generators before each round. The seed comes from the "
        "plan for public or simulated data, and otherwise from a secret of the site",
    )
    input_channels: int = Field(
        1, ge=1, le=100_000, description="number of input channels, which FedSM's selector needs"
    )
    input_shape: Annotated[tuple[int, ...], Field(min_length=1, max_length=4)] | None = Field(
        None, description="shape of one input, [channels, ...], which HarmoFL's amplitude normalisation needs"
    )

    @property
    def goal(self) -> Objective:
        return ScriptObjective(f"-{self.metric}" if self.lower_is_better else self.metric)

    @property
    def channels(self) -> int:
        return self.input_shape[0] if self.input_shape else self.input_channels

    @property
    def shape(self) -> tuple[int, ...] | None:
        return self.input_shape

    def default_network(self) -> Network | str:
        raise DataError("task script: the plan must describe the script's network; make the plan with a recipe")

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        raise DataError("task script: the training script reads the data; run the job with a recipe of medsilo.recipes")
