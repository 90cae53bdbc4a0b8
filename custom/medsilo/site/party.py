"""The settings of a server and of every hospital: what each decides for its own machine, and no job can override."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator

from medsilo.core import optional
from medsilo.core.errors import MedsiloError
from medsilo.core.section import Section, checked
from medsilo.core.yaml_text import read_yaml

# Who reads settings and trains nothing does without torch, and a server reads cases for few methods.
if TYPE_CHECKING:
    from medsilo.learning.compute import Compute
    from medsilo.tasks.sources import DataSource

FILE_NAME = "medsilo.yaml"


class PartySettings(Section):
    """`medsilo.yaml` in the `local/` folder of the server's kit, and a part of each hospital's (settings.py)."""

    FILE: ClassVar[str] = FILE_NAME

    data: Any = None  # the data here: their folder, or a section that describes them
    output: Path | None = None  # where results are kept; by default `medsilo/` in the kit
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=1, le=1024)  # of the CPU; beside a GPU, two or more also read the cases, as processes
    # Installed packages, beside medsilo, that a plan may use here: their methods, tasks and networks. "*" is any.
    packages: tuple[str, ...] = ()

    @field_validator("data", mode="before")
    @classmethod
    def _folder(cls, data: Any) -> Any:
        return {"folder": data} if isinstance(data, str | Path) else data

    @field_validator("device")
    @classmethod
    def _known(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is not known; use auto, cpu, cuda or cuda:<number>")
        return device

    @property
    def source(self) -> "DataSource | None":
        """The data that lie here."""
        return optional.DataSource.from_values(self.data, "data") if isinstance(self.data, dict) else self.data

    @classmethod
    def read(cls, folder: Path, with_others: bool = False) -> Self:
        """Return the settings in this folder; the defaults when it has none.

        with_others: whether keys of others may stand there, too, as where one person owns all.
        """
        path = folder / FILE_NAME
        if not path.exists():
            return cls()
        name = f"the site's {FILE_NAME}"
        values = read_yaml(path, name, "YAML")
        if with_others and isinstance(values, Mapping):
            values = {key: value for key, value in values.items() if key in cls.model_fields}
        return cls.from_values(values, name)

    @classmethod
    def from_values(cls, values: Any, origin: str) -> Self:
        """Checked settings; an error that names where they came from, the key and the fix, and no value."""
        try:
            return checked(cls, {} if values is None else values, origin)
        except ValidationError as error:
            raise MedsiloError(f"{origin}: {optional.in_words(error, cls, tells_values=False)}") from error

    def compute(self) -> "Compute":
        """The device and precision that train; an error when the device is not there."""
        chosen = optional.Compute.choose(self.device, precision=self.precision, threads=self.threads)
        return replace(chosen, workers=self.threads) if chosen.on_card and self.threads > 1 else chosen
