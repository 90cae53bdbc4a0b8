"""medsilo: hospitals train a medical-imaging model together without sharing data.

The names below are what Python programs and notebooks use; docs/research/python.md shows each. They are loaded when
they are first used, so that `import medsilo` costs nothing.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

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
    "load_plan",
    "predict",
    "run",
]

if TYPE_CHECKING:
    from medsilo.core.errors import MedsiloError
    from medsilo.deploy.supermodel import SuperModel
    from medsilo.learning.amplitude import AmplitudeNorm
    from medsilo.learning.perturbation import PerturbedOptimizer
    from medsilo.plan import Plan, load_plan
    from medsilo_lab.api import Comparison, Run, compare, predict, run
else:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        from medsilo.core.lazy import lazily

        return lazily(__name__, __file__)(name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
