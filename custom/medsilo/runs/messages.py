"""Define the messages between the server and sites.

A message consists of named groups of tensors, and of other values, for which this module defines pydantic models.
Because no sender is trusted, a model validates the values before use, and rejects invalid values with a one-line
reason.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import not_
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from medsilo.core.errors import Refused
from medsilo.core.mmap_store import bytes_of
from medsilo.core.section import Section
from medsilo.core.tensors import Groups, Tensors
from medsilo.core.text import plain
from medsilo.runs.disclosed import Disclosed, declarations, merged
from medsilo.runs.fields import FURTHEST, LARGEST
from medsilo.runs.site_files import Readiness
from medsilo.tasks.subgroups import MOST_LEVELS, MOST_SUBGROUPS, SubgroupWord

MOST_CASES = 10_000_000  # limit on the number of cases of one site
MOST_ROUNDS = 10_000_000  # limit on a study's rounds in all phases
MOST_WARNINGS = 9
MOST_LOSS = 2.0  # upper bound on the loss of one case in a disclosed mean loss
# limits on the number of values in an answer, and on their nesting
MOST_VALUES, DEEPEST = 10_000, 12
SecAggTask = Literal["agree", "offer", "unmask"]  # steps of secure aggregation
Task = Literal[SecAggTask, "join", "round", "deliver", "test"]
End = Literal["join", "deliver", "test"]
PARTS = ("train", "validation", "test")

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
ScoredPart = Literal["validation", "test"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MOST_HEADS = 8  # the server stores at most this many ledger heads for each hospital
FILES = "files"  # name of the group of tensors that contains the bytes of a file, such as a file of initial weights
PIECE = 1 << 20  # bytes of a file in each tensor, because NVFlare's sites accept at most 4 MB over HTTP


class MessageFacts(Section):
    """Base class of the models of a message's values; the values must have exactly the declared types."""

    model_config = ConfigDict(strict=True)


@dataclass
class StudyMessage:
    """A message between the server and one site: named groups of tensors, and JSON values.

    >>> import torch
    >>> StudyMessage({"model": {"weight": torch.zeros(2, 3)}}, {"round": 1}).size()
    24
    """

    groups: Groups = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def size(self) -> int:
        return sum(tensor.nbytes for group in self.groups.values() for tensor in group.values())


BETWEEN = "\x1f"  # separates the name of a group from the name of a tensor


def flat(groups: Groups) -> Tensors:
    return {f"{group}{BETWEEN}{name}": own for group in sorted(groups) for name, own in sorted(groups[group].items())}


def digest_of(request: StudyMessage) -> str:
    """Return the SHA-256 digest of a request's values and tensors."""
    found = hashlib.sha256(json.dumps(request.facts, sort_keys=True).encode())
    for name, tensor in flat(request.groups).items():
        found.update(f"{name}{BETWEEN}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(bytes_of(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


class LedgerHead(MessageFacts):
    """The signed head of a hospital's privacy ledger."""

    began: Digest  # hash of the ledger's first line
    lines: Annotated[int, Field(ge=0, le=MOST_ROUNDS * 10)]
    hash: Digest  # hash of the ledger's last line
    time: Annotated[int, Field(ge=0, le=2**53)]
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,1024}$")]


# ----------------------------------------------------------------------------------------------------- requests
class Request(MessageFacts):
    task: Task
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    study: Name
    plan: Name  # the plan's hash
    sites: Annotated[tuple[Name, ...], Field(strict=False)]  # all sites of the study, including evaluation sites
    timeout: Annotated[float, Field(gt=0)] = 604_800
    selected: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] | None = None  # round whose model the site tests
    packages: dict[str, Any] = {}  # version and hash of each package that the plan uses
    # If the plan has training.truncate, the number of training cases of the smallest site.
    train_cases: Annotated[int, Field(ge=1)] | None = None
    last: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] = 0  # last round in which the site took part
    outcome: dict[str, Any] = {}  # values of the study's outcome, which the method computed at the server
    # The latest heads of this hospital's privacy ledgers that the server received
    ledgers: Annotated[tuple[LedgerHead, ...], Field(strict=False)] = Field((), exclude_if=not_, max_length=MOST_HEADS)
    # For a study with a training script: for each site, the number of training cases that it reported when joining
    stated: dict[Name, Annotated[int, Field(ge=0, le=MOST_CASES)]] = Field({}, exclude_if=not_)
    # Values for secure aggregation, which the package medsilo_secagg validates.
    secagg: dict[str, Any] = Field({}, exclude_if=not_)

    def message(self, groups: Groups) -> StudyMessage:
        return StudyMessage(groups, self.model_dump(mode="json"))


