"""Scoring models on a site's cases: what is kept of them, what may be told, and what is drawn."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from medsilo.core.coarse import Resolution
from medsilo.core.errors import DataError
from medsilo.federation.drawing import draw_found, draw_images
from medsilo.federation.private_numbers import How, PrivateNumbers
from medsilo.federation.protection import Protection
from medsilo.learning.layers import judges_by_batch
from medsilo.learning.loop import Compute, Stop, batches, evaluate, is_finite, refuse_nan
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Counted
from medsilo.site.book import PARTS
from medsilo.site.settings import Part as SitePart
from medsilo.site.settings import SiteSettings
from medsilo.tasks.decisions import RELIABILITY, coarse_reliability, threshold_of
from medsilo.tasks.metrics import (
    BINS,
    BROAD,
    BY_PATIENT,
    CHANCES,
    CONFUSION,
    Counts,
    Measures,
    chances,
    coarse_chances,
)
from medsilo.tasks.task import Cases, SiteData, names_of, patients_of

PICTURES = 3
MOST = 2.0  # loss of a patient's case, from where on it is all one in what is told
MOST_GAIN = 0.1  # by a postprocessing in a patient's case, from where on it is all one in what is told
MIDDLE = 0.5  # what stands for no gain
CLASS = 4  # times the least: the cases of each class of a part where patients' classes are told apart
LOSS = "loss"  # of each case
PAIR = 2  # cases of a pair: of n patients each is in 2 / n of all pairs
Measure = Callable[[Tensor, Tensor], Measures]
Measuring = Callable[[Dataset], Measure]  # of cases in order
Part = Literal["validation", "test"]


class Evaluation:
    """A site's cases, as they are scored."""

    def __init__(
        self,
        plan: Plan,
        site: str,
        data: SiteData,
        settings: SiteSettings,
        compute: Compute,
        protection: Protection,
        numbers: PrivateNumbers | None = None,
    ) -> None:
        """numbers: how they are told in a study that promises privacy."""
        self.numbers = numbers
        self.plan, self.task, self.site, self.data = plan, plan.task, site, data
        self.settings, self.compute = settings, compute
        self.patients = {part: patients_of(getattr(data, part)) for part in PARTS}
        self.protected = protection.on
        self.resolution: dict[str, Resolution]
        self.resolution = {part: protection.resolution(self.patients[part]) for part in PARTS}
        self.sway = {part: self.task.sway(getattr(data, part), self.patients[part]) for part in PARTS}
        for part, share in self.sway.items():
            if share is not None:
                own = self.resolution[part]
                self.resolution[part] = replace(own, weight=max(own.weight, share))
        self.too_near = {part for part in protection.too_near(data) if self._how(part) == "exact"}
        self.cases = {part: len(getattr(data, part)) for part in PARTS}
        for part, cases in self.cases.items():
            if cases == 0 and site in plan.participation.unseen and part != "test":
                continue
            if cases == 0:
                raise DataError(f"the {part} part of task {plan.task.name} has no cases at this site; check its split")
            _check_inputs(part, self.pieces(getattr(data, part), "check"), plan.task.shape)

    def pieces(self, part: Dataset, purpose: str) -> Dataset:
        """Return the cases of a part in the task's shape, always the same."""
        names = names_of(part) if self.numbers else None
        return self.task.pieces(part, seed_for(self.plan.seed, self.site, purpose), names)

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        """Return mean loss, mean score, and what is measured of each case (the metric alone by default), in order."""
        task, order = self.task, self._order(part, model)
        measure = (measuring or self._by_metric)(_ordered(part, order))
        if self.protected:
            measure = with_losses(measure, task.case_losses)
        measure = of_numbers(measure)
        data = self._in_order(part, order)
        loss, measures = evaluate(model, data, task.loss, measure, self.compute, stop, task.infer)
        if order is not None:
            back = order.argsort()
            measures = {name: values[back] for name, values in measures.items()}
        return loss, task.score(measures[task.metric]), measures

    def in_order(self, part: Dataset, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the cases as this model is evaluated on them."""
        return self._in_order(part, self._order(part, model))

    def _by_metric(self, cases: Dataset) -> Measure:
        """Return what measures cases by the task's metric alone."""
        return lambda output, target: {self.task.metric: self.task.case_scores(output, target)}

    def _order(self, part: Dataset, model: nn.Module) -> Tensor | None:
        """Return the order of a part's cases: mixed, always in the same way, where a batch norm judges by the batch."""
        if not judges_by_batch(model):
            return None
        drawn = generator_for(self.plan.seed, self.site, "evaluation")
        return torch.randperm(len(part), generator=drawn)  # type: ignore[arg-type]

    def _in_order(self, part: Dataset, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(_ordered(part, order), self.task.evaluation_batch, self.compute)

    # ------------------------------------------------------------------ what may be told
    @property
    def counted(self) -> Counted:
        """The numbers of cases, as they are told."""
        told: dict[str, int | None] = {part: self.resolution[part].count(cases) for part, cases in self.cases.items()}
        if self.numbers and self.numbers.counted:
            told = dict(self.numbers.counted[1])
        return Counted(**told | dict.fromkeys(self.sealed_parts))

    @property
    def sealed_parts(self) -> tuple[str, ...]:
        """The parts whose numbers of cases only the hospital knows."""
        return ("train",) if self.plan.transport.sealing_counts else ()

    def tells(self, part: SitePart) -> bool:
        """Return whether a score over a part may leave. It may not if it covers too few patients, alone or as the
        difference to another score, or if the study promises privacy and it is neither public nor has noise."""
        if self._how(part) != "exact":
            return self._how(part) == "noisy"
        if part in self.too_near or (self.protected and (self.sway[part] or 0) * self.least > PAIR):
            return False
        return (len(set(self.patients[part])) if self.protected else self.cases[part]) >= self.least

    def _how(self, part: SitePart) -> How:
        return self.numbers.how(part) if self.numbers else "exact"

    @property
    def noisy(self) -> list[Part]:
        """Return the parts of which a score leaves with noise, and nothing else."""
        parts: tuple[Part, ...] = ("validation", "test")
        return [part for part in parts if self._how(part) == "noisy"]

    @property
    def chooses_by(self) -> How:
        """Return how this site's choice of a model may depend on its validation cases, since the choice leaves."""
        return self._how("validation")

    def samples(self, cases: int) -> int:
        """Return the number of training cases on which tensors rest, as it is told."""
        if self.numbers and self.numbers.counted:
            return self.numbers.counted[1]["train"]
        return self.resolution["train"].count(cases)

    def noisy_score(self, part: Part, number: int, measures: Measures) -> float:
        """Return a part's score with noise; every call is another release."""
        assert self.numbers
        return self.numbers.score(part, number, measures[self.task.metric], *self.task.metric_range)

    @property
    def least(self) -> int:
        """The cases that a metric must cover before it leaves this site."""
        return self.settings.least(self.task.synthetic)

    @property
    def withheld(self) -> list[Part]:
        """The parts that have too few cases to tell a score."""
        parts: tuple[Part, ...] = ("validation", "test")
        return [part for part in parts if not self.tells(part)]

    def score(self, part: Part, score: float) -> float:
        """Return a part's mean score as it is told."""
        return self.resolution[part].mean(score, *self.task.metric_range)

    def loss(self, part: Part, loss: float, measures: Measures) -> float:
        """Return a part's mean loss as it is told: where patients are behind it, no case counts for more than MOST."""
        resolution = self.resolution[part]
        return resolution.mean(float(measures[LOSS].clamp(0, MOST).mean()), 0, MOST) if resolution.patients else loss

    def train_loss(self, loss: float, samples: int) -> float:
        """Return the mean loss over so many training cases as it is told; nan where it may not be."""
        if not self.tells("train") and (self.protected or self.numbers):
            return math.nan
        return self.resolution["train"].among(samples / self.cases["train"]).mean(loss, 0, MOST)

    def counts(self, measures: Measures) -> Counts:
        """Return the counts over the test cases as they are told."""
        told = self._counts(measures)
        if not self.settings.calibration:
            told.pop(RELIABILITY, None)
        return told

    def _counts(self, measures: Measures) -> Counts:
        task, resolution, patients = self.task, self.resolution["test"], self.patients["test"]
        if resolution.exact:
            return task.counts(measures, patients, self.least)
        cut = {
            name: values.clamp(*task.told_range(name)) if task.layout.get(name) == 2 else values
            for name, values in measures.items()
            if name != LOSS
        }
        told = {name: self._coarse_mean(name, *values) for name, values in self._pairs(cut, patients).items()}
        of_classes = task.counts(cut, patients, CLASS * self.least) if task.classifies else {}
        if CONFUSION in of_classes:
            told[CONFUSION] = resolution.shared_out(of_classes[CONFUSION])
            told[CHANCES] = coarse_chances(of_classes[CHANCES], task.classes, resolution)
            told[RELIABILITY] = coarse_reliability(
                of_classes[RELIABILITY], of_classes[CHANCES], told[CHANCES], task.classes, resolution
            )
        return told

    def trials(self, measures: Measures) -> Counts:
        """Return the sums over validation cases by which a postprocessing is chosen, as they are told."""
        every = self.task.postprocessings
        if every is None or not self.tells("validation"):
            return {}
        if self.resolution["validation"].exact:
            return every.sums(measures, self.least)
        gains = every.sums(every.gains(measures, MOST_GAIN), self.least)
        return {trial: self._coarse_gain(*values) for trial, values in gains.items()}

    def _coarse_gain(self, total: float, number: float) -> list[float]:
        """Return a sum of gains and their number as they are told: the mean in whole steps above or below MIDDLE."""
        resolution, mean = self.resolution["validation"], total / number if number else 0.0
        step = resolution.among(number / self.cases["validation"]).step(-MOST_GAIN, MOST_GAIN) if number else 0.0
        told = min(max(round(mean / step) * step, -MOST_GAIN), MOST_GAIN) if step else mean
        count = float(resolution.count(int(number)))
        return [(MIDDLE + told) * count, count]

    @property
    def tells_threshold(self) -> bool:
        """Return whether a threshold that follows from validation cases may leave; never under a promise of privacy."""
        asked = self.task.decides and self.numbers is None and self.settings.calibration
        return asked and self.cases["validation"] > 0 and self.tells("validation")

    def threshold(self, measures: Measures) -> float | None:
        """Return the threshold of validation cases as it is told: of patients one of the few between the broad places.

        None where a class has too few cases.
        """
        exact, labels = self.resolution["validation"].exact, measures["label"].long()
        if labels.bincount(minlength=2).min() < self.least * (1 if exact else CLASS):
            return None
        histograms = chances(labels, torch.stack([measures["p0"], measures["p1"]], 1))
        return threshold_of(histograms, BINS if exact else BROAD, self.plan.tracking.sensitivity)

    def _pairs(self, measures: Measures, patients: Sequence[str]) -> Counts:
        """Sums over cases with their number."""
        counts = self.task.counts(measures, patients, self.least)
        return {name: values for name, values in counts.items() if self.task.layout[name] == 2}

    def _coarse_mean(self, name: str, total: float, number: float) -> list[float]:
        """A sum and its number of cases (or patients) as they are told."""
        resolution = self.resolution["test"]
        if not number:
            return [0.0, 0.0]
        if name.endswith(BY_PATIENT):
            share, name = number * resolution.weight, name.removesuffix(BY_PATIENT)  # each patient counts for one
        else:
            share = number / self.cases["test"]
        mean = resolution.among(share).mean(total / number, *self.task.told_range(name))
        return [mean * resolution.count(int(number)), float(resolution.count(int(number)))]

    def classes(self) -> dict[str, list[int] | None]:
        """Return the cases of each class in every part; None where there are none, or one has too few to be told."""
        if self.numbers and (self.numbers.guarded or self.numbers.counted):
            return dict.fromkeys(PARTS)  # each would be one more release, and `counts` declares numbers of cases alone
        counts = {part: self.task.class_counts(getattr(self.data, part)) for part in PARTS}
        return {
            part: [int(count) for count in self.resolution[part].shared_out(own)]
            if own and any(own) and min(filter(None, own)) >= self.least and part not in self.sealed_parts
            else None
            for part, own in counts.items()
        }

    # ------------------------------------------------------------------ pictures, which never leave
    @property
    def draws(self) -> bool:
        """Return whether pictures of this site's images may be kept beside its results."""
        return self.settings.pictures or self.task.synthetic

    def draw_inputs(self, layer: nn.Module | None, folder: Path) -> None:
        """Draw some training images before and after the input layer."""
        if layer is None or not self.draws or not self.cases["train"]:
            return
        cases = self.pieces(self.data.train, "pictures")
        images = torch.stack([cases[case][0] for case in range(min(PICTURES, self.cases["train"]))])
        draw_images(layer, images.to(self.compute.device), folder / paths.PICTURES)

    @torch.no_grad()
    def draw_found(self, model: nn.Module, judged: nn.Module, measures: Measures, folder: Path) -> None:
        """Draw the best, the median and the worst test case with what was found in them.

        judged: the model by which the cases were ordered when they were tested.
        """
        task = self.task
        if not task.segments or not self.draws:
            return
        ranked, order = measures[task.metric].argsort(stable=True), self._order(self.data.test, judged)
        places = {"worst": 0, "median": len(ranked) // 2, "best": len(ranked) - 1}
        chosen = {which: int(ranked[place]) for which, place in places.items()}
        first = 0
        for inputs, targets in self._in_order(self.data.test, order):  # in the batches that were tested
            cases = range(first, first + len(inputs)) if order is None else order[first : first + len(inputs)].tolist()
            here = {which: list(cases).index(case) for which, case in chosen.items() if case in cases}
            if here:
                with self.compute.cast():
                    output = task.infer(model.eval(), inputs)
                found, right = (task.masks(labels) for labels in (task.found(output.float(), targets), targets))
                for which, n in here.items():
                    draw_found(inputs[n], found[n], right[n], folder / paths.PICTURES / f"test-{which}.png")
            first += len(inputs)


def _ordered(part: Dataset, order: Tensor | None) -> Dataset:
    return part if order is None else Subset(part, order.tolist())


def of_numbers(measure: Measure) -> Measure:
    """Return what measures outputs that are numbers, and refuses others: argmax makes a class of NaN, too."""

    def measured(output: Tensor, target: Tensor) -> Measures:
        refuse_nan(output)
        return measure(output, target)

    return measured


def with_losses(measure: Measure, losses: Callable[[Tensor, Tensor], Tensor]) -> Measure:
    """Return what measures each case's loss, too."""

    def measured(output: Tensor, target: Tensor) -> Measures:
        return {**measure(output, target), LOSS: losses(output, target)}

    return measured


def _check_inputs(part: str, data: Dataset, shape: tuple[int, ...] | None) -> None:
    """Raise a DataError unless inputs are what the task says; counts, and no names of files, may leave the site.

    Of data that are not in memory only the first training case is looked at: test data wait for the end.
    """
    own = shape
    if isinstance(data, Cases):
        own = tuple(data.inputs.shape[1:])
    elif part == "train":
        own = tuple(data[0][0].shape)
    if own is not None and shape is not None and own != shape:
        hint = f"the plan's images have {shape[0]} channels" if own[0] != shape[0] else "set task.size"
        raise DataError(f"the {part} part has inputs of shape {list(own)}, the plan's are {list(shape)}; {hint}")
    if isinstance(data, Cases) and not is_finite(data.inputs):
        wrong = ~data.inputs.isfinite().flatten(1)
        raise DataError(
            f"{int(wrong.sum())} values in {int(wrong.any(1).sum())} of {len(data)} cases of the {part} part are NaN "
            "or infinite; correct them at the site"
        )
