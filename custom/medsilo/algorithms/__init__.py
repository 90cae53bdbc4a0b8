"""The table of methods. A new method is one file here and one line below."""

from medsilo.algorithms.adafed import AdaFed, DAdaFed
from medsilo.algorithms.apfl import APFL
from medsilo.algorithms.base import Algorithm, Parcel, Phase
from medsilo.algorithms.central import Central
from medsilo.algorithms.ditto import Ditto
from medsilo.algorithms.f_adafed import FAdaFed
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedbn import FedBN
from medsilo.algorithms.fednova import FedNova
from medsilo.algorithms.fedopt import FedAdam, FedAvgM, FedYogi
from medsilo.algorithms.fedper import FedPer
from medsilo.algorithms.fedprox import FedProx
from medsilo.algorithms.fedsm import FedSM
from medsilo.algorithms.fedsm_ensemble import FedSMEnsemble
from medsilo.algorithms.fedsm_extra import FedSMExtra
from medsilo.algorithms.fine_tuning import FineTuning
from medsilo.algorithms.harmofl import HarmoFL
from medsilo.algorithms.local import Local
from medsilo.algorithms.moon import Moon
from medsilo.algorithms.per_fedavg import PerFedAvg
from medsilo.algorithms.pfedme import PFedMe
from medsilo.algorithms.scaffold import Scaffold

ALGORITHMS: dict[str, type[Algorithm]] = {
    method.model_fields["name"].default: method
    for method in (
        *(Local, FedAvg, FedProx, FedBN, FedPer),
        *(FedNova, FedAvgM, FedAdam, FedYogi, Scaffold, Moon),
        *(Ditto, APFL, PerFedAvg, PFedMe, FineTuning),
        *(HarmoFL, AdaFed, DAdaFed, FAdaFed),
        *(FedSM, FedSMExtra, FedSMEnsemble),
        Central,
    )
}

__all__ = ["ALGORITHMS", "Algorithm", "Parcel", "Phase"]
