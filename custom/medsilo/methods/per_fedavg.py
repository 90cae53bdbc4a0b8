"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

from pydantic import Field

from medsilo.course.phase import Workbench
from medsilo.learning.loop import Lesson, OutputLoss
from medsilo.learning.personal import MetaGradient, adapt, copy_into
from medsilo.methods.bases import SharedAndOwn


class PerFedAvg(SharedAndOwn):
    """FedAvg of a w that is good one step later: min_w Σ p_k f_k(w − a ∇f_k(w)), by gradients of the first order.

    A site's own model is w after that one step, made from each w that arrives, with the gradient over all its
    training data: the expectation of the paper's Eq. 3. Neither validation nor test data are adapted to.
    """

    title = "Per-FedAvg"
    paper = "Fallah et al. 2020"
    own_step: ClassVar[bool] = True
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["per-fedavg"] = "per-fedavg"
    inner_lr: float = Field(0.01, ge=0, le=1000, description="a: the step of adaptation; the plan's learning rate is b")

    def personalise(self, bench: Workbench) -> None:
        model = bench.modules["model"]
        copy_into(model, bench.modules["global"])
        adapt(model, OutputLoss(bench.loss), self.inner_lr, lambda lessons: bench.epoch(lessons, 0), bench.compute)

    @contextmanager
    def learning(self, bench: Workbench) -> Iterator[Sequence[Lesson]]:
        meta = MetaGradient(bench.modules["global"], bench.loss, self.inner_lr, bench.compute)
        yield [meta.lesson(bench.lesson("global", meta.objective))]
