"""A hospital's own adapter beside the shared one, the idea of Med-DualLoRA: both act, and one travels."""

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn

from medsilo.extend import Algorithm, Group, MedsiloError
from medsilo.extend.methods import Private
from medsilo_adapters.low_rank import OWN, add_own


class OwnAdapter(Algorithm):
    """y = W x + (α / r) (B A + B_k A_k) x: the server averages B A and all else that trains, site k keeps B_k A_k."""

    title = "Own adapter"
    paper = "Med-DualLoRA's idea, as FedAvg does it"
    personal = True

    name: Literal["own-adapter"] = "own-adapter"

    def networks(self, build: Callable[[], nn.Module]) -> dict[str, nn.Module]:
        model = build()
        add_own(model)
        return {"model": model}

    def check(self, modules: Mapping[str, nn.Module]) -> None:
        if not any(f".{OWN}." in name for name in modules["model"].state_dict()):
            raise MedsiloError(f"algorithm.name: {self.name} needs a network with adapters; set network.name=tuned")

    def groups(self) -> tuple[Group, ...]:
        return (Group("model", self.shared, title="model without the own adapter"),)

    def shared(self, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return what of the model travels."""
        return {name: own for name, own in modules["model"].state_dict().items() if f".{OWN}." not in name}

    def private(self) -> Private:
        return Private(
            ("model",), disclosure_notes="the own adapter learns by noisy steps, too: the shared one depends on it"
        )
