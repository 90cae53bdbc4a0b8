"""The table of methods. A new method is one file here and one line below."""

from medsilo.algorithms.adafed import AdaFed, DAdaFed
from medsilo.algorithms.base import Algorithm, Parcel, Phase
from medsilo.algorithms.central import Central
from medsilo.algorithms.f_adafed import FAdaFed
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedbn import FedBN
from medsilo.algorithms.fednova import FedNova
from medsilo.algorithms.fedopt import FedAdam, FedAvgM, FedYogi
from medsilo.algorithms.fedper import FedPer
from medsilo.algorithms.fedprox import FedProx
from medsilo.algorithms.harmofl import HarmoFL
from medsilo.algorithms.local import Local
from medsilo.algorithms.moon import Moon
from medsilo.algorithms.scaffold import Scaffold

ALGORITHMS: dict[str, type[Algorithm]] = {
    method.model_fields["name"].default: method
    for method in (
        *(Local, FedAvg, FedProx, FedBN, FedPer),
        *(FedNova, FedAvgM, FedAdam, FedYogi, Scaffold, Moon),
        *(HarmoFL, AdaFed, DAdaFed, FAdaFed),
        Central,
    )
}

__all__ = ["ALGORITHMS", "Algorithm", "Parcel", "Phase"]
