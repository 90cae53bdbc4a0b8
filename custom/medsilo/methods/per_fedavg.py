"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ClassVar, Literal

from pydantic import Field

from medsilo.course.workbench import Workbench
from medsilo.learning.loop import Lesson, objective_of
from medsilo.learning.personal import DELTA, MetaGradient, adapt, copy_into
from medsilo.learning.steps import correcting
from medsilo.methods.shared_and_own import SharedAndOwn


class PerFedAvg(SharedAndOwn):
    """FedAvg of a w that is good one step later: min_w Σ p_k f_k(w − a ∇f_k(w)).

    A site's own model is w after that one step, made anew of each w that arrives, with the gradient over all its
    training data: the expectation of the paper's Eq. 3. Neither validation nor test data are adapted to.
    """

    title = "Per-FedAvg"
    paper = "Fallah et al. 2020"
    own_step: ClassVar[bool] = True
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["per-fedavg"] = "per-fedavg"
    inner_lr: float = Field(0.01, ge=0, le=1000, description="a: the step of adaptation; the plan's learning rate is b")
    variant: Literal["first-order", "hessian-free"] = Field(
        "first-order",
        description="the derivative of the adaptation: left out, or followed by a difference of gradients",
    )
    delta: float = Field(
        DELTA,
        gt=0,
        le=1,
        description="δ of `hessian-free`: how far along the gradient the difference is taken, in double precision. "
        "1e-9 agrees with the exact product also where a ReLU has a kink nearby; 0.001 does not",
    )

    def personalise(self, bench: Workbench) -> None:
        model = bench.modules["model"]
        copy_into(model, bench.modules["global"])
        adapt(model, objective_of(bench.loss), self.inner_lr, lambda lessons: bench.epoch(lessons, 0), bench.compute)

    @contextmanager
    def learning(self, bench: Workbench) -> Iterator[Sequence[Lesson]]:
        meta = MetaGradient(bench.modules["global"], bench.loss, self.inner_lr, bench.compute, self.delta)
        second = correcting(bench.optimizers["global"], meta.subtract_curvature)
        with second if self.variant == "hessian-free" else nullcontext():
            yield [meta.lesson(bench.lesson("global", meta.objective))]
