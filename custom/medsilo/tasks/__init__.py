"""Tasks: a data set with its network, loss and metric; partitions; synthetic hospitals."""

from medsilo.tasks.own.image_folder import ImageFolder
from medsilo.tasks.own.nifti_folder import NiftiFolder
from medsilo.tasks.published.activity_windows import ActivityWindows
from medsilo.tasks.published.camelyon17 import Camelyon17
from medsilo.tasks.published.covid_xray import CovidXray
from medsilo.tasks.published.fundus import Fundus
from medsilo.tasks.published.nuclei import Nuclei
from medsilo.tasks.published.organ_mnist import OrganMnist
from medsilo.tasks.published.pamap2 import Pamap2
from medsilo.tasks.published.prostate_mri import Prostate
from medsilo.tasks.synthetic.activity import SyntheticActivity
from medsilo.tasks.synthetic.histology import SyntheticHistology
from medsilo.tasks.synthetic.prostate import SyntheticProstate
from medsilo.tasks.task import Task

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
