"""The table of methods. A new method is one file here and one line below."""

from medsilo.course.algorithm import Algorithm
from medsilo.methods.adafed import AdaFed, DAdaFed
from medsilo.methods.apfl import APFL
from medsilo.methods.central import Central
from medsilo.methods.ditto import Ditto
from medsilo.methods.f_adafed import FAdaFed
from medsilo.methods.fedavg import FedAvg
from medsilo.methods.fedbn import FedBN
from medsilo.methods.fednova import FedNova
from medsilo.methods.fedopt import FedAdam, FedAvgM, FedYogi
from medsilo.methods.fedper import FedPer
from medsilo.methods.fedprox import FedProx
from medsilo.methods.fedsm import FedSM
from medsilo.methods.fedsm_ensemble import FedSMEnsemble
from medsilo.methods.fedsm_extra import FedSMExtra
from medsilo.methods.fine_tuning import FineTuning
from medsilo.methods.harmofl import HarmoFL
from medsilo.methods.local import Local
from medsilo.methods.moon import Moon
from medsilo.methods.per_fedavg import PerFedAvg
from medsilo.methods.pfedme import PFedMe
from medsilo.methods.scaffold import Scaffold

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

__all__ = ["ALGORITHMS"]
