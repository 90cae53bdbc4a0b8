"""medsilo lets hospitals train a medical-imaging model together without sharing data.

The page docs/research/python.md shows how Python programs and notebooks use each exported name. A name is imported only
when a program first uses it, so that `import medsilo` stays fast. The package medsilo-lab uses entry points to add its
names to the module medsilo.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medsilo.core.errors import MedsiloError
    from medsilo.core.version import __version__
    from medsilo.deploy.supermodel import SuperModel
    from medsilo.learning.amplitude import AmplitudeNorm
    from medsilo.learning.perturbation import PerturbedOptimizer
    from medsilo.plan import Plan, load_plan

PLACES = {
    "AmplitudeNorm": "medsilo.learning.amplitude",
    "MedsiloError": "medsilo.core.errors",
    "PerturbedOptimizer": "medsilo.learning.perturbation",
    "Plan": "medsilo.plan",
    "SuperModel": "medsilo.deploy.supermodel",
    "__version__": "medsilo.core.version",
    "load_plan": "medsilo.plan",
}
LAB = ("Comparison", "Run", "compare", "data", "power", "predict", "run")
__all__ = [
    "AmplitudeNorm",
    "Comparison",
    "MedsiloError",
    "PerturbedOptimizer",
    "Plan",
    "Run",
    "SuperModel",
    "__version__",
    "compare",
    "data",
    "load_plan",
    "power",
    "predict",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in LAB:
        found = _of_the_lab(name)
    elif name in PLACES:
        found = getattr(import_module(PLACES[name]), name)
    else:
        raise AttributeError(f"module 'medsilo' has no attribute {name!r}")
    globals()[name] = found
    return found


def _of_the_lab(name: str) -> Any:
    from importlib.metadata import entry_points

    for entry in entry_points(group="medsilo.names", name=name):
        return entry.load()
    raise ImportError(f"{name} comes with medsilo_lab, which is not here; install medsilo-lab", name="medsilo_lab")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
