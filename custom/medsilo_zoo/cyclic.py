"""Cyclic weight transfer (Chang et al., Distributed deep learning networks among institutions for medical imaging,
JAMIA 2018).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from medsilo.extend import Algorithm, Group, Phase
from medsilo.extend.methods import BY_ITSELF, PlanError, ServerReadable, Training, UniformMean, generator_for, network


class OnlyAnswer(UniformMean):
    """Aggregates rounds in which a single hospital trains: the model of this hospital becomes the new shared model. If
    the hospital does not answer, the shared model stays the same.
    """

    @property
    def sealed(self) -> ServerReadable:
        return ServerReadable("one hospital's model is handed on at a time, which no sum hides")


class Cyclic(Algorithm):
    """The hospitals train one model in turn: in each round, one hospital trains, and a cycle has as many rounds as
    there are hospitals.

    In every round, all hospitals validate the model, so that the best round is chosen as in other methods. A hospital
    keeps its momentum until it trains again in the next cycle, unless `training.optimizer_state: reset` is set.
    """

    title = "Cyclic weight transfer"
    paper = "Chang et al. 2018"
    sends = "model"
    bytes_sent = "FedAvg's bytes divided by the number of hospitals"
    extra_work = "none; only one hospital trains in each round"
    suits = "models that should not be averaged, or hospitals that train at different times"
    protocols = {"paper": {**BY_ITSELF, "algorithm.order": "fixed"}}

    name: Literal["cyclic"] = "cyclic"
    order: Literal["fixed", "drawn"] = Field(
        "fixed", description="order of the hospitals in a cycle: `fixed` by name, or `drawn` at random for each cycle"
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
        return [Phase("train", rounds, (model,), self.train_round, turn=self.turn, disclosure_notes=(told,))]

    def turn(self, number: int, sites: Sequence[str], seed: int) -> str:
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
