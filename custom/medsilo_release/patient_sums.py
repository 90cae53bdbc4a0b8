"""Watching a released model at a hospital: numbers of cases without names, and the cases that they are compared with.

Nothing is kept of a case alone: what is written of predictions are sums over five patients, in standard deviations from
the cases of the validation.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded, write_json
from medsilo.core.section import Section
from medsilo.deploy import watch
from medsilo.deploy.predictor import Predictor
from medsilo.deploy.source import Source
from medsilo_release.release_folder import MANIFEST, Hash, Release, Word, today

HOME = Path("~/.local/state/medsilo/watch")  # a folder for each release
REFERENCE, SUMS = "reference.json", "sums.json"
BLOCK = 5  # patients of a sum
MOST_BLOCKS, MOST_REFERENCE, LARGEST = 2000, 2000, 32 << 20
LEAST = 30  # patients of a reference
FAR = 5.0  # standard deviations, from where on it is all one
COLUMNS, CHANNELS, CLASSES, FEATURES = 16, 4, 8, 4  # the most of each that are measured
OUTCOME = "outcome"  # the score of a case, once it is known what was right
SURPRISE, KNOWN = "surprise", "known to be "  # how far that speaks for labels that are wrong; a class that it was
WRONG, LEAST_SHARE = 0.1, 1e-3  # of the labels, as against none; that is believed of a class
ANSWERS = ("share of", "entropy", "output", "labels in", "width of", "promised")  # begin their names
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Names = Annotated[tuple[Word, ...], Field(max_length=64)]
Month = Annotated[str, Field(pattern=r"^\d{4}-\d\d$")]


class Reference(Section):
    """reference.json: the validation's cases, in standard deviations from their mean, in no order."""

    hospital: Word
    names: Names
    means: tuple[Number, ...]
    deviations: tuple[Number, ...]
    cases: Annotated[tuple[tuple[Number, ...], ...], Field(max_length=MOST_REFERENCE)] = ()

    @property
    def values(self) -> np.ndarray:
        """The cases, [cases, names]."""
        return np.array(self.cases)

    def apart(self, name: str, value: float) -> float:
        """Return how far a value lies from the mean; so far that nothing is further, where it is no number."""
        at = self.names.index(name)
        apart = (value - self.means[at]) / self.deviations[at]
        if group_of(name) == OUTCOME:
            return apart
        return float(np.clip(np.nan_to_num(apart, nan=FAR), -FAR, FAR))

    def named(self, outcomes: bool) -> list[str]:
        """Return the names of numbers that are known only later, or of those that are known at once."""
        return [name for name in self.names if (group_of(name) == OUTCOME) == outcomes]


class Sums(Section):
    """Sums over some patients. beside: of what the reference has not, in its own units."""

    month: Month
    patients: Annotated[int, Field(ge=0, le=BLOCK)] = 0
    sums: tuple[Number, ...] = ()
    beside: dict[Word, Number] = {}


class Stream(Section):
    """Sums over five patients each, the oldest first, and over those who do not make up five yet."""

    whole: Annotated[tuple[Sums, ...], Field(max_length=MOST_BLOCKS)] = ()
    rest: Sums | None = None

    def of(self, month: str) -> list[Sums]:
        """Return the whole sums of a month."""
        return [block for block in self.whole if block.month == month]

    def plus(self, month: str, case: Sequence[float], beside: Mapping[str, float]) -> "Stream":
        """Return this and one patient more."""
        old = self.rest or Sums(month=month, sums=(0.0,) * len(case))
        sums = tuple(round(before + new, 4) for before, new in zip(old.sums, case, strict=True))
        both = {**old.beside, **beside}  # a scanner is one case's and not the next one's
        others = {name: round(old.beside.get(name, 0.0) + beside.get(name, 0.0), 4) for name in both}
        rest = Sums(month=month, patients=old.patients + 1, sums=sums, beside=others)
        if rest.patients < BLOCK:
            return Stream(whole=self.whole, rest=rest)
        return Stream(whole=(*self.whole, rest)[-MOST_BLOCKS:])


