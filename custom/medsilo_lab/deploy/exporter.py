"""Write a finished model in a form that other programs run."""

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
    """Writes a model in one form. Derive from it; its name among the entry points `medsilo.exporters` is what `--to`
    takes. A name with a dot is a form of one task's models: "monai.nnunet" for those of task nnunet.

    >>> from torch import nn
    >>> class Named(Exporter):
    ...     what = "names of weights"
    ...     def write(self, out): return {"names.txt": " ".join(self.source.network.state_dict()).encode()}
    >>> Named(Source(nn.Linear(2, 1), None, {})).write(Path("out"))
    {'names.txt': b'weight bias'}
    """

    what: ClassVar[str]  # is written, for people

    source: Source  # the model: `source.network`, and the plan it was trained by, `source.plan`

    @abstractmethod
    def write(self, out: Path) -> Mapping[str, bytes] | None:
        """Write into a new folder; or return files by name."""

    @property
    def part(self) -> str:
        """The folder in it that the model is written to, where it is one of several; else nothing."""
        return ""


def export(source: Source, out: Path, form: str = "monai") -> str:
    """Write a model into a folder that does not exist yet, or as a further part of one; return what it is."""
    own = f"{form}.{source.plan.task.name}"
    exporter: Exporter = EXPORTERS[own if own in EXPORTERS else form](source)
    place = out / exporter.part
    if place.exists():
        raise MedsiloError("the folder exists; choose another", private=str(place))
    for name, content in (exporter.write(out) or {}).items():
        write_bytes(out / name, content)
    write_card(source, place)
    return exporter.what
