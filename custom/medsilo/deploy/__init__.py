"""The super model: a selector, one global and many personal models that together answer as one network."""

from medsilo.deploy.model import GLOBAL, SuperModel
from medsilo.deploy.supermodel import Origin, Spacing, assemble
from medsilo.deploy.tuning import THRESHOLDS, Tuning, tune

__all__ = ["GLOBAL", "THRESHOLDS", "Origin", "Spacing", "SuperModel", "Tuning", "assemble", "tune"]