# ----------------------------------------------------------------------------------------------------- answers
class Counted(MessageFacts):
    """Number of cases, or number of patients, in each part of a site's data: training, validation and test."""

    train: Annotated[int, Field(ge=0, le=MOST_CASES)]
    validation: Annotated[int, Field(ge=0, le=MOST_CASES)]
    test: Annotated[int, Field(ge=0, le=MOST_CASES)]


WARNINGS = {  # the warnings that a site may send: the site sends the kind and the numbers, and the server has the text
    "state lost": "the site's own state after round {} is not on its disk any more: it went on from {}; look after its "
    "output folder",
    "server back": "the server went back to round {}, and the site had done {}: of its own states it went on from {}",
    "own split": "this hospital divides its patients by itself ({}, {}, {}); task.shares is not used here",
    "near": "this hospital sends no score over its {} cases, because fewer than {} patients differ from those of an "
    "earlier study (min_patients_per_metric in its medsilo.yaml)",
    "ledger back": "its privacy ledger had {} lines and now has {} others, so an old copy was restored; ask the "
    "hospital to run medsilo ledger",
    "ledger unknown": "it uses a privacy ledger that this server does not know; the one before had {} lines. Either "
    "the data set is another one, or the ledger was started again",
}


class SiteWarning(MessageFacts):
    """A site's warning to the lead: only a kind and numbers, because no free text leaves a site."""

    kind: Literal[tuple(WARNINGS)]  # type: ignore[valid-type]
    numbers: Annotated[tuple[Number, ...], Field(strict=False, max_length=3)] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.numbers) != WARNINGS[self.kind].count("{}"):
            raise ValueError(f"a warning of {self.kind} has a wrong number of values")
        return self

    @property
    def text(self) -> str:
        told = [f"{number:.10g}" for number in self.numbers]
        if self.kind in ("state lost", "server back"):
            told[-1] = f"that after round {told[-1]}" if self.numbers[-1] else "the initial one"
        elif self.kind == "near":
            told[0] = PARTS[min(max(int(self.numbers[0]), 0), 2)]
        return WARNINGS[self.kind].format(*told)


PLAIN = Disclosed("other", "")  # values that contain no information about patients
SCORE = Disclosed("mean", "score", of="validation", by_script=True)
LOSS = Disclosed("mean", "loss", of="validation", between=(0, MOST_LOSS), by_script=True)
# no words, because the method describes its outcome in the disclosure report
OUTCOME = Disclosed("numbers", "", by_script=True)


class SiteAnswer(MessageFacts):
    """An answer of a site. The type of each field contains the declaration of the disclosed value (disclosed.py)."""

    task: Annotated[Task, PLAIN]
    round: Annotated[int, PLAIN]
    study: Annotated[Name, PLAIN]
    packages: Annotated[dict[str, Any], Disclosed("other", "version and hash of {packages}")]
    cases: Annotated[
        Counted,
        Disclosed("cases", "the numbers of training, validation and test cases", of="counts", by_script=True),
    ]
    patients: Annotated[Counted, Disclosed("cases", "and of their patients", of="counts", by_script=True)]
    # True if the counts of classes and decisions count patients instead of cases.
    by_patient: Annotated[bool, PLAIN] = Field(False, exclude_if=not_)
    seconds: Annotated[float, Field(ge=0, le=1e9), Disclosed("time", "seconds")]
    memory: Annotated[float, Field(ge=0, le=2**53), Disclosed("time", "the memory that training took")]
    warnings: Annotated[list[SiteWarning], Field(max_length=MOST_WARNINGS), Disclosed("warnings", "")]
    # Parts of the data whose scores the site suppresses, or whose scores are undefined
    suppressed: Annotated[list[ScoredPart], Field(max_length=2), PLAIN]
    # Parts of the data (validation or test) whose scores have noise for differential privacy.
    noisy: Annotated[list[ScoredPart], Field(max_length=2, exclude_if=lambda parts: not parts), PLAIN] = []
    # head of the hospital's privacy ledger, if the hospital has a privacy ledger
    ledger: Annotated[LedgerHead | None, Disclosed("outside", "")] = Field(None, exclude_if=not_)
    # the readiness that a hospital reports in a canary study; None in all other studies
    readiness: Annotated[Readiness | None, Disclosed("outside", "")] = Field(None, exclude_if=not_)
    _noted: list[str] = PrivateAttr([])  # notes of the server about the site's answer

    def note(self, text: str) -> None:
        self._noted = [*self._noted, text]

    @property
    def notes(self) -> list[str]:
        return [*(warning.text for warning in self.warnings), *self._noted]

    @property
    def counted(self) -> Counted:
        """The totals to which the counts of classes and decisions add up: patients if `by_patient` is true, else
        cases.
        """
        return self.patients if self.by_patient else self.cases

    @model_validator(mode="after")
    def _has_its_patients_cases(self) -> Self:
        numbers = {part: (getattr(self.patients, part), getattr(self.cases, part)) for part in PARTS}
        if odd := [part for part, (patients, cases) in numbers.items() if patients > cases > 0]:
            raise ValueError(f"the site has more patients than cases in the {odd[0]} part")
        return self

    def message(self, groups: Groups | None = None) -> StudyMessage:
        return StudyMessage(groups or {}, self.model_dump(mode="json"))


