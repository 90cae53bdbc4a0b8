"""The interface for plug-ins of medsilo-lab: dataset probes, predictors and exporters.

Each class is imported when it is first used. This module also contains all names of the module medsilo.extend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medsilo_lab.deploy.exporter import Exporter
    from medsilo_lab.deploy.predictor import Predictor
    from medsilo_lab.start.dataset_layout import DatasetLayout

PLACES = {
    "DatasetLayout": "medsilo_lab.start.dataset_layout",
    "Exporter": "medsilo_lab.deploy.exporter",
    "Predictor": "medsilo_lab.deploy.predictor",
}
__all__ = ["DatasetLayout", "Exporter", "Predictor"]


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)
