"""SiloBN (Andreux et al., Siloed Federated Learning for Multi-centric Histopathology Datasets, 2020)."""

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
    """FedAvg of all weights, including the scale and shift of batch norm layers. Batch norm's running statistics never
    leave the site.

    A hospital that did not take part in training receives the shared weights. A hospital that did not train computes
    batch norm's statistics on its own images, without using labels (AdaBN, Li et al. 2017). Each case has the same
    weight in the statistics of batch norm. The statistics of a batch norm layer depend on the statistics of earlier
    layers, so all images are read once for each batch norm layer.
    """

    title = "SiloBN"
    paper = "Andreux et al. 2020"
    sends = "model without batch norm's statistics"
    stays = "batch norm's statistics"
    bytes_sent = "0.99"
    extra_work = "none; a hospital that did not train computes its own batch-norm statistics"
    suits = "hospitals with different scanners or stains, if hospitals without labels join later"
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
