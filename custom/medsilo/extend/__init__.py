"""The names that a plug-in imports of medsilo, and nothing else of it. docs/extend.md shows them in use.

Each is here once, and is loaded when it is first used, so that importing this module costs nothing.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo import __version__

if TYPE_CHECKING:
    from medsilo.cli.show import Command, Screen
    from medsilo.core import files
    from medsilo.core.errors import DataError, MedsiloError, Refused
    from medsilo.core.section import Section
    from medsilo.course.algorithm import Algorithm
    from medsilo.course.layer import Layer
    from medsilo.course.phase import Group, Phase
    from medsilo.federation.seams import Channel, Place, Site
    from medsilo.models.network import Network
    from medsilo.plan import Plan
    from medsilo.runs.messages import Parcel
    from medsilo.tasks.classification import Classification
    from medsilo.tasks.goal import Goal
    from medsilo.tasks.listing import Listing
    from medsilo.tasks.own.own_data import OwnFolder
    from medsilo.tasks.own.own_numbers import SignalFolder
    from medsilo.tasks.own.volume_folder import VolumeFolder
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.segmentation import Segmentation
    from medsilo.tasks.sheet import Sheet
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.task import SiteData, Task
    from medsilo.tasks.use import Use
    from medsilo_lab.deploy.exporter import Exporter
    from medsilo_lab.deploy.predictor import Predictor
    from medsilo_lab.start.looker import Folder


@cache
def places_in(file: str) -> dict[str, str]:
    """Return the modules of the names that a file imports for type checkers."""
    blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


NAMES = places_in(__file__)
__all__ = ["__version__", *NAMES]


def named(names: dict[str, str], name: str) -> object:
    """Return what a name stands for, whose module is imported now."""
    if (place := names.get(name)) is None:
        raise AttributeError(f"module 'medsilo.extend' has no attribute {name!r}")
    module = import_module(place)
    if not hasattr(module, name):  # a module in a package
        import_module(f"{place}.{name}")
    return getattr(module, name)


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    found = globals()[name] = named(NAMES, name)
    return found
