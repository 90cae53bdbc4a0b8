"""Evaluate models on a site's cases, and save pictures of some cases."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from medsilo.core.errors import DataError
from medsilo.core.tensors import is_finite
from medsilo.federation.disclosure import LOSS
from medsilo.federation.site_context import SiteContext
from medsilo.learning.compute import Compute, Stop
from medsilo.learning.layers import judges_by_batch
from medsilo.learning.loop import as_scored, batches, evaluate
from medsilo.learning.sampling import drawn_cases
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.runs import paths
from medsilo.site.query_budget import PARTS
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import Cases, SiteData, names_of

PICTURES = 3
Measure = Callable[[Tensor, Tensor], Measures]
# makes a function that measures the cases of a given data set
Measuring = Callable[[Dataset], Measure]


class Evaluation:
    """Computes exact scores over a site's cases; disclosure.py decides which scores leave the site."""

    def __init__(self, context: SiteContext, data: SiteData, compute: Compute, protected: bool) -> None:
        """If `protected` is true because the data come from patients, the measures also include the loss of each
        case.
        """
        self.plan, self.task, self.site, self.data = context.plan, context.plan.task, context.site, data
        self.settings, self.compute, self.protected = context.settings, compute, protected
        self.folder = context.folder
        for part in PARTS:
            cases = len(getattr(data, part))
            if cases == 0 and not context.trains and part != "test":
                continue
            if cases == 0:
                raise DataError(f"the {part} part of task {self.task.name} has no cases at this site; check its split")
            if not self.plan.network.embedding:  # `Embedding.of` has already checked the inputs
                check_inputs(part, self.pieces(getattr(data, part), "check"), self.task.shape)

    def pieces(self, part: Dataset, purpose: str) -> Dataset:
        """From each case, cut a random section of the shape that the task states. Calls with the same `purpose` cut the
        same sections.
        """
        names = names_of(part) if self.plan.privacy else None
        return drawn_cases(part, self.task.piece, seed_for(self.plan.seed, self.site, purpose), names)

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        """Return the mean loss, the mean score, and the measures of each single case.

        If there are no cases, the mean loss and the mean score are NaN. By default, the task's metric measures each
        case.
        """
        if not len(part):  # type: ignore[arg-type]
            return math.nan, math.nan, {}
        task, goal, order = self.task, self.task.goal, self._order(part, model)
        own = measuring(_ordered(part, order)) if measuring else None

        def measure(output: Tensor, target: Tensor) -> Measures:
            output = as_scored(output, self.protected)
            found = (own or goal.scored)(output, target)
            return {**found, LOSS: goal.case_losses(output, target)} if self.protected else found

        data = self._in_order(part, order)
        loss, measures = evaluate(model, data, goal.loss, measure, self.compute, stop, task.infer)
        if order is not None:
            back = order.argsort()
            measures = {name: values[back] for name, values in measures.items()}
        measures = goal.over_all(measures)
        return loss, goal.score(measures[goal.metric]), measures

    def in_order(self, part: Dataset, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the cases in the order in which the evaluation of this model reads the cases."""
        return self._in_order(part, self._order(part, model))

    def _with_places(self, part: Dataset, model: nn.Module) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """Yield inputs, targets and indices of the cases, in the order in which the evaluation of this model reads the
        cases.
        """
        order, first = self._order(part, model), 0
        for inputs, targets in self._in_order(part, order):
            here = range(first, first + len(inputs))
            yield inputs, targets, list(here) if order is None else order[here.start : here.stop].tolist()
            first = here.stop

    def _output(self, model: nn.Module, inputs: Tensor) -> Tensor:
        with self.compute.cast():
            return self.task.infer(model.eval(), inputs).float()

    def _order(self, part: Dataset, model: nn.Module) -> Tensor | None:
        """Return the order of the cases in the evaluation of this model; None means that the data set's order is used.

        If a batch norm uses the statistics of the batch, the order of the cases is shuffled with a fixed seed.
        """
        if not judges_by_batch(model):
            return None
        drawn = generator_for(self.plan.seed, self.site, "evaluation")
        return torch.randperm(len(part), generator=drawn)  # type: ignore[arg-type]

    def _in_order(self, part: Dataset, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(_ordered(part, order), self.task.evaluation_batch, self.compute)

    # --------------------------------------------------------- pictures, which never leave the site
    @property
    def draws(self) -> bool:
        """True if the hospital may save pictures of this site's images together with the site's results."""
        return self.settings.pictures or self.task.synthetic

    def draw_inputs(self, layer: nn.Module | None, folder: Path) -> None:
        """Save pictures of some training images before and after the input layer."""
        from medsilo.tasks.overlays import draw_images

        if layer is None or not self.draws or not len(self.data.train):  # type: ignore[arg-type]
            return
        cases = self.pieces(self.data.train, "pictures")
        images = torch.stack([cases[case][0] for case in range(min(PICTURES, len(cases)))])  # type: ignore[arg-type]
        draw_images(layer, images.to(self.compute.device), folder / paths.PICTURES)

    @torch.no_grad()
    def draw_found(self, model: nn.Module, judged: nn.Module, measures: Measures, folder: Path) -> None:
        """Save pictures of the best, the median and the worst test case, with the structures that the network predicts.

        Args:
            judged: the model whose evaluation determines the order of the test cases
        """
        goal: Any = self.task.goal
        if not goal.structures or not self.draws:
            return
        ranked = measures[goal.metric].argsort(stable=True)
        places = {"worst": 0, "median": len(ranked) // 2, "best": len(ranked) - 1}
        chosen = {which: int(ranked[place]) for which, place in places.items()}
        # use the same batches as the test, because a batch norm may compute its statistics from the batch
        for inputs, targets, cases in self._with_places(self.data.test, judged):
            if here := {which: cases.index(case) for which, case in chosen.items() if case in cases}:
                output = self._output(model, inputs)
                found, right = (goal.masks(labels) for labels in (goal.predicted(output, targets), targets))
                for which, n in here.items():
                    from medsilo.tasks.overlays import draw_found

                    draw_found(inputs[n], found[n], right[n], folder / paths.PICTURES / f"test-{which}.png")


def _ordered(part: Dataset, order: Tensor | None) -> Dataset:
    return part if order is None else Subset(part, order.tolist())


def check_inputs(part: str, data: Dataset, shape: tuple[int, ...] | None) -> None:
    """Raise a DataError unless a site's inputs have the shape that the task requires.

    The error may leave the site, because the error's text contains no counts and no file names.

    If a site's cases are not in memory, the function checks only the first training case. No test case is read, because
    a study reads test cases only at its end.
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
            f"inputs of the {part} part are NaN or infinite; correct them at the site",
            private=f"{int(wrong.sum())} values in {int(wrong.any(1).sum())} of {len(data)} cases",
        )
