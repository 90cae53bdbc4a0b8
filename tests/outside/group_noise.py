"""A layer of another package: Gaussian noise on one group of a hospital's tensors, charged to the hospital's ledger."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from medsilo.extend import Layer, Plan, Site, SiteContext, StudyMessage


class GroupNoise(Layer):
    """Compute y = x · min(1, C / ‖x‖) + N(0, (σC)²), where x contains all tensors of the group."""

    name: Literal["group-noise"] = "group-noise"
    group: str = Field(description="the group of tensors that gets noise")
    noise: float = Field(ge=0.1, description="standard deviation of the noise, divided by the bound C (σ)")
    bound: float = Field(gt=0, description="norm to which the group is clipped (C)")

    def conflicts(self, plan: Plan, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        if self.group not in {group.name for phase in plan.course.phases for group in phase.sent}:
            yield f"layers: {plan.algorithm.name} sends no group {self.group}; name one that it sends"

    def leaves(self, plan: Plan) -> Iterable[str]:
        yield f"{self.group} leaves with Gaussian noise of {self.noise:g} times its bound, {self.bound:g}."

    def charges(self, task: str, number: int) -> Mapping[str, float]:
        # After clipping, two values of a group differ by at most 2 C, whatever the data.
        return {f"noise on {self.group}": self.noise / 2} if task == "round" else {}

    def site(self, inner: Site, context: SiteContext) -> Site:
        return NoisySite(self, inner)


class NoisySite:
    def __init__(self, layer: GroupNoise, inner: Site) -> None:
        self.layer, self.inner = layer, inner

    def answer(self, message: StudyMessage, stop: Callable[[], None]) -> StudyMessage:
        reply, name = self.inner.answer(message, stop), self.layer.group
        numbers = {key: own for key, own in reply.groups.get(name, {}).items() if own.is_floating_point()}
        if not numbers:
            return reply
        length = torch.stack([tensor.double().norm() for tensor in numbers.values()]).norm()
        factor = min(1.0, self.layer.bound / max(float(length), 1e-30))
        deviation = self.layer.noise * self.layer.bound
        noisy = {key: SiteContext.with_noise(tensor * factor, deviation) for key, tensor in numbers.items()}
        return replace(reply, groups={**reply.groups, name: reply.groups[name] | noisy})
