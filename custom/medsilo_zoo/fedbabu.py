"""FedBABU (Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022)."""

from typing import Literal

from pydantic import Field

from medsilo.extend import Group
from medsilo.extend.methods import FineTuning, ModelFactory, Modules, has_body_and_head, head_names, network


class FedBABU(FineTuning):
    """Sites train the shared body φ ← Σ p_k φ_k together with a random head h_0, which is never trained. After the last
    round, each site fine-tunes its own model.

    The head h_0 is the same at all sites. A site's own model is (φ, h_0), fine-tuned for some epochs on its training
    data.
    """

    title = "FedBABU"
    paper = "Oh et al. 2022"
    sends = "shared model without the last layer"
    bytes_sent = "0.99"
    extra_work = "5 passes of fine-tuning before every validation"
    suits = "a personal model for each hospital, if class frequencies differ"

    name: Literal["fedbabu"] = "fedbabu"  # type: ignore[assignment]
    epochs: int = Field(
        5, ge=0, le=1000, description="epochs of fine-tuning before each evaluation; with 0, the head remains h_0"
    )

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        head = set(head_names(modules["global"]))
        for name, weight in modules["global"].named_parameters():
            weight.requires_grad_(name not in head)
        return modules

    def groups(self) -> tuple[Group, ...]:
        body = network("global", but=head_names)
        return (Group("global", body, self.mean, title="shared model without the last layer"),)

    def check(self, modules: Modules) -> None:
        has_body_and_head(modules["global"], self.name)
