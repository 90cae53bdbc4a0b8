"""Define the plan's section `participation`, which names the hospitals of a study."""

from collections.abc import Iterable
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from medsilo.core.section import Feature
from medsilo.core.text import counted, is_safe_name

if TYPE_CHECKING:
    from medsilo.core.tensors import Modules

MOST_SITES = 4096
MEASURED = {
    "timeout": 600,
    "heartbeat_timeout": 420,
    # The default value of a key means that the server determines the time limit itself by measuring. The default
    # values are not null, because null would change the hashes of existing plans.
}


class Participation(Feature):
    sites: tuple[str, ...] = Field(
        (),
        max_length=MOST_SITES,
        description="names of the agreed sites; empty: all sites that are connected when the job starts",
    )
    evaluation_sites: tuple[str, ...] = Field(
        (),
        max_length=MOST_SITES,
        description="names of sites that do not train and are tested with the outcome: the global model or the super "
        "model",
    )
    minimum: int | None = Field(
        None,
        ge=1,
        description="smallest number of sites that must contribute to each round; `null`: all sites that "
        "the plan names",
    )
    max_share: float = Field(
        0.99,
        gt=0,
        le=1,
        description="the largest share of all training cases that one hospital may state when it joins; the server "
        "rejects a larger share. If updates are weighted by numbers of patients, the limit is a share of "
        "all patients instead of all cases. 1: no limit. The limit has no effect if weights do not depend "
        "on numbers of cases: with `algorithm.weighting: uniform`, `aggregation.max_weight` or "
        "`aggregation.robust`",
    )
    when_missing: Literal["stop", "wait", "continue"] = Field(
        "stop",
        description="`stop`: the server repeats its request once if the site's training process crashed or its disk "
        "is full. With `stop`, the study ends if the answer of any site remains missing. `wait`: until "
        "`retry_timeout` is over, the server repeats its request to a site that is lost, whose training "
        "process crashed or whose disk is full. A site's refusal is final, unless its training process "
        "crashed or its disk is full. `continue`: the study continues without the missing site. With "
        "`stop`, `wait` and `continue`, the study ends when fewer than `minimum` sites contribute",
    )
    timeout: int = Field(
        MEASURED["timeout"],
        ge=1,
        le=86_400,
        description="seconds that a site has for one answer. With 600, the default, medsilo checks whether the site is "
        "alive and works, and sets no time limit for a working site",
    )
    retry_timeout: int = Field(
        3600, ge=1, le=604_800, description="seconds that a round waits for missing sites under `wait`"
    )
    resume: int = Field(
        0,
        ge=0,
        le=100,
        description="how often in a day a study resumes by itself after its job or the server's machine died, or "
        "after the server's disk was full. A restart no longer counts towards `resume` once the study "
        "has finished ten more rounds. 0: never; a lead must run `medsilo resume`",
    )
    require_same_versions: tuple[Literal["python", "nvflare", "torch", "numpy", "monai", "processor"], ...] = Field(
        (),
        description="software and hardware that must equal the server's: the version of `python`, `nvflare`, `torch`, "
        "`numpy` or `monai`, or the `processor`'s instructions. The server rejects a site if anything in this list "
        "differs. If something outside this list differs, medsilo prints a warning",
    )
    heartbeat_timeout: int = Field(
        MEASURED["heartbeat_timeout"],
        ge=1,
        le=86_400,
        description="seconds that a connection may be down before the server stops waiting for the site's answer. "
        "With 420, the default, the server waits 20 minutes, or less if `when_missing` is `continue` and all "
        "earlier interruptions of the site's connection were short",
    )

    @field_validator("sites", "evaluation_sites")
    @classmethod
    def _names(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if not is_safe_name(site):
                raise ValueError(
                    f"site name {site!r} has odd characters; use letters, digits, '.', '_' and '-' (at most 63)"
                )
        if len(set(sites)) < len(sites):
            raise ValueError(f"a site is named twice in {list(sites)}; name each site once")
        return tuple(sorted(sites))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.sites and self.minimum is None:
            raise ValueError("zero sites: name them in participation.sites, or set participation.minimum")
        if self.evaluation_sites and not self.sites:
            raise ValueError("evaluation_sites need named sites, too; name the training sites in participation.sites")
        if both := sorted({*self.sites} & {*self.evaluation_sites}):
            raise ValueError(f"{both[0]} is under sites and under evaluation_sites; remove it from one of the two keys")
        if self.sites and self.minimum is not None and self.minimum > len(self.sites):
            raise ValueError(
                f"minimum {self.minimum} is more than the {counted(len(self.sites), 'named site')}; lower it"
            )
        if self.sites and self.when_missing == "continue" and self.minimum in (None, len(self.sites)):
            raise ValueError(
                f"when_missing 'continue' can't go on while all {len(self.sites)} sites are required; lower minimum"
            )
        return self

    @property
    def everyone(self) -> tuple[str, ...]:
        return tuple(sorted({*self.sites, *self.evaluation_sites}))

    @property
    def limit(self) -> int | None:
        """The plan's time limit for one answer, in seconds. None means that the plan sets no time limit, and that the
        server checks instead whether the site is still active.
        """
        return None if self.timeout == MEASURED["timeout"] else self.timeout

    @property
    def longest_silence(self) -> int | None:
        """The longest silence of a site's connection, in seconds, that the plan allows. None means that the plan sets
        no limit, and that the server derives a limit from measured silences.
        """
        return None if self.heartbeat_timeout == MEASURED["heartbeat_timeout"] else self.heartbeat_timeout

    @property
    def required(self) -> int:
        return self.minimum if self.minimum is not None else len(self.sites)

    def conflicts(self, plan: Any, networks: "Modules") -> Iterable[str]:
        most = plan.task.most_sites
        if most is not None and len(self.everyone) > most:
            named = len(self.everyone)
            yield f"participation.sites: {named} sites, but task {plan.task.name} has {most}; name fewer"
        if self.max_share * self.required < 1 < self.required:
            yield (
                f"participation.max_share: parts of at most {self.max_share:g} can't be all cases of {self.required} "
                f"sites; give {1 / self.required:.3g} or more"
            )
        if self.evaluation_sites and not plan.algorithm.outcome.for_others:
            yield f"participation.evaluation_sites: {plan.algorithm.name} gives no model to sites that did not train"


def names_for(number: int) -> list[str]:
    """Return names for hospitals, such as "hospital-a"."""
    marks = [*ascii_lowercase] if number <= len(ascii_lowercase) else [*map(str, range(1, number + 1))]
    return [f"hospital-{mark}" for mark in marks[:number]]
