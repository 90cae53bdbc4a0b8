"""A site's own settings: what only the hospital decides. No job and no plan can override them."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import psutil
from pydantic import Field, field_validator

from medsilo.core.errors import MedsiloError
from medsilo.core.rounding import Resolution
from medsilo.core.section import Section
from medsilo.privacy.guarantees import Delta, Epsilon, Reason
from medsilo.site.party import FILE_NAME, PartySettings
from medsilo.tasks.sources import DataSource

CANARY: Final = "canary"  # the layer of one round on synthetic data in which a hospital says whether it is ready
LEAST_AVERAGED = 8  # images, and patients, that an average such as HarmoFL's amplitude covers at least
MIN_PATIENTS_PER_METRIC = 5  # by default, of real data
LEAST_MEMORY = 256  # MiB of a training process
SHARE = 0.8  # of the machine's memory, by default, for all studies that may run at once
TRAIN_ANSWERS = 2000  # losses over training cases that leave at least, per lead and data set
TESTS = 20  # times as many scores over validation cases leave as over test cases
SCORE_ROUNDING = 2  # patients whose influence is a score's step, of patients' data
DataPart = Literal["train", "validation", "test"]
# What may leave beside tensors: numbers of cases; losses and scores over a part of the cases.
Told = Literal["counts", "train", "validation", "test"]
# Where one person owns all sites, as in the simulator: nobody else sees the numbers, so that they are exact.
ALL_MINE = dict[str, Any](pictures=True, share_personal_model=True, packages=("*",), public_data=True, studies=None)


class PrivacyRequirements(Section):
    """`privacy` in a hospital's medsilo.yaml: what it demands for its patients of every study, and of all together."""

    epsilon: Epsilon = Field(description="ε that all studies on the same data may cost together")
    delta: Delta = Field(description="δ at which that ε is counted; less than 1 / number of patients")
    public: dict[Told, Reason] = Field(
        {},
        description="what this hospital declares public, each with the reason: it costs nothing then. `counts`: "
        "numbers of cases and of patients; `train`, `validation`, `test`: scores and losses over these cases",
    )


