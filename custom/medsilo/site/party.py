"""Define the settings of medsilo.yaml that servers and hospitals have in common."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator

from medsilo.core.errors import MedsiloError
from medsilo.core.section import Section, checked
from medsilo.core.yaml_text import read_yaml

# These imports are only for type checking, because the modules import torch, and reading settings does not need torch.
if TYPE_CHECKING:
    from medsilo.learning.compute import Compute
    from medsilo.tasks.sources import DataSource

FILE_NAME = "medsilo.yaml"


class PartySettings(Section):
    """The keys of medsilo.yaml that a server and a hospital have in common.

    The file medsilo.yaml is in the folder local/ of each startup kit, and no job can override the file.
    """

    FILE: ClassVar[str] = FILE_NAME

    data: Any = None  # this party's data: a folder, or a section that describes the data
    output: Path | None = None  # folder for results; without one, the folder medsilo/ in the kit
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    # number of CPU threads; if training uses a GPU and this number is 2 or more, separate processes read the cases
    threads: int = Field(1, ge=1, le=1024)
    # Installed packages whose methods, tasks and networks a plan may use, in addition to medsilo. "*" allows all
    # installed packages.
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

    def studies_in(self, kit: Path) -> Path:
        return self.output or kit / "medsilo"

    @property
    def source(self) -> "DataSource | None":
        if not isinstance(self.data, dict):
            return self.data
        from medsilo.tasks.sources import DataSource

        return DataSource.from_values(self.data, "data")

    @classmethod
    def read(cls, folder: Path, with_others: bool = False) -> Self:
        """Read medsilo.yaml in the given folder; if the file does not exist, return the default settings.

        Args:
            with_others: whether the file may also have keys of other parties, because one person owns all parties
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
        """Validate settings. An error names the origin of the settings, the faulty key and the remedy, but does not
        quote the value.
        """
        try:
            return checked(cls, {} if values is None else values, origin)
        except ValidationError as error:
            from medsilo.core.wording import in_words

            raise MedsiloError(f"{origin}: {in_words(error, cls, tells_values=False)}") from error

    def compute(self) -> "Compute":
        """Return the device and precision for training, or raise MedsiloError if the machine lacks the device."""
        from medsilo.learning.compute import Compute

        chosen = Compute.choose(self.device, precision=self.precision, threads=self.threads)
        return replace(chosen, workers=self.threads) if chosen.on_card and self.threads > 1 else chosen
