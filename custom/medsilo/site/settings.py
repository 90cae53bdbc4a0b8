"""Define a hospital's settings in its medsilo.yaml, which no job and no plan can override."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import psutil
from pydantic import Field, field_validator

from medsilo.core.errors import MedsiloError
from medsilo.core.rounding import Resolution
from medsilo.core.section import Section
from medsilo.privacy.guarantees import Delta, Epsilon, Reason
from medsilo.site.airlock_settings import Airlock, BorderSettings, RoomSettings
from medsilo.site.data_set import DataSet
from medsilo.site.party import FILE_NAME, PartySettings
from medsilo.tasks.sources import DataSource

# name of the layer that turns a study into a canary: hospitals report in one round on synthetic data whether they are
# ready
CANARY: Final = "canary"
LEAST_AVERAGED = 8  # minimum number of images, and of patients, in a disclosed average such as HarmoFL's amplitude
MIN_PATIENTS_PER_METRIC = 5  # default value for real data
LEAST_MEMORY = 256  # minimum MiB of memory for a training process
SHARE = 0.8  # default for the fraction of the machine's memory that all studies together may use
TRAIN_ANSWERS = 2000  # the limit on disclosed training losses, for each lead and data set, is at least this number
TESTS = 20  # a lead may get this number of validation scores for each test score
SCORE_ROUNDING = 2  # A score's rounding step is the change that this number of patients can cause.
Approval = Literal["none", "required", "except-canary"]
TakesPart = Literal["observe", "test", "train"]
DataPart = Literal["train", "validation", "test"]
# Kinds of disclosed numbers: counts, and losses or scores over the training, the validation or the test cases.
Told = Literal["counts", "train", "validation", "test"]
# Settings for the simulator: one person owns all simulated sites, so that disclosed numbers need no protection.
ALL_MINE = dict[str, Any](pictures=True, share_personal_model=True, packages=("*",), public_data=True, studies=None)


class PrivacyRequirements(Section):
    """The differential privacy that a hospital demands for its patients."""

    epsilon: Epsilon = Field(description="total ε that all studies of the same data may cost")
    delta: Delta = Field(
        description="δ of the privacy guarantee with `privacy.epsilon`; must be less than 1 / number of patients"
    )
    public: dict[Told, Reason] = Field(
        {},
        description="the numbers that this hospital declares public, each with the reason; public numbers have no "
        "privacy cost. `counts`: numbers of cases and of patients; `train`, `validation`, `test`: scores and losses "
        "over training, validation or test cases",
    )


class SiteSettings(PartySettings):
    """A hospital's settings, in medsilo.yaml in the folder local/ of its kit."""

    data: DataSource | None = None  # this hospital's data: a folder, or a section that describes the data
    memory_limit: int | None = Field(
        None,
        ge=0,
        description="MiB of memory for a study's training process. "
        f"null: {SHARE:.0%} of the machine's memory, divided by `studies`. "
        "0: training runs within NVFlare's process, and the study ends if this process dies",
    )
    studies: int | None = Field(
        2, ge=1, le=64, description="largest number of studies that train at this hospital at once; null: any number"
    )
    answers: int = Field(
        2000,
        ge=0,
        description="how many validation scores may leave the hospital, per lead and data set. The limit on test "
        "scores is "
        f"a twentieth of `answers`. The limit on training losses is `answers`, but at least {TRAIN_ANSWERS}. "
        f"The limit on studies is a twentieth of `answers`, but at least {TESTS}",
    )
    privacy: PrivacyRequirements | None = Field(
        None,
        description="differential privacy that this hospital demands for its patients, over all studies together. "
        "The hospital's privacy ledger records the cost of each study. null: this hospital demands none",
    )
    approval: Approval | None = Field(
        None,
        description="`required`: this hospital's engineer must approve the hash of a plan with the kit's key "
        "(`medsilo approve`) before the plan runs at this hospital. The server cannot change `approval`. "
        "`except-canary`: as `required`, but a canary, which is one round on synthetic data, needs no "
        "approval. `none`: every plan runs. `null`: the same as `required` if the settings have the key `data`, "
        "except for plans whose data are synthetic or declared public",
    )
    takes_part: TakesPart = Field(
        "train",
        description="`observe`: this hospital takes part in no study. `test`: this hospital only tests models on its "
        "cases: releases, and models of studies that name the hospital in "
        "participation.evaluation_sites. `train`: this hospital tests and trains models. No plan can "
        "override `takes_part`",
    )
    airlock: Airlock = Field(
        "off",
        description="`required`: a lead's training script runs in an isolated process without network, and the "
        "script's answers are checked before they leave the hospital. If this machine cannot isolate the "
        "script, the hospital rejects the job. `wanted`: the script is isolated if this machine can "
        "isolate it. `off`: the script runs as the kit's account",
    )
    room: RoomSettings = Field(RoomSettings(), description="environment and limits of the isolated training script")
    border: BorderSettings = Field(BorderSettings(), description="limits on the isolated training script's answers")
    # Whether this hospital exchanges personal models with all hospitals that agree to the exchange (FedSM's super
    # model). By default, personal models are exchanged only if the data are synthetic.
    share_personal_model: bool | None = None
    public_data: bool = Field(
        False,
        description="true: the data are public, such as a published data set. If the data are public, the plan "
        "determines the split, numbers leave the hospital without rounding, and answers are not counted",
    )
    min_patients_per_metric: int | None = Field(
        None,
        ge=1,
        description="smallest number of patients with which the hospital trains, and from which it discloses a "
        "score or the count of a class. "
        f"Disclosed counts are multiples of `min_patients_per_metric`. null: {MIN_PATIENTS_PER_METRIC}, "
        "or 1 for synthetic data",
    )
    state_dir: Path | None = Field(
        None,
        description="folder in which this hospital records its split and the answers that it sent; null: `_hospital` "
        "in `output`. If several kits use the same data, set the same folder in each kit, so that all kits share one "
        "split and one count",
    )
    pictures: bool = False  # whether this site's results and report contain pictures of the patients' images

    @field_validator("data", mode="before")
    @classmethod
    def _data_set(cls, data: Any) -> Any:
        folder = Path(data) if isinstance(data, str | Path) else None
        return DataSet.read(folder).source(folder) if folder and (folder / DataSet.FILE).is_file() else data

    @field_validator("airlock", mode="before")
    @classmethod
    def _off_in_yaml(cls, airlock: Any) -> Any:
        return "off" if airlock is False else airlock  # YAML reads the word off as false

    @field_validator("memory_limit")
    @classmethod
    def _enough(cls, limit: int | None) -> int | None:
        if limit and limit < LEAST_MEMORY:
            raise ValueError(
                f"{limit} MiB are too few; give {LEAST_MEMORY} or more, or 0 to train without a separate process"
            )
        return limit

    @property
    def isolated(self) -> bool:
        """True if training runs in a separate process, so that only one round is lost if the separate process dies."""
        return self.memory_limit != 0

    @property
    def most_memory(self) -> int:
        if self.memory_limit:
            return self.memory_limit << 20
        return int(SHARE * psutil.virtual_memory().total / (self.studies or 1))

    def most_answers(self, part: DataPart) -> int:
        """Return the maximum number of answers with scores that one lead may get about one part of the data."""
        most = {"train": max(TRAIN_ANSWERS, self.answers), "test": -(-self.answers // TESTS)}
        return most.get(part, self.answers)

    @property
    def most_studies(self) -> int:
        """Return the number of studies that a lead may begin on one data set."""
        return max(TESTS, -(-self.answers // TESTS))

    def approval_of(self, synthetic: bool = False, in_kit: bool = True) -> Approval:
        if self.approval is not None:
            return self.approval
        return "required" if in_kit and self.data is not None and self.protects(synthetic) else "none"

    def promise(self, in_kit: bool = True) -> bool:
        """Return True if a study may run only under settings that the engineer has accepted."""
        return self.approval_of(in_kit=in_kit) != "none" or self.privacy is not None or self.takes_part != "train"

    def refuses(self, trains: bool) -> str:
        """Return the hospital's reason for not taking part in a study, or an empty string if the hospital takes part.

        Args:
            trains: True if the study would train a model at this hospital, and False if it would only test a model
        """
        setting = f"takes_part: {self.takes_part} in its {FILE_NAME}"
        if self.takes_part == "observe":
            return f"this hospital only observes ({setting}); leave it out of the plan"
        if self.takes_part == "test" and trains:
            return (
                f"this hospital tests models and trains none ({setting}); name it under "
                "participation.evaluation_sites, or leave it out"
            )
        return ""

    @property
    def describes_data(self) -> bool:
        """True if the settings describe how to read the data. False if the settings name an accepted data set, or no
        data.
        """
        if self.data is None or self.data.data_set is not None:
            return False
        # The folder of the cache alone does not describe how to read the data.
        return self.data.model_copy(update={"cache_folder": None}).is_described

    def protects(self, synthetic: bool) -> bool:
        """Return True if disclosed numbers come from patients who need protection."""
        return not synthetic and not self.public_data

    def count_unit(self, synthetic: bool) -> int:
        """Return the number to whose multiples counts are rounded, and which is the minimum number of cases and of
        patients for training.
        """
        return self.least(synthetic) if self.protects(synthetic) else 1

    def resolution(self, names: Sequence[str], synthetic: bool) -> Resolution:
        """Return the rounding steps of scores and counts over cases of the given patients.

        Args:
            names: the patient of each case
        """
        return Resolution.over(names, SCORE_ROUNDING * self.protects(synthetic), self.count_unit(synthetic))

    def least(self, synthetic: bool) -> int:
        """Return the minimum number of patients for a disclosed metric, which is also the minimum of cases for a
        class's count.
        """
        return self.min_patients_per_metric or (1 if synthetic else MIN_PATIENTS_PER_METRIC)

    def least_averaged(self, synthetic: bool) -> int:
        """Return the minimum number of images, and of patients, that a disclosed average needs."""
        return 1 if self.public_data else max(LEAST_AVERAGED, self.least(synthetic))

    def shares(self, synthetic: bool) -> bool:
        """Return True if this hospital exchanges personal models with all hospitals that agree to the exchange."""
        return synthetic if self.share_personal_model is None else self.share_personal_model

    def of(self, site: str) -> "SiteSettings":
        """Return the settings of a site on this machine; this class has the same settings for all sites."""
        return self

    def changed(self, values: Mapping[str, Any], origin: str) -> "SiteSettings":
        return make_settings({**self.model_dump(exclude={"sites"}), **values}, origin)

    def check_sites(self, sites: Collection[str], dealt: bool = False) -> None:
        """Raise MedsiloError if a site that is not in the study has settings, or if two sites have the same data set.

        Args:
            dealt: True if the plan divides one folder among the sites, so that no patient is at two sites
        """
        owners: dict[tuple[Path, Path], str] = {}
        for site in () if dealt else sorted(sites):
            source = self.of(site).data
            if source is None or source.data_set is None:
                continue
            read = source.data_set.resolve(), source.folder_of(site)
            if (other := owners.setdefault(read, site)) != site:
                raise MedsiloError(
                    f"{other} and {site} have the same data set, so each patient would count twice; "
                    f"give each its own {FILE_NAME}, or name only one"
                )


class EachSites(SiteSettings):
    """The settings of several sites on one machine; a site without a medsilo.yaml has the common settings."""

    sites: dict[str, SiteSettings] = {}

    def of(self, site: str) -> SiteSettings:
        return self.sites.get(site, self)

    def check_sites(self, sites: Collection[str], dealt: bool = False) -> None:
        super().check_sites(sites, dealt)
        if strangers := sorted(self.sites.keys() - set(sites)):
            raise MedsiloError(
                f"there is a {FILE_NAME} for {strangers[0]}, which is not a site of the plan; the plan has "
                f"{', '.join(sorted(sites))}"
            )

    def changed(self, values: Mapping[str, Any], origin: str) -> "EachSites":
        sites = {site: one.changed(values, origin) for site, one in self.sites.items()}
        return of_each(super().changed(values, origin), sites)


def of_each(settings: SiteSettings, sites: dict[str, SiteSettings]) -> EachSites:
    """Return the settings of several sites on one machine; a site without settings in `sites` has the common settings
    `settings`.
    """
    return EachSites(**{name: getattr(settings, name) for name in SiteSettings.model_fields}, sites=sites)


def make_settings(values: Any, origin: str) -> SiteSettings:
    """Validate a hospital's settings; an error names the settings' origin, the faulty key and the remedy."""
    return SiteSettings.from_values(values, origin)


def read_settings_of_all(folder: Path) -> SiteSettings:
    """Read the settings in a folder, and in subfolders that are named after sites."""
    own = SiteSettings.read(folder)
    sites = {path.parent.name: SiteSettings.read(path.parent) for path in sorted(folder.glob(f"*/{FILE_NAME}"))}
    return of_each(own, sites) if sites else own