class SiteSettings(PartySettings):
    """`medsilo.yaml` in the `local/` folder of a hospital's kit."""

    data: DataSource | None = None  # this hospital's data: their folder, or a section that describes them
    memory_limit: int | None = Field(
        None,
        ge=0,
        description=f"MiB that a study's training process may take; null: {SHARE:.0%} of the machine's memory, divided "
        "by `studies`; 0: train in NVFlare's own process, whose death ends the study",
    )
    studies: int | None = Field(
        2, ge=1, le=64, description="studies that train here at once, over all processes; null: any number"
    )
    answers: int = Field(
        2000,
        ge=0,
        description="scores over validation cases that leave, per lead and data set; over test cases a twentieth; of "
        f"losses over training cases as many, and {TRAIN_ANSWERS} at least",
    )
    privacy: PrivacyRequirements | None = Field(
        None,
        description="what this hospital demands of every study, and of all together: differential privacy of its "
        "patients, counted in its ledger. null: nothing",
    )
    approval: Literal["none", "required", "except-canary"] = Field(
        "none",
        description="required: only plans run here that this hospital's engineer has approved, by their hash, with the "
        "key of the kit (`medsilo approve`), whatever the server says. except-canary: the same, but a canary runs, "
        "which is one round on synthetic data",
    )
    # What may leave, and what may be shown.
    # Whether the other hospitals that agree get this one's personal model, and this one theirs (FedSM's super model);
    # by default only where the data are synthetic.
    share_personal_model: bool | None = None
    public_data: bool = Field(
        False,
        description="true: the data need no protection (a published set). Then plans decide the split, numbers leave "
        "exactly, and answers are not counted",
    )
    min_patients_per_metric: int | None = Field(
        None,
        ge=1,
        description="patients that a score must cover, and a class must have to be counted by itself, "
        "before that leaves; patients with which this hospital trains at least; counts leave as multiples of it. "
        f"null: {MIN_PATIENTS_PER_METRIC}, of synthetic data 1",
    )
    state_dir: Path | None = Field(
        None,
        description="folder in which this hospital remembers its split and what it answered; null: `_hospital` in "
        "`output`. Name one folder in all kits that use the same data",
    )
    pictures: bool = False  # whether pictures of this site's images are kept beside its results, for its own report

    @field_validator("memory_limit")
    @classmethod
    def _enough(cls, limit: int | None) -> int | None:
        if limit and limit < LEAST_MEMORY:
            raise ValueError(f"{limit} MiB are too few; give {LEAST_MEMORY} or more, or 0 for no process of its own")
        return limit

    @property
    def isolated(self) -> bool:
        """Return whether a process of its own trains, whose death costs a round and not the study."""
        return self.memory_limit != 0

    @property
    def most_memory(self) -> int:
        """The bytes that the training process may take."""
        if self.memory_limit:
            return self.memory_limit << 20
        return int(SHARE * psutil.virtual_memory().total / (self.studies or 1))

    def most_answers(self, part: DataPart) -> int:
        """Return how many scored answers over a part one lead may have."""
        most = {"train": max(TRAIN_ANSWERS, self.answers), "test": -(-self.answers // TESTS)}
        return most.get(part, self.answers)

    def protects(self, synthetic: bool) -> bool:
        """Return whether there are patients behind what is told of the data."""
        return not synthetic and not self.public_data

    def count_unit(self, synthetic: bool) -> int:
        """Return what counts are multiples of when they leave, and how many cases and patients this site trains with
        at least."""
        return self.least(synthetic) if self.protects(synthetic) else 1

    def resolution(self, names: Sequence[str], synthetic: bool) -> Resolution:
        """Return how coarsely numbers over these cases are rounded. names: the patient of each."""
        return Resolution.over(names, SCORE_ROUNDING * self.protects(synthetic), self.count_unit(synthetic))

    def least(self, synthetic: bool) -> int:
        """The patients that a metric, or the cases that the count of a class, must cover before it leaves this site."""
        return self.min_patients_per_metric or (1 if synthetic else MIN_PATIENTS_PER_METRIC)

    def least_averaged(self, synthetic: bool) -> int:
        """The images, and patients, that an average must cover before it leaves this site."""
        return 1 if self.public_data else max(LEAST_AVERAGED, self.least(synthetic))

    def shares(self, synthetic: bool) -> bool:
        """Return whether other hospitals that agree get this one's personal model, and this one theirs."""
        return synthetic if self.share_personal_model is None else self.share_personal_model

    def of(self, site: str) -> "SiteSettings":
        """Return the settings of a site, where several are on this machine: all have these."""
        return self

    def changed(self, values: Mapping[str, Any], origin: str) -> "SiteSettings":
        """Return the same with these values, at every site. origin: where they stand, for people."""
        return make_settings({**self.model_dump(exclude={"sites"}), **values}, origin)

    def check_sites(self, sites: Collection[str]) -> None:
        """Raise an error if there are settings for a site that is none of these."""


class EachSites(SiteSettings):
    """The settings of sites on one machine, some with a medsilo.yaml of their own; the others have what is here."""

    sites: dict[str, SiteSettings] = {}

    def of(self, site: str) -> SiteSettings:
        return self.sites.get(site, self)

    def check_sites(self, sites: Collection[str]) -> None:
        if strangers := sorted(self.sites.keys() - set(sites)):
            raise MedsiloError(
                f"there is a {FILE_NAME} for {strangers[0]}, which is not a site of the plan; the plan has "
                f"{', '.join(sorted(sites))}"
            )

    def changed(self, values: Mapping[str, Any], origin: str) -> "EachSites":
        sites = {site: one.changed(values, origin) for site, one in self.sites.items()}
        return _each(super().changed(values, origin), sites)


def _each(own: SiteSettings, sites: dict[str, SiteSettings]) -> EachSites:
    return EachSites(**{name: getattr(own, name) for name in SiteSettings.model_fields}, sites=sites)


def make_settings(values: Any, origin: str) -> SiteSettings:
    """Checked settings; an error that names where they came from, the key and the fix."""
    return SiteSettings.from_values(values, origin)


def read_settings_of_all(folder: Path) -> SiteSettings:
    """The settings in this folder, and of each site that has a folder of its own in it with a medsilo.yaml."""
    own = SiteSettings.read(folder)
    sites = {path.parent.name: SiteSettings.read(path.parent) for path in sorted(folder.glob(f"*/{FILE_NAME}"))}
    return _each(own, sites) if sites else own
