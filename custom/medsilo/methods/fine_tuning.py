"""Fine-tuning: FedAvg's model, trained on by each site alone before it is used; "FT" of the FedSM paper's Table 6."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

from pydantic import Field

from medsilo.learning.loop import TrainStep
from medsilo.methods.bases import SharedAndOwn, copy_into
from medsilo.schedule.train_context import TrainContext


class FineTuning(SharedAndOwn):
    """FedAvg of w; a site's own model is w after some epochs on its training data, made from each w that arrives."""

    title = "Fine-tuning"
    paper = "Wang et al. 2019"
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["fine-tuning"] = "fine-tuning"
    epochs: int = Field(
        1, ge=0, le=1000, description="passes over a site's training data before each evaluation; 0 is FedAvg"
    )

    steps: int | None = Field(None, ge=1, le=100_000, description="mini-batches in place of epochs, in repeated passes")

    def personalise(self, bench: TrainContext) -> None:
        copy_into(bench.modules["model"], bench.modules["global"])
        tune = bench.lesson("model")
        most = self.epochs * bench.cases.steps if self.steps is None else self.steps
        for number, done in enumerate(range(0, most, bench.cases.steps)):
            bench.cases.epoch([tune], number, most - done)
        bench.optimizers["model"].state.clear()  # fine-tuning starts with a fresh optimizer state

    @contextmanager
    def learning(self, bench: TrainContext) -> Iterator[Sequence[TrainStep]]:
        yield [bench.lesson("global")]
