"""SiloBN: Andreux et al., Siloed Federated Learning for Multi-centric Histopathology Datasets, 2020."""

from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

from torch import Tensor

from medsilo.extend import Group
from medsilo.extend.methods import (
    Averaging,
    Modules,
    Outcome,
    OwnModels,
    adapt_batch_norm,
    batch_norm_buffer_names,
    network,
    require,
)


class SiloBN(Averaging):
    """FedAvg of all weights, batch norm's scale and shift among them; batch norm's statistics stay at the site.

    A hospital that did not train takes the shared weights, and measures the statistics on its own images without a
    label and without a step (AdaBN, Li et al. 2017): each case counts the same, and a layer is measured behind those
    before it, so its images are gone through once for each batch norm.
    """

    title = "SiloBN"
    paper = "Andreux et al. 2020"
    outcome: ClassVar[Outcome] = OwnModels(for_others=True)

    name: Literal["silobn"] = "silobn"

    def groups(self) -> tuple[Group, ...]:
        travelling = network("model", but=batch_norm_buffer_names)
        return (Group("model", travelling, self.mean, title="model without batch norm's statistics"),)

    def check(self, modules: Modules) -> None:
        found = batch_norm_buffer_names(modules["model"])
        require(found, self.name, "batch norm's statistics", "give it batch norm (network.norm=batch) or choose fedavg")

    def measure_unseen(self, modules: Modules, inputs: Callable[[], Iterable[Tensor]]) -> None:
        adapt_batch_norm(modules["model"], inputs)
