"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from pydantic import Field

from medsilo.learning.loop import TrainStep
from medsilo.learning.steps import correcting, pull_back
from medsilo.methods.bases import SharedAndOwn
from medsilo.schedule.declared import Private
from medsilo.schedule.train_context import TrainContext


class Ditto(SharedAndOwn):
    """Each site trains FedAvg's shared model w and, on the same batches, a personal model v that is pulled towards w.

    The personal model takes the step v ← v − η (∇f(v) + λ (v − w_t)), where w_t is the shared model received in the
    round.
    """

    title = "Ditto"
    paper = "Li et al. 2021 (Ditto)"
    sends = "shared model"
    stays = "the hospital's own model"
    extra_work = "two networks learn"
    suits = "a personal model for each hospital, and protection from a bad shared model"

    exact_networks = ("model",)
    name: Literal["ditto"] = "ditto"
    pull: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="λ: strength of the pull of a site's personal model towards the shared model; 0 is single-site "
        "training",
    )

    def private(self) -> Private:
        says = "the site's personal model learns without noise, because it stays and does not affect the shared model"
        return Private(("global",), self.exact_networks, says)

    @contextmanager
    def learning(self, context: TrainContext) -> Iterator[Sequence[TrainStep]]:
        own, shared = (list(context.modules[name].parameters()) for name in ("model", "global"))
        pull = pull_back(own, self.pull, to=shared)
        with correcting(context.optimizers["model"], pull):
            yield context.train_step("model"), context.train_step("global")
