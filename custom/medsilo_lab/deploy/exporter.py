"""Export a trained model in a format for other programs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_bytes
from medsilo.registry import PluginTable
from medsilo_lab.deploy.model_card import write_card
from medsilo_lab.deploy.source import Source

EXPORTERS = PluginTable("medsilo.exporters", "medsilo_lab.deploy.exporter:Exporter", {})


@dataclass(frozen=True)
class Exporter(ABC):
    """Writes a model in one export format.

    Subclasses are registered as entry points in the group `medsilo.exporters`; the name of the entry point is the value
    of `--to`. A format whose name has a dot is only for the models of one task: for example, "monai.nnunet" is for the
    task nnunet.

    >>> from torch import nn
    >>> class Named(Exporter):
    ...     what = "names of weights"
    ...     def write(self, out): return {"names.txt": " ".join(self.source.network.state_dict()).encode()}
    >>> Named(Source(nn.Linear(2, 1), None, {})).write(Path("out"))
    {'names.txt': b'weight bias'}
    """

    what: ClassVar[str]

    source: Source  # `source.network` is the model, and `source.plan` is the plan with which the model was trained

    @abstractmethod
    def write(self, out: Path) -> Mapping[str, bytes] | None:
        """Write the exported files into a new folder, or return the contents of the files by file name."""

    @property
    def part(self) -> str:
        """If an export in this format may contain several models, the name of the model's subfolder; otherwise, an
        empty text.
        """
        return ""


def export(source: Source, out: Path, form: str = "monai") -> str:
    """Export a model into a new folder, or into a new subfolder of an existing export. Return a text that describes the
    export format.
    """
    own = f"{form}.{source.plan.task.name}"
    exporter: Exporter = EXPORTERS[own if own in EXPORTERS else form](source)
    place = out / exporter.part
    if place.exists():
        raise MedsiloError("the folder exists; choose another folder", private=str(place))
    for name, content in (exporter.write(out) or {}).items():
        write_bytes(out / name, content)
    write_card(source, place)
    return exporter.what
