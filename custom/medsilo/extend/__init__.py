"""The names that a plug-in imports from medsilo. A plug-in must import nothing from medsilo except the names of
medsilo.extend. The page docs/research/extend.md shows examples of plug-ins.

Some plug-ins also import names from medsilo_lab.extend: plug-ins that predict, that export, or that read a data set for
`medsilo init`.

To keep importing this module fast, each name is loaded only when a program first uses the name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from medsilo.core import files
from medsilo.core.version import __version__

if TYPE_CHECKING:
    from medsilo.cli.show import Command, Console
    from medsilo.core.errors import DataError, MedsiloError, Refused
    from medsilo.core.section import Section
    from medsilo.exchange.channel import Channel
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
    from medsilo.tasks.scored_together import Classifying, classification
    from medsilo.tasks.segmentation import Segmentation
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.table_reader import TableReader
    from medsilo.tasks.task import Task

# For each exported name, the module that defines it. An exported name is imported on first use: otherwise, --help,
# which loads the plug-ins of commands, would also load torch and be slow.
PLACES = {
    "Algorithm": "medsilo.schedule.algorithm",
    "CaseIndex": "medsilo.tasks.case_index",
    "Channel": "medsilo.exchange.channel",
    "Classification": "medsilo.tasks.classification",
    "Classifying": "medsilo.tasks.scored_together",
    "classification": "medsilo.tasks.scored_together",
    "Column": "medsilo.tasks.own.own_numbers",
    "Command": "medsilo.cli.show",
    "Console": "medsilo.cli.show",
    "DataError": "medsilo.core.errors",
    "DataSource": "medsilo.tasks.sources",
    "Group": "medsilo.schedule.phase",
    "Inference": "medsilo.tasks.inference",
    "Layer": "medsilo.schedule.layer",
    "MedsiloError": "medsilo.core.errors",
    "Network": "medsilo.models.network",
    "Objective": "medsilo.tasks.objective",
    "OwnFolder": "medsilo.tasks.own.own_data",
    "Phase": "medsilo.schedule.phase",
    "Plan": "medsilo.plan",
    "Refused": "medsilo.core.errors",
    "Scan": "medsilo.tasks.scans",
    "Section": "medsilo.core.section",
    "Segmentation": "medsilo.tasks.segmentation",
    "Site": "medsilo.federation.site_context",
    "SiteContext": "medsilo.federation.site_context",
    "SiteData": "medsilo.tasks.site_data",
    "Standardised": "medsilo.tasks.own.own_numbers",
    "StudyMessage": "medsilo.runs.messages",
    "TableReader": "medsilo.tasks.table_reader",
    "Task": "medsilo.tasks.task",
    "VolumeFolder": "medsilo.tasks.own.volume_folder",
}
__all__ = ["__version__", "files", *PLACES]

# this function is hidden from type checkers, because they would then accept any name as an attribute of this module
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a name when a program first uses the name."""
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(PLACES[name]), name)
        return found
