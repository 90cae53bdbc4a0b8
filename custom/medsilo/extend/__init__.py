"""The names that a plug-in imports of medsilo, and nothing else of it. docs/research/extend.md shows them in use.

Each is here once, and is loaded when it is first used, so that importing this module costs nothing.
"""

from typing import TYPE_CHECKING

from medsilo import __version__
from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.cli.show import Command, Console
    from medsilo.core import files
    from medsilo.core.errors import DataError, MedsiloError, Refused
    from medsilo.core.section import Section
    from medsilo.federation.channel import Channel
    from medsilo.federation.site_context import Site, SiteContext
    from medsilo.models.network import Network
    from medsilo.plan import Plan
    from medsilo.runs.messages import StudyMessage
    from medsilo.schedule.algorithm import Algorithm
    from medsilo.schedule.layer import Layer
    from medsilo.schedule.phase import Group, Phase
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.classification import Classification
    from medsilo.tasks.inference import Inference
    from medsilo.tasks.objective import Objective
    from medsilo.tasks.own.own_data import OwnFolder
    from medsilo.tasks.own.own_numbers import Column, Standardised
    from medsilo.tasks.own.volume_folder import VolumeFolder
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.segmentation import Segmentation
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.table_reader import TableReader
    from medsilo.tasks.task import Task
    from medsilo_lab.deploy.exporter import Exporter
    from medsilo_lab.deploy.predictor import Predictor
    from medsilo_lab.start.dataset_layout import DatasetLayout


NAMES = places_in(__file__)
__all__ = ["__version__", *NAMES]
__getattr__ = lazily(__name__, __file__)
