"""Messages between the server and the sites: a parcel on the wire, and typed messages with ranges behind it.

Nobody is believed: what arrives is read into one of these models before anything of it is used, and what does not fit
is refused in one line, which costs its sender that answer.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import not_
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from medsilo.core.errors import Refused
from medsilo.core.mmap_store import bytes_of
from medsilo.core.section import Section
from medsilo.core.tensors import Groups, Tensors
from medsilo.core.text import plain
from medsilo.runs.fields import FURTHEST, LARGEST
from medsilo.runs.site_files import Readiness

MOST_CASES = 10_000_000  # of one site
MOST_ROUNDS = 10_000_000  # of all phases of a study
MOST_WARNINGS, LONGEST_WARNING = 9, 400
MOST_VALUES, DEEPEST = 10_000, 12  # of an answer's facts beside its counts, and how far they may be nested
SecAggTask = Literal["agree", "offer", "unmask"]  # of a sealed study
Task = Literal[SecAggTask, "join", "round", "deliver", "test"]
End = Literal["join", "deliver", "test"]
PARTS = ("train", "validation", "test")

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MOST_HEADS = 8  # of a hospital's ledgers that a server keeps
FILES = "files"  # the group in which a file travels that a network begins with
PIECE = 1 << 20  # bytes of it that travel as one tensor: over http NVFlare's sites take none of more than 4 MB


class MessageFacts(Section):
    """A typed message, strict in what this party makes of it, too. `received` reads one that came."""

    model_config = ConfigDict(strict=True)


@dataclass
class StudyMessage:
    """A message between the server and one site: named groups of tensors, and facts.

    >>> import torch
    >>> StudyMessage({"model": {"weight": torch.zeros(2, 3)}}, {"round": 1}).size()
    24
    """

    groups: Groups = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def size(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for group in self.groups.values() for tensor in group.values())


BETWEEN = "\x1f"  # a group's name and a tensor's


def flat(groups: Groups) -> Tensors:
    """Return all tensors in one mapping, in sorted order."""
    return {f"{group}{BETWEEN}{name}": own for group in sorted(groups) for name, own in sorted(groups[group].items())}


def digest_of(request: StudyMessage) -> str:
    """Return what stands for a request: another one has another digest."""
    found = hashlib.sha256(json.dumps(request.facts, sort_keys=True).encode())
    for name, tensor in flat(request.groups).items():
        found.update(f"{name}{BETWEEN}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(bytes_of(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


class LedgerHead(MessageFacts):
    """The head of a hospital's privacy ledger, as the hospital signed it: how far it was, and when."""

    began: Digest  # of its first line
    lines: Annotated[int, Field(ge=0, le=MOST_ROUNDS * 10)]
    hash: Digest  # of its last line
    time: Annotated[int, Field(ge=0, le=2**53)]
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,1024}$")]


# ---------------------------------------------------------------------------------------------------- the server asks
class Request(MessageFacts):
    """A request of the server to one site."""

    task: Task
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    study: Name
    plan: Name  # its hash
    sites: Annotated[tuple[Name, ...], Field(strict=False)]  # of the study, those that only see the outcome included
    timeout: Annotated[float, Field(gt=0)] = 604_800
    selected: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] | None = None  # the round whose model is tested
    packages: dict[str, Any] = {}  # version and hash of each whose code runs the plan
    train_cases: Annotated[int, Field(ge=1)] | None = None  # of the smallest site, when the plan asks for one size
    last: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] = 0  # the last round that the site was part of
    outcome: dict[str, Any] = {}  # what there is to know of the outcome
    # What the site's privacy ledgers were when it answered last
    ledgers: Annotated[tuple[LedgerHead, ...], Field(strict=False)] = Field((), exclude_if=not_, max_length=MOST_HEADS)
    # Of a study with secure aggregation, which its package reads
    secagg: dict[str, Any] = Field({}, exclude_if=not_)

    def parcel(self, groups: Groups) -> StudyMessage:
        """Return the request as it travels."""
        return StudyMessage(groups, self.model_dump(mode="json"))


# ---------------------------------------------------------------------------------------------------- a site answers
class Counted(MessageFacts):
    """The cases of a site's parts."""

    train: Annotated[int, Field(ge=0, le=MOST_CASES)]
    validation: Annotated[int, Field(ge=0, le=MOST_CASES)]
    test: Annotated[int, Field(ge=0, le=MOST_CASES)]


class SiteAnswer(MessageFacts):
    """The facts that are in every answer of a site."""

    task: Task
    round: int
    study: Name
    packages: dict[str, Any]
    cases: Counted
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    memory: Annotated[float, Field(ge=0, le=2**53)]
    warnings: Annotated[
        list[Annotated[str, Field(max_length=LONGEST_WARNING)]], Field(max_length=MOST_WARNINGS)
    ]  # what the lead should know
    # Parts with too few cases to tell a score
    suppressed: Annotated[list[Literal["validation", "test"]], Field(max_length=2)]
    # Parts of which a score is told with noise, and nothing else
    noisy: Annotated[list[Literal["validation", "test"]], Field(max_length=2, exclude_if=lambda parts: not parts)] = []
    ledger: LedgerHead | None = Field(None, exclude_if=not_)  # of a hospital that counts what privacy costs
    readiness: Readiness | None = Field(None, exclude_if=not_)  # in a canary

    def parcel(self, groups: Groups | None = None) -> StudyMessage:
        """Return the answer as it travels."""
        return StudyMessage(groups or {}, self.model_dump(mode="json"))


