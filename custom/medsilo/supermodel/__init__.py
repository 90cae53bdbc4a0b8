"""The super model: a selector, one global and many personal models that together answer as one network."""

from medsilo.supermodel.folder import Origin, Spacing, assemble
from medsilo.supermodel.model import GLOBAL, SuperModel
from medsilo.supermodel.tuning import THRESHOLDS, Tuning, tune

__all__ = ["GLOBAL", "THRESHOLDS", "Origin", "Spacing", "SuperModel", "Tuning", "assemble", "tune"]