class KeptSums(Section):
    """sums.json: what is kept of predictions, and of outcomes that came in later."""

    began: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    cases: Stream = Stream()
    outcomes: Stream = Stream()
    tables: Annotated[tuple[Hash, ...], Field(max_length=MOST_BLOCKS)] = ()  # outcomes that were given already


class WatchFolder:
    """The folder in which a hospital keeps sums of a release's predictions."""

    def __init__(self, release: str) -> None:
        self.folder = HOME.expanduser() / release

    @property
    def there(self) -> bool:
        """Return whether the hospital watches this release."""
        return (self.folder / REFERENCE).is_file()

    def reference(self) -> Reference:
        """Return the cases of the validation."""
        return _read(self.folder / REFERENCE, Reference)

    def kept(self) -> KeptSums:
        """Return what is kept so far."""
        path = self.folder / SUMS
        return _read(path, KeptSums) if path.exists() else KeptSums(began=today())

    def begin(self, reference: Reference) -> None:
        """Keep a reference; what was kept against another one goes."""
        write_json(self.folder / REFERENCE, reference.model_dump(mode="json"))
        (self.folder / SUMS).unlink(missing_ok=True)

    def add(
        self, cases: Sequence[watch.Seen], outcomes: Sequence[watch.Seen] = (), table: str = "", month: str = ""
    ) -> None:
        """Keep what was seen of patients, and what is known of some whose outcome has come in."""
        from filelock import FileLock

        month, reference = month or this_month(), self.reference()
        names, later = reference.named(False), reference.named(True)
        with FileLock(self.folder / "lock", timeout=60):
            kept = self.kept()
            seen, known = kept.cases, kept.outcomes
            for case in cases:
                apart = [reference.apart(name, case.get(name, np.nan)) for name in names]
                seen = seen.plus(month, apart, {name: own for name, own in case.items() if name not in reference.names})
            for case in outcomes:
                known = known.plus(month, [reference.apart(name, case[name]) for name in later], {})
            tables = (*kept.tables, table)[-MOST_BLOCKS:] if table else kept.tables
            made = KeptSums(began=kept.began, cases=seen, outcomes=known, tables=tables)
            write_json(self.folder / SUMS, made.model_dump(mode="json"))


def this_month() -> str:
    """Return the month as it is written."""
    return today()[:7]


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return kind.from_values(json.loads(read_bounded(path, LARGEST)), path.name)
    except (OSError, ValueError, MedsiloError, RecursionError) as error:
        raise MedsiloError(
            f"what is kept of this release can't be read ({path.name}); begin again with 'medsilo validate --watch'",
            str(path),
        ) from error


