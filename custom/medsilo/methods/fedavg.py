"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

from typing import Literal

from medsilo.mixing.aggregators import Aggregator, UniformMean, WeightedMean
from medsilo.schedule.algorithm import BY_ITSELF, Algorithm
from medsilo.schedule.declared import Private
from medsilo.schedule.phase import Group, ServerSide, network


class Averaging(Algorithm):
    """The base of methods in which the server computes a mean over the sites."""

    protocols = {"paper": BY_ITSELF}

    def mean(self, server: ServerSide, rate: float = 1.0) -> Aggregator:
        """Return the aggregator w ← w + η (Σ p_k w_k − w).

        Args:
            server: the server's side of the method
            rate: the rate η
        """
        return UniformMean(rate) if self.weighting == "uniform" else WeightedMean(rate)

    def groups(self) -> tuple[Group, ...]:
        return (Group("model", network("model"), self.mean),)


class FedAvg(Averaging):
    """The server averages the weights of all sites: w ← Σ p_k w_k.

    >>> [group.name for group in FedAvg().groups()]
    ['model']
    """

    title = "FedAvg"
    paper = "McMahan et al. 2017"
    sends = "model"
    suits = "the first method to try, if hospitals have similar images"
    name: Literal["fedavg"] = "fedavg"

    def private(self) -> Private:
        return Private(("model",))
