"""Write a finished model in a form that other programs run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_bytes
from medsilo.deploy.model_card import write_card
from medsilo.deploy.source import Source
from medsilo.registry import EXPORTERS


@dataclass(frozen=True)
class Exporter:
    """Writes models in one form. Its name among the entry points `medsilo.exporters` is what `--to` takes.

    A name with a dot is a form of one task's models: "monai.nnunet" for those of task nnunet.

    >>> from medsilo.extend import Exporter
    >>> Exporter("weights", lambda source, out: None).what
    'weights'
    """

    what: str  # that is written, for people
    write: Callable[[Source, Path], Mapping[str, bytes] | None]  # into a new folder; or returns files by name
    part: Callable[[Source], str] = lambda source: ""  # what a model adds to a folder that others may be in already


def export(source: Source, out: Path, form: str = "monai") -> str:
    """Write a model into a folder that does not exist yet, or as a further part of one; return what it is."""
    own = f"{form}.{source.plan.task.name}"
    exporter: Exporter = EXPORTERS[own if own in EXPORTERS else form]
    place = out / exporter.part(source)
    if place.exists():
        raise MedsiloError("the folder exists; choose another", private=str(place))
    for name, content in (exporter.write(source, out) or {}).items():
        write_bytes(out / name, content)
    if (out / "models").is_dir():
        source.carry(out / "models")
    write_card(source, place)
    return exporter.what
