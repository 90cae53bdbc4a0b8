"""A site's side of a study: answers the coordinator's parcels, and keeps what never leaves.

No word here of how parcels travel: the same participant works in a plain loop and behind NVFlare.
"""

import csv
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from medsilo.core.errors import DataError, Refused, reading
from medsilo.core.files import load_tensors, save_tensors, sweep, write_json, write_text
from medsilo.core.memory import forget_most, most_held
from medsilo.core.package import package_facts
from medsilo.federation import ending
from medsilo.federation.checks import same_layout
from medsilo.federation.limits import check_limits, free_disk
from medsilo.federation.pictures import FOLDER, draw_found, draw_images
from medsilo.federation.scoring import write_measures
from medsilo.learning.layers import judges_by_batch
from medsilo.learning.loop import Drawn, Lesson, batches, evaluate, is_finite, passed_through, steps_in, train_epoch
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.methods.base import Groups, Parcel, Tensors, Workbench, memory_of
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.base import Cases, SiteData, patients_of
from medsilo.tasks.metrics import Measures
from medsilo.tasks.segmentation import Segmentation

PICTURES = 3
COLUMNS = ("round", "phase", "samples", "train_loss", "validated_round", "validation", "validation_loss", "seconds")
Stop = Callable[[], None]
Measure = Callable[[Tensor, Tensor], Measures]


