"""APFL: Deng et al., Adaptive Personalized Federated Learning, 2020."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.tensors import Modules
from medsilo.course.phase import Blueprint, Workbench
from medsilo.learning.loop import Lesson
from medsilo.learning.personal import choosing_alpha, interpolate, interpolated
from medsilo.methods.bases import SharedAndOwn


class Share(nn.Module):
    """α of one site."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))


class APFL(SharedAndOwn):
    """v ← v − η α ∇f(α v + (1 − α) w) beside FedAvg's w, alternating batch by batch; α v + (1 − α) w predicts.

    The mixture serves the prediction only: it never takes v's place. Both gradients are taken before either step.
    """

    title = "APFL"
    paper = "Deng et al. 2020"
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["apfl"] = "apfl"
    alpha: float = Field(
        0.5, ge=0, le=1, description="the site's own model's share in the mixture; 0 is FedAvg, 1 is training alone"
    )
    adaptive: bool = Field(
        False, description="each site adjusts its own share once a round, with the plan's learning rate"
    )

    def networks(self, build: Blueprint) -> Modules:
        modules = super().networks(build)
        return {**modules, "local": deepcopy(modules["global"]), "share": Share(self.alpha)}

    def personalise(self, bench: Workbench) -> None:
        model, w, v, alpha = _parts(bench.modules)
        interpolate(model, v, w, alpha)

    @contextmanager
    def learning(self, bench: Workbench) -> Iterator[Sequence[Lesson]]:
        _, w, v, alpha = _parts(bench.modules)
        lesson = bench.lesson("local", interpolated(bench.loss, w, alpha))
        if self.adaptive:
            rate = bench.training.learning_rate
            lesson = choosing_alpha(lesson, v, w, alpha, bench.loss, rate, bench.compute)
        yield lesson, bench.lesson("global")


def _parts(modules: Modules) -> tuple[nn.Module, nn.Module, nn.Module, Tensor]:
    return modules["model"], modules["global"], modules["local"], cast(Tensor, modules["share"].alpha)
