"""A site's own settings: what only the hospital decides. No job and no plan can override them."""

import re
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import Field, ValidationError, field_validator, model_validator

from medsilo.core.errors import MedsiloError, YamlError
from medsilo.core.files import load_yaml
from medsilo.core.section import Section, checked, in_words
from medsilo.learning.loop import Compute
from medsilo.tasks.sources import DataSource

FILE_NAME = "medsilo.yaml"
SMALLEST_METRIC = 5  # by default, of real data
SHARE = 0.8  # of the machine's memory, by default


class Limits(Section):
    """The most that a plan may ask of this hospital, and the least learning that it must do for an answer."""

    round_minutes: int = Field(1440, ge=1)  # of participation.timeout
    study_hours: int | None = Field(None, ge=1)  # of all rounds, each with its whole timeout
    parameters: int = Field(500_000_000, ge=1)  # of all networks
    batch_values: int = Field(1_000_000_000, ge=1)  # in a batch's inputs
    disk_free: int = Field(0, ge=0)  # GiB that stay free beside what the study keeps here
    # A plan that learns next to nothing gets the model back as it sent it, and scores of it: a question, no training.
    least_learning_rate: float = Field(1e-6, ge=0)
    least_cases: int = Field(1, ge=1)  # of training


class SiteSettings(Section):
    """`medsilo.yaml` in the `local/` folder of a hospital's kit (and of the server's, for its `output`)."""

    data: DataSource | None = None  # this hospital's data: their folder, or a section that describes them
    output: Path | None = None  # where results are kept; by default `medsilo/` in the kit
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=1, le=1024)  # CPU threads; another number may change the last digits of results
    # At the server: MiB that models which came before their turn may take, all together; others wait on the disk.
    waiting_memory: int = Field(512, ge=0, le=1_000_000)
    workers: int = Field(0, ge=0, le=256)  # processes that read data
    isolation: bool = True  # train in a process of its own, whose death costs a round and not the study
    memory_limit: int | None = Field(None, ge=256)  # MiB that process may take; by default SHARE of the machine's
    limits: Limits = Limits()  # of what a plan may ask for
    # Installed packages, beside medsilo, that a plan may use here: their methods, tasks and networks. "*" is any.
    packages: tuple[str, ...] = ()
    # What may leave, and what may be shown.
    # Whether the other hospitals that agree get this one's personal model, and this one theirs (FedSM's super model);
    # by default only where the data are synthetic.
    share_personal_model: bool | None = None
    smallest_average: int = Field(8, ge=1)  # images that an average must cover before it leaves this site
    # Cases that a metric must cover, and a class must have to be counted by itself, before that leaves this site; by
    # default 5, of synthetic data 1.
    smallest_metric: int | None = Field(None, ge=1)
    score_digits: int | None = Field(None, ge=1, le=15)  # decimals that leave of scores and losses; by default all
    pictures: bool = False  # whether pictures of this site's images are kept beside its results, for its own report

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

    @model_validator(mode="after")
    def _limits_a_process_of_its_own(self) -> Self:
        if self.memory_limit and not self.isolation:
            raise ValueError("memory_limit holds for the training process of its own: set isolation: true")
        return self

    @property
    def most_memory(self) -> int:
        """The bytes that the training process may take."""
        return self.memory_limit << 20 if self.memory_limit else int(SHARE * psutil.virtual_memory().total)

    def rounded(self, score: float | None) -> float | None:
        """A score or a loss as it leaves this site."""
        return score if score is None or self.score_digits is None else round(score, self.score_digits)

    def least(self, synthetic: bool) -> int:
        """The cases that a metric, or the count of a class, must cover before it leaves this site."""
        return self.smallest_metric or (1 if synthetic else SMALLEST_METRIC)

    def shares(self, synthetic: bool) -> bool:
        """Whether other hospitals that agree get this one's personal model, and this one theirs."""
        return synthetic if self.share_personal_model is None else self.share_personal_model

    def compute(self) -> Compute:
        """The device and precision to train with; an error when the device is not there."""
        return Compute.choose(self.device, precision=self.precision, threads=self.threads, workers=self.workers)


def make_settings(values: Any, origin: str) -> SiteSettings:
    """Checked settings; an error that names where they came from, the key and the fix."""
    try:
        return checked(SiteSettings, {} if values is None else values, origin)
    except ValidationError as error:
        raise MedsiloError(f"{origin}: {in_words(error, SiteSettings, tells_values=False)}") from error


def read_settings(folder: Path) -> SiteSettings:
    """The settings in this folder; the defaults when it has none."""
    path = folder / FILE_NAME
    if not path.exists():
        return SiteSettings()
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except YamlError as error:
        raise MedsiloError(f"the site's {FILE_NAME} cannot be read: {error.problem}; correct it there") from error
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"the site's {FILE_NAME} cannot be read ({type(error).__name__}); write YAML") from error
    return make_settings(values, f"the site's {FILE_NAME}")


def allowed_packages(folder: Path | None) -> tuple[str, ...]:
    """Return the packages that the settings in a folder allow: none where there are no settings, or broken ones."""
    try:
        return read_settings(folder).packages if folder else ()
    except MedsiloError:
        return ()