class Participant:
    """One site of a study. Its state after a round lies in its folder, so any process may take over from there."""

    def __init__(
        self,
        plan: Plan,
        site: str,
        sites: Sequence[str],
        settings: SiteSettings,
        folder: Path,
        data: SiteData | None = None,
    ) -> None:
        self.plan, self.site, self.sites, self.folder = plan, site, sorted(sites), folder
        sweep(folder, folder / ending.FOLDER)
        self.compute, self.settings = settings.compute(), settings
        self.data = data or plan.task.read(site, self.sites, plan.seed, settings.data)
        self.cases = {part: len(getattr(self.data, part)) for part in ("train", "validation", "test")}
        for part, cases in self.cases.items():
            if cases == 0:
                raise DataError(f"the {part} part of task {plan.task.name} has no cases at this site; check its split")
            _check_inputs(part, self._pieces(getattr(self.data, part), "check"), plan.task.shape)
        check_limits(plan, settings, plan.parameters, self.cases["train"], free_disk(folder))
        self.train = self.data.train
        self._check_average()
        self.best: float | None = None  # validation score of the model this site chose so far
        self._begin()
        personal = plan.method.personal(self.modules, plan.last_phase)
        self.chooses = personal and plan.tracking.select == "best"
        self.choice = plan.method.choice(self.modules)

    @property
    def model(self) -> nn.Module:
        """What is evaluated and kept: the network, behind the method's input layer if it has one."""
        return self.plan.method.whole(self.modules)

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        """Do what a parcel asks and answer it. `stop` is asked before every batch and raises to end the work."""
        started = time.monotonic()
        forget_most()
        facts = parcel.facts
        self.warnings: list[str] = []  # what the lead should know of this answer
        work = {"join": self._join, "round": self._round, "deliver": self._deliver, "test": self._test}
        with self.compute.reproducible(seed_for(self.plan.seed, self.site, "work", facts["round"])):
            reply = work[facts["task"]](parcel, facts["round"], stop)
        echo = {key: facts[key] for key in ("task", "round", "study")}
        seconds = time.monotonic() - started
        reply.metrics = {
            name: self.settings.rounded(value) if isinstance(value, float) else value
            for name, value in reply.metrics.items()
        }
        reply.facts |= {
            **echo,
            "package": package_facts(),
            "cases": self.cases,
            "seconds": seconds,
            "memory": most_held(),
            "warnings": self.warnings,
            "withheld": [part for part in ("validation", "test") if self._too_few(part)],
        }
        return reply

    # ------------------------------------------------------------------ the four kinds of work
    def _join(self, parcel: Parcel, number: int, stop: Stop) -> Parcel:
        if self.data.survey:
            write_json(self.folder / "data.json", asdict(self.data.survey))  # names files: it stays at the site
        shares = self.settings.share_personal_model
        shares = self.plan.task.synthetic if shares is None else shares
        return Parcel(facts={"shares": shares, "classes": self.classes()})

    def _round(self, parcel: Parcel, number: int, stop: Stop) -> Parcel:
        """Take over what was merged, validate it, train, and give back what this phase shares."""
        started = time.monotonic()
        phase = self.plan.phase_of(number)
        self._truncate(parcel.facts.get("train_cases"))
        self._stand_after(number - 1, parcel.facts.get("last", 0))
        self.done = -1  # until the round is whole, what lies in memory is the state after no round
        self._receive(parcel, phase)
        metrics = self._validate(number - 1, stop)
        metrics["train_loss"] = _number(self._train(number, phase, stop))
        self._refuse_divergence(number)
        self.done = number
        self._save_state()
        self._write_row(number, phase, metrics, time.monotonic() - started)
        return Parcel(self._give(phase), samples=self._samples(), metrics=self._told(metrics))

    def _deliver(self, parcel: Parcel, number: int, stop: Stop) -> Parcel:
        """Take over and validate the outcome of the last round."""
        self._truncate(parcel.facts.get("train_cases"))
        self._stand_after(number, parcel.facts.get("last", 0))
        self._receive(parcel, self.plan.ending)
        metrics = self._validate(number, stop)
        self._refuse_divergence(number)
        self._write_row(number + 1, "deliver", metrics, 0.0)
        self._draw()
        self._save_model("last", number)
        metrics = self._told(metrics)
        if not self.choice:
            return Parcel(metrics=metrics)
        model = ending.at_site(self.plan, self.modules, parcel.facts["shown"])
        model.save(self.folder / ending.FOLDER)
        model.to(self.compute.device)
        data = self._in_order(self._pieces(self.data.validation, "super model"))
        told = ending.score(model, data, self.plan.task, self.compute, stop)
        if self._too_few("validation"):
            told = ending.untold(told)
        if self.site in self.plan.participation.sites:  # one that did not train shows its cases to no training
            told["spacing"] = ending.spacing_of(self.data.spacings, self.settings.smallest_average)
        return Parcel(metrics=metrics, facts={ending.FACT: told})

    def _test(self, parcel: Parcel, number: int, stop: Stop) -> Parcel:
        """Test the selected model, once: the one the coordinator sends, the last, or this site's own choice."""
        selected = number
        self.done = -1  # what lies in memory from here on is the model under test
        if self.chooses:
            selected = self._load_model("best")["round"]
        else:
            self._load_model("last")
            if parcel.groups:
                selected = parcel.facts["selected"]
                self._receive(parcel, self.plan.last_phase)
        self._save_model("best", selected)
        if not self.choice:
            outcome = self._evaluate(self.data.test, stop, self.model, self.plan.task.measures)
            self._draw_found(self.model, outcome[2])
            return self.tested(selected, *outcome)
        settled = ending.settle(self.folder / ending.FOLDER, parcel.facts["curve"], parcel.facts["spacing"])
        watched = ending.Watched(settled).to(self.compute.device)
        outcome = self._evaluate(self.data.test, stop, watched, self.plan.task.measures)
        reply = self.tested(number, *outcome)
        told = {"chosen": dict(watched.chosen), "sums": []}
        reply.facts[ending.FACT] = ending.untold(told) if self._too_few("test") else told
        self._draw_found(watched.model, outcome[2])
        return reply

    def tested(self, selected: int, loss: float, score: float, measures: Measures) -> Parcel:
        """What is measured of single test cases stays in this site's folder; counts of them leave it."""
        patients = patients_of(self.data.test)
        write_measures(self.folder, measures, patients)
        counts = self.plan.task.counts(measures, patients, self.least)
        if self._too_few("test"):
            loss, score, counts = math.nan, math.nan, {}
        metrics = {"test": _number(score), "test_loss": _number(loss), "cases": len(patients), "selected": selected}
        return Parcel(metrics=metrics, facts={"counts": counts})

    def score(self, model: Tensors) -> float | None:
        """The score on this site's test data of another site's model of the same study."""
        self.done = -1
        self.model.load_state_dict(model)
        with self.compute.reproducible(self.plan.seed):
            return _number(self._evaluate(self.data.test, lambda: None, self.model)[1])

    # ------------------------------------------------------------------ what may be told
    @property
    def least(self) -> int:
        """The cases that a metric must cover before it leaves this site."""
        return self.settings.least(self.plan.task.synthetic)

    def classes(self) -> dict[str, list[int] | None]:
        """The cases of each class in every part; None where there are no classes, or one has too few to be told."""
        counts = {part: self.plan.task.class_counts(getattr(self.data, part)) for part in self.cases}
        return {part: own if own and min(filter(None, own)) >= self.least else None for part, own in counts.items()}

    def _too_few(self, part: str) -> bool:
        return self.cases[part] < self.least

    def _told(self, metrics: dict[str, float | None]) -> dict[str, float | None]:
        if not self._too_few("validation"):
            return metrics
        return {name: None if name.startswith("validation") else value for name, value in metrics.items()}

    # ------------------------------------------------------------------ tensors in and out
    @torch.no_grad()
    def _receive(self, parcel: Parcel, phase: str) -> None:
        """Put what arrived into the networks, in place: the optimizers keep hold of their parameters."""
        method = self.plan.method
        mine = method.given(self.modules, phase)
        always = method.shared(self.modules, phase).keys()  # what is not sent back comes once and may be left out
        same_layout(parcel.groups, {name: mine[name] for name in mine if name in always or name in parcel.groups})
        for group, tensors in parcel.groups.items():
            for name, tensor in tensors.items():
                mine[group][name].copy_(tensor)
        method.received(self.modules, parcel.groups, phase)

    def _give(self, phase: str) -> Groups:
        """Copies of what travels: training may go on in the originals while these are still on their way."""
        shared = self.plan.method.shared(self.modules, phase)
        return {
            group: {name: self._copy(tensor) for name, tensor in tensors.items()} for group, tensors in shared.items()
        }

    def _copy(self, tensor: Tensor) -> Tensor:
        packed = self.plan.transport.packed(tensor).cpu()
        return packed.clone() if packed.data_ptr() == tensor.data_ptr() else packed

    # ------------------------------------------------------------------ training and evaluation
    def _samples(self) -> int:
        """The cases that this site trains on."""
        return len(self.train)  # type: ignore[arg-type]

    def _truncate(self, cases: int | None) -> None:
        """Train on so many cases, always the same ones, when the plan asks for sites of one size."""
        if not self.plan.training.truncate or cases is None or cases >= self.cases["train"]:
            self.train = self.data.train
            return
        drawn = torch.randperm(self.cases["train"], generator=generator_for(self.plan.seed, self.site, "truncate"))
        self.train = Subset(self.data.train, sorted(drawn[: max(cases, 1)].tolist()))
        self._check_average()

    def _check_average(self) -> None:
        """An average that leaves the site covers as many images as the hospital demands, whatever the plan says."""
        covers = self.plan.method.averages(self._samples(), self.plan.training)
        least = self.settings.smallest_average
        if covers is not None and covers < least:
            raise Refused(
                f"this plan averages {covers} images of this site, which lets no average of fewer than {least} leave "
                "(smallest_average in its medsilo.yaml); set a larger training.batch_size or bring more images"
            )

    def _train(self, number: int, phase: str, stop: Stop) -> float:
        if self.plan.training.optimizer_state == "reset":
            self._make_optimizers()
        return self.plan.method.train(self._bench("shuffle", number, stop), phase)

    def _bench(self, purpose: str, number: int, stop: Stop) -> Workbench:
        """What the method works with; the order of the data is drawn for this purpose and round."""

        layer, size = self.plan.method.input_layer(self.modules), self.plan.training.batch_size

        def epoch(lessons: Sequence[Lesson], local_epoch: int, most: int | None = None) -> float:
            order = generator_for(self.plan.seed, self.site, purpose, number, local_epoch)
            cases = self.train
            if self.plan.task.augments:
                drawn = seed_for(self.plan.seed, self.site, "augment", purpose, number, local_epoch)
                cases = Drawn(cases, self.plan.task.augmented, drawn)
            data: Iterator[tuple[Tensor, Tensor]] = islice(batches(cases, size, self.compute, order), most)
            if layer:
                data = passed_through(layer, data, learns=purpose == "shuffle")
            return train_epoch(data, lessons, self.compute, stop)

        def in_order() -> Iterator[tuple[Tensor, Tensor]]:
            cases = self._pieces(self.data.train, "in order")
            for inputs, targets in batches(cases, self.plan.task.evaluation_batch, self.compute):
                stop()
                yield layer.eval()(inputs) if layer else inputs, targets

        return Workbench(
            self.site,
            [site for site in self.sites if site not in self.plan.participation.unseen],
            self.modules,
            self.optimizers,
            self.plan.training,
            self.plan.task.loss,
            self.compute,
            epoch,
            in_order,
            self.cases["train"],
            steps_in(self._samples(), size),
            generator_for(self.plan.seed, self.site, "method", number),
            self.plan.algorithm.perturbation,
        )

    def _pieces(self, part: Dataset, purpose: str) -> Dataset:
        """The cases of a part in the task's shape, always the same."""
        return self.plan.task.pieces(part, seed_for(self.plan.seed, self.site, purpose))

    def _refuse_divergence(self, number: int) -> None:
        """A diverged round is no round: nothing of it is sent or kept, and the next begins from the state before it."""
        for module in self.modules.values():
            for name, tensor in module.state_dict().items():
                if not is_finite(tensor):
                    raise Refused(
                        f"training diverged in round {number}: {name} is NaN or infinite; lower the learning rate"
                    )

    def _validate(self, rounds: int, stop: Stop) -> dict[str, float | None]:
        """Score the model as it is after so many rounds; a site that chooses for itself keeps it when it is best."""
        self.plan.method.personalise(self._bench("personalise", rounds, stop))
        loss, score, _ = self._evaluate(self.data.validation, stop, self.model)
        rank = score if math.isfinite(score) else -sys.float_info.max
        if self.chooses and self.plan.may_be_chosen(rounds) and (self.best is None or rank > self.best):
            self.best = rank
            self._save_model("best", rounds)
        return {"validation": _number(score), "validation_loss": _number(loss)}

    def _evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measure: Measure | None = None
    ) -> tuple[float, float, Measures]:
        """Mean loss, mean score, and what is measured of each case (the metric alone by default), in their order."""
        task, order = self.plan.task, self._order(part)
        measure = measure or (lambda output, target: {task.metric: task.case_scores(output, target)})
        loss, measures = evaluate(model, self._in_order(part), task.loss, measure, self.compute, stop, task.infer)
        if order is not None:
            back = order.argsort()
            measures = {name: values[back] for name, values in measures.items()}
        return loss, float(measures[task.metric].mean()), measures

    def _order(self, part: Dataset) -> Tensor | None:
        """Where a batch norm judges by the batch, cases must be mixed, and always in the same way."""
        if not judges_by_batch(self.modules["model"]):
            return None
        drawn = generator_for(self.plan.seed, self.site, "evaluation")
        return torch.randperm(len(part), generator=drawn)  # type: ignore[arg-type]

    def _in_order(self, part: Dataset) -> Iterator[tuple[Tensor, Tensor]]:
        """The cases as they are evaluated."""
        order = self._order(part)
        cases = part if order is None else Subset(part, order.tolist())
        return batches(cases, self.plan.task.evaluation_batch, self.compute)

    def _draw(self) -> None:
        """Some training images before and after the input layer, into this site's folder; they never travel."""
        layer = self.plan.method.input_layer(self.modules)
        if layer is None or not (self.settings.pictures or self.plan.task.synthetic):
            return
        cases = self._pieces(self.data.train, "pictures")
        images = torch.stack([cases[case][0] for case in range(min(PICTURES, self.cases["train"]))])
        draw_images(layer, images.to(self.compute.device), self.folder / FOLDER)

    @torch.no_grad()
    def _draw_found(self, model: nn.Module, measures: Measures) -> None:
        """The best, the median and the worst test case with what was found in them, into this site's folder."""
        task = self.plan.task
        if not isinstance(task, Segmentation) or not (self.settings.pictures or task.synthetic):
            return
        ranked, order = measures[task.metric].argsort(stable=True), self._order(self.data.test)
        places = {"worst": 0, "median": len(ranked) // 2, "best": len(ranked) - 1}
        chosen = {which: int(ranked[place]) for which, place in places.items()}
        first = 0
        for inputs, targets in self._in_order(self.data.test):  # in the batches that were tested: some norms see them
            cases = range(first, first + len(inputs)) if order is None else order[first : first + len(inputs)].tolist()
            here = {which: list(cases).index(case) for which, case in chosen.items() if case in cases}
            if here:
                with self.compute.cast():
                    output = task.infer(model.eval(), inputs)
                found, right = (task.masks(labels) for labels in (output.float().argmax(1), targets))
                for which, n in here.items():
                    draw_found(inputs[n], found[n], right[n], self.folder / FOLDER / f"test-{which}.png")
            first += len(inputs)

    # ------------------------------------------------------------------ what is kept at the site
    def _begin(self) -> None:
        """The state before the first round, the same at every site."""
        self.modules = {name: module.to(self.compute.device) for name, module in self.plan.build_networks().items()}
        self._make_optimizers()
        self.done = 0
        self.best = None

    def _make_optimizers(self) -> None:
        self.optimizers = {
            name: self.plan.method.make_optimizer(name, module, self.plan.training)
            for name, module in self.modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }

    def _stand_after(self, number: int, last: int) -> None:
        """Be in the state this site had after a round, also when this process is new or the server went back.

        A site that missed rounds goes on from the last it took part in, `last` by the server's word.
        """
        if self.done == number:
            return
        self._begin()
        earlier = [saved for saved in self._saved_rounds() if saved <= number]
        if earlier:
            self._load_state(max(earlier))
        if self.done < last:
            instead = f"that after round {self.done}" if earlier else "the initial one"
            self.warnings.append(
                f"the site's own state after round {last} is not on its disk any more: it went on from {instead}; "
                "look after its output folder"
            )

    def _saved_rounds(self) -> list[int]:
        return [int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.safetensors")]

    def _state_path(self, number: int) -> Path:
        return self.folder / f"state-{number}.safetensors"

    def _save_state(self) -> None:
        """Keep what the server won't send again: private tensors and optimizers, after this round and two before.

        So many, because a server that dies inside a round may not have written the round before yet, and asks for both.
        """
        method, phase = self.plan.method, self.plan.phase_of(self.done + 1)
        given, shared = method.given(self.modules, phase), method.shared(self.modules, phase)
        sent = memory_of({group: given[group] for group in given.keys() & shared.keys()})  # comes in every round
        tensors = {
            f"module/{module}/{name}": tensor
            for module, network in self.modules.items()
            if module not in self.plan.method.passing
            for name, tensor in network.state_dict().items()
            if tensor.data_ptr() not in sent
        }
        if self.plan.training.optimizer_state == "keep":
            for name, optimizer in self.optimizers.items():
                tensors |= {f"optimizer/{name}/{key}": tensor for key, tensor in _optimizer_tensors(optimizer).items()}
        save_tensors(self._state_path(self.done), tensors, {"best": self.best})
        for old in self._saved_rounds():
            if old < self.done - 2:
                self._state_path(old).unlink(missing_ok=True)

    def _load_state(self, number: int) -> None:
        with reading("this site's saved state"):
            tensors, facts = load_tensors(self._state_path(number))
            for module, network in self.modules.items():
                network.load_state_dict(_under(tensors, f"module/{module}/"), strict=False)
            for name, optimizer in self.optimizers.items():
                _restore_optimizer(optimizer, _under(tensors, f"optimizer/{name}/"))
            self.best = None if facts["best"] is None else float(facts["best"])
        self.done = number

    def _save_model(self, which: str, rounds: int) -> None:
        facts = {"round": rounds, "method": self.plan.algorithm.name, "site": self.site, "plan_hash": self.plan.hash}
        save_tensors(self.folder / f"{which}.safetensors", self.model.state_dict(), facts)
        write_text(self.folder / "plan.yaml", self.plan.to_yaml())  # so that the hospital can use the model by itself

    def _load_model(self, which: str) -> dict[str, Any]:
        with reading("this site's saved model"):
            tensors, facts = load_tensors(self.folder / f"{which}.safetensors")
            self.model.load_state_dict(tensors)
            return {"round": int(facts["round"])} | facts

    def _write_row(self, number: int, phase: str, metrics: dict[str, float | None], seconds: float) -> None:
        """One line a round in metrics.csv; a round that is repeated replaces its line."""
        path = self.folder / "metrics.csv"
        with reading("metrics.csv in this site's results"):
            rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8")))) if path.exists() else []
            rows = [{key: row[key] for key in COLUMNS} for row in rows if int(row["round"]) < number]
        row = {"round": number, "phase": phase, "samples": self._samples(), "validated_round": number - 1}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, {**row, **metrics, "seconds": round(seconds, 3)}])
        write_text(path, text.getvalue())


def _check_inputs(part: str, data: Dataset, shape: tuple[int, ...] | None) -> None:
    """The inputs are what the task says; counts, and no names of files, may leave the site.

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


def _number(value: float) -> float | None:
    """A number that JSON can hold; None stands for one that could not be computed, never 0."""
    return value if math.isfinite(value) else None


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, as "<parameter's index>/<key>"."""
    return {
        f"{index}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for index, memory in optimizer.state_dict()["state"].items()
        for key, value in memory.items()
        if value is not None
    }


def _restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
