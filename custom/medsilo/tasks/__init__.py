"""Tasks: a data set with its network, loss and metric; partitions; synthetic hospitals."""

from medsilo.tasks.activity_windows import ActivityWindows
from medsilo.tasks.base import Task
from medsilo.tasks.camelyon17 import Camelyon17
from medsilo.tasks.covid_xray import CovidXray
from medsilo.tasks.fundus import Fundus
from medsilo.tasks.image_folder import ImageFolder
from medsilo.tasks.nifti_folder import NiftiFolder
from medsilo.tasks.nuclei import Nuclei
from medsilo.tasks.organ_mnist import OrganMnist
from medsilo.tasks.pamap2 import Pamap2
from medsilo.tasks.prostate import Prostate
from medsilo.tasks.synthetic_activity import SyntheticActivity
from medsilo.tasks.synthetic_histology import SyntheticHistology
from medsilo.tasks.synthetic_prostate import SyntheticProstate

TASKS: dict[str, type[Task]] = {
    "activity-windows": ActivityWindows,
    "camelyon17": Camelyon17,
    "covid-xray": CovidXray,
    "fundus": Fundus,
    "image-folder": ImageFolder,
    "nifti-folder": NiftiFolder,
    "nuclei": Nuclei,
    "organ-mnist": OrganMnist,
    "pamap2": Pamap2,
    "prostate": Prostate,
    "synthetic-activity": SyntheticActivity,
    "synthetic-histology": SyntheticHistology,
    "synthetic-prostate": SyntheticProstate,
}
