"""Create the optimizer that a plan's section `training` describes."""

from collections.abc import Callable, Iterable
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import nn, optim

from medsilo.learning.training import Training


def optimizer_of(training: Training, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    numbers: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        made = uncompiled(optim.SGD)(parameters, momentum=training.momentum, nesterov=training.nesterov, **numbers)
    else:
        kind = optim.Adam if training.optimizer == "adam" else optim.AdamW
        made = uncompiled(kind)(parameters, betas=training.betas, **numbers)
    if training.clip:
        made.register_step_pre_hook(_clipping(training.clip))
    return made


def begin_round(training: Training, optimizer: optim.Optimizer, number: int, rounds: int) -> None:
    if not training.paced and not training.warmup:
        return
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * training.pace(number, rounds)


@cache
def uncompiled(kind: type[optim.Optimizer]) -> Callable[..., optim.Optimizer]:
    """Return a subclass of a PyTorch optimizer. The subclass lacks the optimizer's wrappers for `torch.compile`.

    PyTorch's wrappers for `torch.compile` import a compiler, which costs each training process a second and 70 MB of
    memory.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad", "step")
    methods = {name: unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


def _clipping(most: float) -> Callable[..., None]:
    def clip(optimizer: optim.Optimizer, *_: object) -> None:
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], most)

    return clip