Part = Annotated[str, Field(max_length=20)]
Step = Annotated[float, Field(gt=0, le=2 * FURTHEST)]
Version = Annotated[str, Field(max_length=60, pattern=r"^(\d[A-Za-z0-9._+-]*|[a-zA-Z]\w+( [A-Z0-9_]+){1,2})$")]


class Joined(SiteAnswer):
    task: Literal["join"]
    # whether other hospitals may receive this site's personal model
    shares: Annotated[bool, Disclosed("other", "whether this site shares its personal model")]
    # software versions and processor instructions, because they can change the last digits of results
    machine: Annotated[
        dict[Part, Version],
        Field(max_length=10),
        Disclosed(
            "other",
            "the versions of Python, NVFlare, torch, numpy and MONAI here, and which instructions the processor has",
        ),
    ] = {}
    # Structures and columns of the plan that are missing in the site's data.
    absent: Annotated[
        list[Name],
        Field(max_length=300),
        Disclosed("other", "which structures, classes, channels or columns this site lacks (data.unannotated)"),
    ] = []
    # Step to which the site rounds scores, by part of the data (validation or test).
    steps: Annotated[dict[ScoredPart, Step], Disclosed("numbers", "the steps of its scores")] = Field(
        {}, exclude_if=not_
    )
    # for each part of the data, the number of cases of each class; None without classes, or if the site suppresses the
    # numbers
    classes: Annotated[
        dict[str, list[Annotated[int, Field(ge=0, le=MOST_CASES)]] | None],
        Disclosed("numbers", "the cases of each class", of="counts"),
    ]

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        if set(self.classes) != set(PARTS):
            raise ValueError(f"the site's counts of classes must name the parts {', '.join(PARTS)}")
        for part, counts in self.classes.items():
            if counts is not None and sum(counts) != (number := getattr(self.counted, part)):
                of = "patients" if self.by_patient else "cases"
                raise ValueError(
                    f"the site's counts of classes in the {part} part add up to {sum(counts)}, not {number} {of}"
                )
        return self


class SecAggAnswer(SiteAnswer):
    """A site's answer to a request of secure aggregation."""

    task: SecAggTask
    # keys and masks, without information about patients
    secagg: Annotated[dict[str, Any], Disclosed("other", "", by_script=True)]


class Trained(SiteAnswer):
    task: Literal["round"]
    # number of cases on which the site trained in this round
    samples: Annotated[int, Field(ge=1, le=MOST_CASES), Disclosed("count", "", of="counts", by_script=True)]
    train_loss: Annotated[Number | None, replace(LOSS, of="train")]
    validation: Annotated[Number | None, SCORE]  # score of the received model before the site trains it
    validation_loss: Annotated[Number | None, LOSS]

    @model_validator(mode="after")
    def _rests_on_its_cases(self) -> Self:
        if self.samples > max(self.cases.train, 1):
            raise ValueError(f"sample count {self.samples} is more than its {self.cases.train} training cases")
        return self


class Delivered(SiteAnswer):
    task: Literal["deliver"]
    validation: Annotated[Number | None, SCORE]
    validation_loss: Annotated[Number | None, LOSS]
    outcome: Annotated[dict[str, Any] | None, OUTCOME]


class SubgroupScore(MessageFacts):
    """The test score of one level of a subgroup. The number of patients is 0 if the site suppresses the score of the
    subgroup's level.
    """

    subgroup: SubgroupWord
    level: SubgroupWord
    patients: Annotated[int, Field(ge=0, le=MOST_CASES)] = 0
    score: Number | None = None
    spread: Annotated[float, Field(ge=0, le=4)] | None = None  # upper bound on the variance of one patient's score
    step: Annotated[float, Field(ge=0, le=2 * FURTHEST)] = 0.0

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.score is None) != (self.spread is None) or (self.score is not None and not self.patients):
            raise ValueError(
                f"the score of {plain(self.level, 60)} lacks its number of patients or its variance (spread)"
            )
        return self


