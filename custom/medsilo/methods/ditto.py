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
    """v ← v − η (∇f(v) + λ (v − w_t)) beside FedAvg's w, in one pass over the data; w_t is w as it arrived."""

    title = "Ditto"
    paper = "Li et al. 2021 (Ditto)"

    exact_networks = ("model",)
    name: Literal["ditto"] = "ditto"
    pull: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="λ: how strongly a site's own model is held near the shared one; 0 is training alone",
    )

    def private(self) -> Private:
        says = "the site's own model learns by exact steps: it stays, and the shared one does not depend on it"
        return Private(("global",), self.exact_networks, says)

    @contextmanager
    def learning(self, bench: TrainContext) -> Iterator[Sequence[TrainStep]]:
        own, shared = (list(bench.modules[name].parameters()) for name in ("model", "global"))
        pull = pull_back(own, self.pull, to=shared)
        with correcting(bench.optimizers["model"], pull):
            yield bench.lesson("model"), bench.lesson("global")
