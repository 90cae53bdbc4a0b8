"""pFedMe: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from medsilo.learning.layers import batch_norm_buffer_names
from medsilo.learning.loop import TrainStep
from medsilo.learning.steps import correcting, pull_towards
from medsilo.methods.bases import SharedAndOwn
from medsilo.mixing.aggregators import Aggregator
from medsilo.schedule.phase import ServerSide
from medsilo.schedule.train_context import TrainContext


class PFedMe(SharedAndOwn):
    """Each site trains a personal model θ that stays close to the shared model w.

    On each batch, K steps approximate θ ≈ argmin f(θ) + λ/2 ‖θ − w‖², and then w ← w − ηλ (w − θ). The server computes
    w ← (1 − β) w + β Σ p_k w_k. In each round, θ starts at the received w, and every batch changes θ.
    """

    title = "pFedMe"
    paper = "Dinh et al. 2020"
    sends = "shared model"
    stays = "the hospital's own model"
    extra_work = "K = 5 gradients per batch"
    suits = "a personal model for each hospital, with several training steps on every batch"
    own_loop: ClassVar[bool] = True

    name: Literal["pfedme"] = "pfedme"
    pull: float = Field(
        15.0, gt=0, le=1000, description="λ: strength of the pull of a site's personal model towards the shared model"
    )
    steps: int = Field(5, ge=1, le=1000, description="K: number of steps with the plan's optimizer on each batch")
    outer_lr: float = Field(
        0.05,
        gt=0,
        le=1,
        description="η: step size of the shared model; `outer_lr` times `pull` is at most 1. A small step size needs "
        "hundreds of rounds, because the shared model follows the personal models slowly",
    )
    server_lr: float = Field(
        1.0,
        gt=0,
        le=10,
        description="β: weight of the sites' new average, which the server mixes with the previous shared model",
    )

    @model_validator(mode="after")
    def _stays_between(self) -> Self:
        if self.outer_lr * self.pull > 1:
            raise ValueError(
                f"outer_lr {self.outer_lr} times pull {self.pull} is above 1: the shared model would move beyond the "
                "personal model; lower outer_lr or pull"
            )
        return self

    def mean(self, server: ServerSide, rate: float = 1.0) -> Aggregator:
        return super().mean(server, self.server_lr)

    @contextmanager
    def learning(self, context: TrainContext) -> Iterator[Sequence[TrainStep]]:
        own, shared = context.modules["model"], context.modules["global"]
        theta, w = (list[Tensor](network.parameters()) for network in (own, shared))
        with torch.no_grad():
            # only weights are copied, so the running statistics of the personal model stay unchanged
            torch._foreach_copy_(theta, w)
        pull = pull_towards(theta, w, self.pull)
        with correcting(context.optimizers["model"], pull):
            yield [moreau(context.train_step("model"), own, shared, self.steps, self.outer_lr * self.pull)]


def moreau(inner: TrainStep, module: nn.Module, shared: nn.Module, steps: int, rate: float) -> TrainStep:
    """Return a training step that takes K steps of θ on one batch, and then updates w ← w − ηλ (w − θ).

    The caller's optimizer must pull θ towards w, so that θ minimises f(θ) + λ/2 ‖θ − w‖². A separate pass over the
    batch measures the running statistics of w.

    Args:
        inner: the training step of θ
        module: the personal model θ
        shared: the shared model w
        rate: ηλ
    """
    measured = bool(batch_norm_buffer_names(shared))
    shared.train()

    @torch.no_grad()
    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            loss, *_ = [inner(inputs, targets) for _ in range(steps)]
        if measured:
            shared(inputs)
        torch._foreach_lerp_(list(shared.parameters()), list(module.parameters()), rate)
        return loss

    return learn
