"""Tasks: a data set with its network, loss and metric; partitions; synthetic hospitals."""

from medsilo.tasks.activity_windows import ActivityWindows
from medsilo.tasks.base import Task
from medsilo.tasks.nuclei import Nuclei
from medsilo.tasks.synthetic_activity import SyntheticActivity
from medsilo.tasks.synthetic_histology import SyntheticHistology
from medsilo.tasks.synthetic_prostate import SyntheticProstate

TASKS: dict[str, type[Task]] = {
    "activity-windows": ActivityWindows,
    "nuclei": Nuclei,
    "synthetic-activity": SyntheticActivity,
    "synthetic-histology": SyntheticHistology,
    "synthetic-prostate": SyntheticProstate,
}
