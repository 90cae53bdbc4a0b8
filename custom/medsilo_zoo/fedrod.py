"""FedRoD (Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image
Classification, ICLR 2022).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medsilo.extend import Task
from medsilo.extend.methods import (
    ModelFactory,
    Modules,
    OutputLoss,
    PlanError,
    SharedAndOwn,
    TrainContext,
    Training,
    TrainStep,
    balanced_softmax,
    called_with,
    copy_into,
    has_body_and_head,
    head_layers,
    head_names,
    keeping_statistics,
)


class FedRoD(SharedAndOwn):
    """FedAvg of a body φ and a generic head g, which are trained with balanced softmax. Each site also has its own head
    h_k, whose scores are added to the scores of g.

    The generic loss is ℓ_b(g(φ(x)), y), where log n_c is added to the score of each class c with n_c cases at the site.
    The site's own loss is ℓ(g(φ(x)) + h_k(φ(x)), y), which trains h_k only. The heads g and h_k are linear, so their
    sum is a single head.
    """

    title = "FedRoD"
    paper = "Chen and Chao 2022"
    sends = "shared model"
    stays = "the hospital's own head"
    extra_work = "each batch passes through the feature layers once more, without training"
    suits = "classes that are rare at some hospitals, and a shared model for new hospitals"
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["fedrod"] = "fedrod"

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        heads = nn.ModuleList(deepcopy(head) for head in head_layers(modules["global"]))
        for weight in heads.parameters():
            nn.init.zeros_(weight)
        return modules | {"own-head": heads}

    def personalise(self, context: TrainContext) -> None:
        """Make the site's own model from the body φ and the head g + h_k."""
        model = context.modules["model"]
        copy_into(model, context.modules["global"])
        with torch.no_grad():
            for name, more in zip(head_names(model), context.modules["own-head"].parameters(), strict=True):
                model.get_parameter(name).add_(more)

    @contextmanager
    def learning(self, context: TrainContext) -> Iterator[Sequence[TrainStep]]:
        """Yield the training steps of both heads. In each batch, h_k is trained first, so that both steps use the
        values of φ and g before this batch.
        """
        shared = context.modules["global"]

        def own(heads: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            weights = {name: weight.detach() for name, weight in shared.named_parameters()}
            for name, more in zip(head_names(shared), heads.parameters(), strict=True):
                weights[name] = weights[name] + more
            with keeping_statistics(shared):
                return context.loss(called_with(shared, weights, inputs), targets)

        generic = OutputLoss(balanced_softmax(context.loss, context.cases.labels()))
        yield context.train_step("own-head", own), context.train_step("global", generic)

    def check(self, modules: Modules) -> None:
        has_body_and_head(modules["global"], self.name)

    def check_training(self, training: Training) -> None:
        if training.class_weights != "none":
            raise PlanError(
                f"training.class_weights: {self.name} balances classes by balanced softmax; set class_weights to none"
            )

    def check_task(self, task: Task) -> None:
        if not task.goal.classifies:
            raise PlanError(
                f"algorithm.name: {self.name} balances the classes of cases, which task {task.name} doesn't have; "
                "choose fedrep or fedper, whose hospitals have heads of their own, too"
            )