class Tested(SiteAnswer):
    task: Literal["test"]
    test: Annotated[Number | None, replace(SCORE, of="test")]
    test_loss: Annotated[Number | None, replace(LOSS, of="test")]
    # round whose model the site tested
    selected: Annotated[int, Field(ge=0, le=MOST_ROUNDS), Disclosed("round", "", by_script=True)]
    # counts over test cases that the server can sum over sites
    counts: Annotated[dict[str, list[Number]], Disclosed("numbers", "counts", of="test", by_script=True)]
    # Threshold on the probability of the second class, chosen on validation cases.
    threshold: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        Disclosed("threshold", "", of="validation", by_script=True, private=False),
    ] = Field(None, exclude_if=not_)
    # Test score of each level of the subgroups that the hospital's data set declares. The server rejects scores of
    # subgroups from a script, because a script has no subgroups.
    subgroups: Annotated[
        list[SubgroupScore],
        Field(max_length=MOST_SUBGROUPS * MOST_LEVELS + 1, exclude_if=not_),
        Disclosed("other", "", of="test", by_script=True, private=False),
    ] = []
    outcome: Annotated[dict[str, Any] | None, OUTCOME]

    @model_validator(mode="after")
    def _names_each_level_once(self) -> Self:
        if len({(subgroup.subgroup, subgroup.level) for subgroup in self.subgroups}) < len(self.subgroups):
            raise ValueError("a level of the site's subgroups occurs twice")
        if any(one.patients > self.patients.test for one in self.subgroups):
            raise ValueError("a level of the site's subgroups has more patients than the test part")
        return self


LETTERED = get_args(SecAggTask)
ANSWERS: Mapping[str, type[SiteAnswer]] = {
    "join": Joined,
    "round": Trained,
    "deliver": Delivered,
    "test": Tested,
    **dict.fromkeys(LETTERED, SecAggAnswer),
}
# The declarations of the values in the answer to each task; and the declarations of all values together
DISCLOSED: Mapping[str, Mapping[str, Disclosed]] = {task: declarations(kind) for task, kind in ANSWERS.items()}
ALL_DISCLOSED: Mapping[str, Disclosed] = merged(DISCLOSED.values())
# names of the values that differ between two runs with the same seed
VARYING = frozenset(name for name, own in ALL_DISCLOSED.items() if own.form == "time")


def declared(name: str) -> Disclosed:
    """Return the declaration of a value that is about to leave a hospital; raises Refused for an undeclared value."""
    if name not in ALL_DISCLOSED:
        raise Refused(f"the value {plain(name, 40)} is not declared, so it does not leave this hospital")
    return ALL_DISCLOSED[name]


HARMLESS = (float, str, type(None))


def check_values(values: Any, most: int) -> None:
    """Raise Refused if a message contains other values than JSON has, too many values, or too deeply nested values.

    The function accepts any objects, even if they can't be compared, sorted or printed.
    """
    left: list[tuple[Any, str, int]] = [(values, "facts", 0)]
    seen = 0
    while left:
        value, where, depth = left.pop()
        if isinstance(value, dict | list):
            seen += len(value)
            if seen > most:
                raise Refused(f"the answer has more than {most} values")
            if depth == DEEPEST:
                raise Refused(f"the answer is nested more than {DEEPEST} deep")
            if isinstance(value, list):
                left += ((inner, where, depth + 1) for inner in value if type(inner) not in HARMLESS)
                continue
            if not all(isinstance(key, str) for key in value):
                raise Refused(f"the answer's {where}: every key must be a string")
            rest = ((key, inner) for key, inner in value.items() if type(inner) not in HARMLESS)
            left += ((inner, plain(key, 80), depth + 1) for key, inner in rest)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Refused(f"the answer's {where}: a number of {value.bit_length()} bits is out of range")
        elif value is not None and not isinstance(value, str | int | float):
            raise Refused(f"the answer's {where} holds a {type(value).__name__}, not a number or a text")


def same_names(subject: str, given: Collection[str], expected: Collection[str]) -> None:
    """Raise Refused unless exactly the expected names are given."""
    for problem, names in (("lacks", set(expected) - set(given)), ("has the surplus", set(given) - set(expected))):
        if names:
            shown = ", ".join(sorted(plain(str(name), 80) for name in names)[:3]) + (", ..." if len(names) > 3 else "")
            raise Refused(f"{subject}: {problem} {shown}")
