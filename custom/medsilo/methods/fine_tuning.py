"""Fine-tuning of FedAvg's model at each site, which is the method "FT" in Table 6 of the FedSM paper."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

from pydantic import Field

from medsilo.learning.loop import TrainStep
from medsilo.methods.bases import SharedAndOwn, copy_into
from medsilo.schedule.train_context import TrainContext


class FineTuning(SharedAndOwn):
    """FedAvg, after which each site fine-tunes the final shared model for some epochs on the site's training data."""

    title = "Fine-tuning"
    paper = "Wang et al. 2019"
    sends = "shared model"
    stays = "the fine-tuned model"
    extra_work = "the epochs of fine-tuning before every validation"
    suits = "the simplest personal model for each hospital; try fine-tuning before other personal models"
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["fine-tuning"] = "fine-tuning"
    epochs: int = Field(
        1,
        ge=0,
        le=1000,
        description="number of fine-tuning passes over a site's training data before each evaluation; with 0, the "
        "method is FedAvg",
    )

    steps: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="number of mini-batches for fine-tuning; if this key is set, `epochs` has no effect",
    )

    def personalise(self, context: TrainContext) -> None:
        copy_into(context.modules["model"], context.modules["global"])
        tune = context.train_step("model")
        most = self.epochs * context.cases.steps if self.steps is None else self.steps
        for number, done in enumerate(range(0, most, context.cases.steps)):
            context.cases.epoch([tune], number, most - done)
        context.optimizers["model"].state.clear()  # the next fine-tuning starts with a fresh optimizer state

    @contextmanager
    def learning(self, context: TrainContext) -> Iterator[Sequence[TrainStep]]:
        yield [context.train_step("global")]
