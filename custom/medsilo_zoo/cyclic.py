"""Cyclic weight transfer: Chang et al., Distributed deep learning networks among institutions for medical imaging,
JAMIA 2018."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from medsilo.extend import Algorithm, Group, Phase
from medsilo.extend.methods import BY_ITSELF, PlanError, ServerReadable, Training, UniformMean, generator_for, network


class OnlyAnswer(UniformMean):
    """The model of the one hospital that trained; without an answer it stays as it was."""

    @property
    def sealed(self) -> ServerReadable:
        return ServerReadable("one hospital's model is handed on at a time, which no sum hides")


class Cyclic(Algorithm):
    """w goes from hospital to hospital: in each round one trains it, and a cycle has a round for each.

    All validate it in every round, so that the best round is chosen as in other methods. A hospital's momentum waits
    while others train and goes on in its next turn, a whole cycle old; `training.optimizer_state: reset` begins afresh.
    """

    title = "Cyclic weight transfer"
    paper = "Chang et al. 2018"
    protocols = {"paper": {**BY_ITSELF, "algorithm.order": "fixed"}}

    name: Literal["cyclic"] = "cyclic"
    order: Literal["fixed", "drawn"] = Field(
        "fixed", description="the hospitals' order in a cycle: by name, or drawn for each cycle"
    )

    def phases(self, rounds: int) -> Sequence[Phase]:
        model = Group(
            "model",
            network("model"),
            lambda server: OnlyAnswer(),
            undefended="mixing: a round of cyclic weight transfer has a single hospital's model, so no robust rule can "
            "hold for it; choose fedavg, or set aggregation.robust=null",
        )
        told = "in a round one hospital trains and sends its model, which the next is given as it is"
        return [Phase("train", rounds, (model,), self.work, turn=self.turn, disclosure_notes=(told,))]

    def turn(self, number: int, sites: Sequence[str], seed: int) -> str:
        """Return whose turn it is."""
        cycle, place = divmod(number - 1, len(sites))
        if self.order == "drawn":
            place = int(torch.randperm(len(sites), generator=generator_for(seed, "cycle", cycle))[place])
        return sites[place]

    def check_training(self, training: Training) -> None:
        if self.amplitude and not self.amplitude.released_alone:
            raise PlanError(
                "algorithm.amplitude: only one hospital trains in the round that measures it; set "
                "algorithm.amplitude.measured=before, or algorithm.amplitude=null"
            )