Part = Annotated[str, Field(max_length=20)]
ScoredPart = Literal["validation", "test"]
Step = Annotated[float, Field(gt=0, le=2 * FURTHEST)]
Version = Annotated[str, Field(max_length=60, pattern=r"^[A-Za-z0-9._+ -]+$")]


class Joined(SiteAnswer):
    """A site is there."""

    task: Literal["join"]
    shares: bool  # whether other hospitals may get its personal model
    machine: Annotated[dict[Part, Version], Field(max_length=10)] = {}  # versions of what decides over the last digits
    absent: Annotated[list[Name], Field(max_length=300)] = []  # structures and columns that it has not
    # By part: the steps in which its scores leave, where they leave rounded
    steps: dict[ScoredPart, Step] = Field({}, exclude_if=not_)
    # By part: the cases of each class; None where there are no classes, or one has too few to be told
    classes: dict[str, list[Annotated[int, Field(ge=0, le=MOST_CASES)]] | None]

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        if set(self.classes) != set(PARTS):
            raise ValueError(f"its counts of classes are not of the parts {', '.join(PARTS)}")
        for part, counts in self.classes.items():
            if counts is not None and sum(counts) != getattr(self.cases, part):
                raise ValueError(
                    f"its counts of the {part} part's classes make {sum(counts)}, not its "
                    f"{getattr(self.cases, part)} cases"
                )
        return self


class SecAggAnswer(SiteAnswer):
    """A site's letters in a sealed study, beside its rounds."""

    task: SecAggTask
    secagg: dict[str, Any]


class Trained(SiteAnswer):
    """A round of a site."""

    task: Literal["round"]
    samples: Annotated[int, Field(ge=1, le=MOST_CASES)]  # the training cases that the tensors rest on
    train_loss: Number | None
    validation: Number | None  # the score of the model as it arrived
    validation_loss: Number | None

    @model_validator(mode="after")
    def _rests_on_its_cases(self) -> Self:
        if self.samples > max(self.cases.train, 1):
            raise ValueError(f"sample count {self.samples} is more than its {self.cases.train} training cases")
        return self


class Delivered(SiteAnswer):
    """A site has the outcome."""

    task: Literal["deliver"]
    validation: Number | None
    validation_loss: Number | None
    outcome: dict[str, Any] | None


class Tested(SiteAnswer):
    """A site has tested the selected model."""

    task: Literal["test"]
    test: Number | None
    test_loss: Number | None
    selected: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]  # the round whose model was tested
    counts: dict[str, list[Number]]  # that add up over sites
    # From where on the second class's probability counts as found, by the validation cases
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, exclude_if=not_)
    outcome: dict[str, Any] | None


LETTERED = get_args(SecAggTask)
ANSWERS: Mapping[str, type[SiteAnswer]] = {
    "join": Joined,
    "round": Trained,
    "deliver": Delivered,
    "test": Tested,
    **dict.fromkeys(LETTERED, SecAggAnswer),
}


HARMLESS = (float, str, type(None))


def check_values(values: Any, most: int) -> None:
    """Raise Refused unless these are no more than so many values that JSON can hold, and not nested too deep.

    Nothing else of what came needs to be safe to compare, to sort or to show.
    """
    left: list[tuple[Any, str, int]] = [(values, "answer", 0)]
    seen = 0
    while left:
        value, where, depth = left.pop()
        if isinstance(value, dict | list):
            seen += len(value)
            if seen > most:
                raise Refused(f"its answer has more than {most} values")
            if depth == DEEPEST:
                raise Refused(f"its answer is nested more than {DEEPEST} deep")
            if isinstance(value, list):
                left += ((inner, where, depth + 1) for inner in value if type(inner) not in HARMLESS)
                continue
            if not all(isinstance(key, str) for key in value):
                raise Refused(f"its {where}: every key must be a string")
            rest = ((key, inner) for key, inner in value.items() if type(inner) not in HARMLESS)
            left += ((inner, plain(key, 80), depth + 1) for key, inner in rest)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Refused(f"its {where}: a number of {value.bit_length()} bits is out of range")
        elif value is not None and not isinstance(value, str | int | float):
            raise Refused(f"its {where} holds a {type(value).__name__}, not a number or a text")


def same_names(what: str, given: Collection[str], expected: Collection[str]) -> None:
    """Raise Refused, naming the first few, when names are missing or surplus."""
    for problem, names in (("lacks", set(expected) - set(given)), ("has the surplus", set(given) - set(expected))):
        if names:
            shown = ", ".join(sorted(plain(str(name), 80) for name in names)[:3]) + (", ..." if len(names) > 3 else "")
            raise Refused(f"{what}: {problem} {shown}")