# ---------------------------------------------------------------------------------------------------- measuring
LAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Measuring:
    """Measures cases as a model answers them: inputs, its last features, its scores, and sizes of what is promised."""

    def __init__(self, source: Source, folder: WatchFolder | None = None) -> None:
        self.task, self.folder, self.features = source.plan.task, folder, list[Tensor]()
        last = [own for own in source.network.modules() if isinstance(own, LAST)]
        if last and source.facts.get("kind") == "model":  # of several models nobody says which one answers
            last[-1].register_forward_pre_hook(lambda _, given: self.features.append(_over_places(given[0]).cpu()))

    def measure(self, inputs: Tensor, output: Tensor, said: Sequence[Mapping[str, Any]]) -> list[watch.Seen]:
        """Return the numbers of each case."""
        numbers = self._of_inputs(inputs.float()) | self._of_output(output.double()) | self._of_features(len(inputs))
        told = zip(*(own.cpu().double().tolist() for own in numbers.values()), strict=True)
        return [{**dict(zip(numbers, row, strict=True)), **_sizes(own)} for row, own in zip(told, said, strict=True)]

    def keep(self, cases: Sequence[watch.Seen]) -> None:
        """Keep what was measured of patients."""
        assert self.folder
        self.folder.add(cases)

    def _of_inputs(self, inputs: Tensor) -> dict[str, Tensor]:
        if inputs.dim() == 2:
            names = getattr(self.task, "input_names", None) or [f"input {n}" for n in range(inputs.shape[1])]
            return {str(name)[:80]: inputs[:, n] for n, name in enumerate(names[:COLUMNS])}
        found = {}
        for n in range(min(inputs.shape[1], CHANNELS)):
            own = inputs[:, n].flatten(1)
            found[f"intensity of channel {n}"] = own.mean(1)
            found[f"contrast of channel {n}"] = own.std(1)
            found[f"grain of channel {n}"] = inputs[:, n].diff(dim=-1).abs().flatten(1).mean(1)
        over = inputs.flatten(2)  # places that all channels show so: marks, bars, metal
        return found | {"darkest place": over.amax(1).amin(1), "brightest place": over.amin(1).amax(1)}

    def _of_output(self, output: Tensor) -> dict[str, Tensor]:
        goal: Any = self.task.goal
        if goal.classifies or (goal.outputs > 1 and not goal.overlaps):
            shares = (goal.scores(output) if goal.classifies else output).softmax(1)
            sure = -(shares * shares.clamp(min=1e-12).log()).sum(1)
            names, first = goal.label_names, 1 if shares.shape[1] == 2 or not goal.classifies else 0
            told = {f"share of {names[n]}": shares[:, n] for n in range(first, min(shares.shape[1], CLASSES))}
            told["entropy"] = sure
            return {name: own.flatten(1).mean(1) if own.dim() > 1 else own for name, own in told.items()}
        return {f"output {n}": own for n, own in enumerate(_over_places(output)[:, :CLASSES].T)}

    def _of_features(self, cases: int) -> dict[str, Tensor]:
        """Return the last layer's inputs, mixed into few numbers by signs that are always the same."""
        held, self.features = self.features, []
        whole = torch.cat(held) if held else torch.zeros(0, 1)
        if not cases or len(whole) % cases or not len(whole):
            return {}
        whole = whole.reshape(cases, -1, whole.shape[1]).mean(1) if len(whole) != cases else whole
        signs = torch.randint(0, 2, (whole.shape[1], FEATURES), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        mixed = whole @ signs / whole.shape[1] ** 0.5
        return {f"feature {n}": mixed[:, n] for n in range(FEATURES)}


def _over_places(values: Tensor) -> Tensor:
    return values.float().flatten(2).mean(2) if values.dim() > 2 else values.float()


def group_of(name: str) -> str:
    """Return to which group of charts a number belongs: what goes in, what the model says, or outcomes."""
    if name in (OUTCOME, SURPRISE) or name.startswith(KNOWN):
        return OUTCOME
    return "answers" if name.startswith(ANSWERS) else "inputs"


def charted(names: Sequence[str]) -> list[str]:
    """Return the numbers that have charts: surprise tells more of outcomes than the score does."""
    return [name for name in names if name != OUTCOME or SURPRISE not in names]


def known_of(score: float, labels: Sequence[str], right: int | None = None, sure: float | None = None) -> watch.Seen:
    """Return the numbers of a case whose outcome is known. right: its class; sure: what the model gave the class that
    it found."""
    seen = {OUTCOME: score}
    if right is not None:
        first = 1 if len(labels) == 2 else 0
        seen |= {f"{KNOWN}{labels[n]}": float(n == right) for n in range(first, min(len(labels), CLASSES))}
    if sure is not None:
        right_one = float(np.clip(sure if score else 1 - sure, LEAST_SHARE, 1))
        seen[SURPRISE] = float(np.log(1 - WRONG + WRONG * (1 - right_one) / right_one))
    return seen


def known_of_all(goal: Any, metric: str, measures: Mapping[str, Any]) -> list[watch.Seen]:
    """Return the numbers of all cases of a validation. measures: by name, of each case."""
    scores = np.asarray(measures[metric], float)
    if not goal.classifies:
        return [known_of(float(score), ()) for score in scores]
    sure = np.max([np.asarray(measures[f"p{n}"], float) for n in range(goal.classes)], 0)
    told = zip(scores.tolist(), measures["label"], sure.tolist(), strict=True)
    return [known_of(score, goal.label_names, int(right), own) for score, right, own in told]


def _sizes(said: Mapping[str, Any]) -> watch.Seen:
    """Return the size of what is promised of a case."""
    if (labels := said.get("promised_set")) is not None:
        return {"labels in the promised set": float(str(labels).count("|") + 1)}
    if "promised_low" in said:
        return {"width of the promised interval": float(said["promised_high"]) - float(said["promised_low"])}
    return {"promised time": float(said["promised_until"])} if "promised_until" in said else {}


class Validated:
    """Collects what is seen of the cases of a validation, and how far they keep what is promised."""

    def __init__(self) -> None:
        self.seen: dict[int, watch.Seen] = {}
        self.promised: dict[int, float] = {}
        self._measuring: Measuring | None = None

    def __call__(self, source: Source, inputs: Tensor, output: Tensor, target: Tensor, cases: list[int]) -> None:
        self.promised |= {
            case: float(own)
            for told in source.kept(output, target, inputs).values()
            for case, own in zip(cases, told.tolist(), strict=True)
        }
        if self._measuring is None:
            self._measuring = Measuring(source)
            with torch.inference_mode():  # the features of this first batch went by before anybody looked
                source.plan.task.infer(source.network, inputs)
        said = source.said(output.cpu(), inputs.cpu())
        self.seen |= dict(zip(cases, self._measuring.measure(inputs, output, said), strict=True))

    @property
    def kept(self) -> float | None:
        """Return the mean over cases of how far promises were kept; None where nothing was promised."""
        told = [own for own in self.promised.values() if np.isfinite(own)]
        return float(np.mean(told)) if told else None

    def reference(self, metric: str, hospital: str, measures: Any, people: Any) -> Reference:
        """Return what later predictions are compared with. measures, people: of each case."""
        assert self._measuring
        whose: dict[str, list[watch.Seen]] = {}
        known = known_of_all(self._measuring.task.goal, metric, measures)
        for case in sorted(self.seen):
            whose.setdefault(people[case], []).append({**self.seen[case], **known[case]})
        if len(whose) < LEAST:
            raise MedsiloError(f"--watch: {len(whose)} patients; {LEAST} at least are needed to notice changes against")
        rows = [watch.mean_of(cases) for cases in whose.values()]
        rows = [rows[place] for place in np.random.default_rng(len(rows)).permutation(len(rows))[:MOST_REFERENCE]]
        values = np.array([[row.get(name, np.nan) for name in rows[0]] for row in rows])
        means, apart = values.mean(0), values.std(0)
        used = [n for n in range(len(apart)) if apart[n] > 1e-6 * (1 + abs(means[n]))]  # not where one is no number
        reference = Reference(
            hospital=hospital,
            names=tuple(list(rows[0])[n] for n in used),
            means=tuple(means[used].tolist()),
            deviations=tuple(apart[used].tolist()),
        )
        cases = (tuple(round(reference.apart(name, row[name]), 4) for name in reference.names) for row in rows)
        return reference.model_copy(update={"cases": tuple(cases)})


def watching(asked: Predictor) -> watch.Watch | None:
    """Return what keeps numbers of a released model's predictions, where this hospital watches it."""
    for folder in (asked.own, asked.source.run or asked.own):
        if (folder.parent / MANIFEST).is_file():
            kept = WatchFolder(Release.open(folder.parent).hash)  # what was changed after it was signed isn't watched
            return Measuring(asked.source, kept) if kept.there else None
    return None
