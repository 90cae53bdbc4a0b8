"""Base classes for tests of plug-ins. The author of a method, task or network derives a class and runs pytest."""

from medsilo_lab.testing.methods import Carried, MethodTester, Reference, State, assert_equal, assert_same_run
from medsilo_lab.testing.networks import NetworkTester
from medsilo_lab.testing.tasks import TaskTester

__all__ = [
    "Carried",
    "MethodTester",
    "NetworkTester",
    "Reference",
    "State",
    "TaskTester",
    "assert_equal",
    "assert_same_run",
]
