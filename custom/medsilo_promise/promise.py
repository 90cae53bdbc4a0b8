"""The layer `promise` of a plan: hospitals tell risk curves, the server tells each what the others' say, and each keeps
a cut of its own."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import Layer, Plan, Refused, files
from medsilo_promise.risks import CUTS, LARGEST, LOST, OF, SIZE, TEMPERATURES, Risk, Structure, calibration, risk_of
from medsilo_promise.shrinking import Values, bound, needed, others, smallest
from medsilo_promise.told import RULES, Kept, KeptCuts, Rule, Told, ToldCurve, ToldOfOthers, ToldTest, panel_of

FILE = "promise.json"  # in a run's folder and a site's
CURVES = "promise-curves.json"  # in a site's alone, where it stays
BROAD = 8  # cuts from one that is told of patients to the next
EVERYONE, NOTHING = "all", np.zeros(CUTS)
MOST_GROUPS = 8
MOST_BYTES = 1 << 20  # of a file


class PromiseLayer(Layer):
    """The promise to which predictions hold at every hospital: its own cut, calibrated on validation cases."""

    name: Literal["promise"] = "promise"
    level: float = Field(
        0.9, ge=0.5, le=0.999, description="share of cases that keep it, or of a structure that is found"
    )
    confidence: float | None = Field(
        0.9,
        ge=0.5,
        le=0.999,
        description="how often a calibration keeps the level; `null`: the level holds on average over calibrations "
        "(conformal prediction)",
    )
    of: Literal["finding"] | None = Field(
        None, description="`finding`: sensitivity for the second of two labels; `null`: the task's own kind"
    )
    rule: Rule = Field(
        "shrunk", description="whose cases choose the cut that predictions use; with `local` no risk curve leaves"
    )
    group: str | None = Field(
        None,
        description="a column with levels, each with a promise of its own, for example `sex`: of a table, or of the "
        "table beside images or recordings (there `data.columns.group`)",
    )
    levels: tuple[str, ...] = Field((), description="of a group beside images or recordings: all that there are")

    @property
    def risk(self) -> float:
        """Return what may be lost."""
        return round(1 - self.level, 6)

    files: ClassVar[tuple[str, ...]] = (FILE,)

    def _risk(self, goal: Any) -> Risk:
        """Return the promise for a goal: `conflicts` refuses a plan whose goal has none."""
        risk = risk_of(goal, self.of)
        assert risk
        return risk

    # ------------------------------------------------------------------ plan and leak report
    def conflicts(self, plan: Plan, networks: Any) -> Iterable[str]:
        goal = plan.task.goal
        if risk_of(goal, self.of) is None:
            yield f"layers: promise: task {plan.task.name} has no promise of {self.of or 'its kind'}; leave 'of' out"
        if plan.privacy:
            yield "layers: promise: a curve has no price in ε yet; leave privacy or the promise out"
        if plan.algorithm.pooled:
            yield f"layers: promise: {plan.algorithm.name} has no hospitals of their own; leave it out"
        if self.shares and plan.transport.sealed:
            yield "layers: promise: a sum of risk curves does not say how far hospitals differ; set rule: local"
        if sum(layer.name == self.name for layer in plan.layers) > 1:
            yield "layers: promise: it is given twice; keep one"
        if (self.group or self.levels) and not 2 <= len({*self.groups(plan.task)}) <= MOST_GROUPS:
            yield (
                f"layers: promise: {self.group!r} is no column of the task with 2 to {MOST_GROUPS} levels; name one, "
                "or give the levels of one beside images"
            )

    def cautions(self, plan: Plan) -> Iterable[str]:
        few = needed(self.risk, self.confidence)
        yield (
            f"promise of {self.level:g}: a hospital alone needs {few} validation patients for it; a promise is for "
            "patients like those of its validation part, and each of them counts alike"
        )

    def leaves(self, plan: Plan) -> Iterable[str]:
        asked = self.asks(plan)
        if not self.shares and self._calibrates(plan):
            yield "Before the test: for the promise, one of 13 temperatures: one answer over validation cases."
        if self.shares:
            yield (
                f"Before the test: for the promise, the mean risk of validation cases at {CUTS} cuts of the answer (of "
                f"patients at {CUTS // BROAD} of them, in steps as scores are, rounded up) and the number of patients"
                + (", and one of 13 temperatures" if self._calibrates(plan) else "")
                + (f", for each level of {self.group}" if self.group else "")
                + f"; {asked['validation']} answers over validation cases, whatever level is promised."
            )
        yield (
            f"With the test: what test cases lose at the cuts of three rules, and how large answers are: "
            f"{asked['test']} answers over test cases. The hospital's own cut stays."
        )

    def asks(self, plan: Plan) -> Mapping[str, int]:
        groups, calibrates = len(self.groups(plan.task)), self._calibrates(plan)
        return {"validation": groups * self.shares + calibrates, "test": len(RULES) * groups + 2 * calibrates}

    @property
    def shares(self) -> bool:
        """Return whether risk curves leave: for a cut of its own a hospital needs nobody's."""
        return self.rule != "local"

    def _calibrates(self, plan: Plan) -> bool:
        return bool(plan.task.goal.classifies)

    def groups(self, task: Any) -> list[str]:
        """Return the names of the groups that have a promise each."""
        if self.group is None:
            return [EVERYONE]
        return [name.removeprefix(f"{self.group} = ") for name in self._inputs(task)] or list(self.levels)

    def _inputs(self, task: Any) -> list[str]:
        return [name for name in getattr(task, "input_names", ()) if name.startswith(f"{self.group} = ")]

    def _group_of(self, task: Any, inputs: Tensor) -> Tensor:
        """Return the number of each case's group, by its inputs; -1 where its level is not known."""
        levels = inputs[:, [list(task.input_names).index(name) for name in self._inputs(task)]]
        return torch.where(levels.amax(1) > 0.5, levels.argmax(1), -1).cpu()

    # ------------------------------------------------------------------ at a site
    def look(self, finished: Any, chosen: Any) -> Any:
        risk = self._risk(finished.task.goal)
        measures = finished.look(lambda output, target: _measured(risk, output, target))
        tables = self._tables(finished, measures) if measures else {}
        if finished.part == "validation":
            own: dict[str, Any] = {name: {"numbers": n, "lost": lost.tolist()} for name, (n, lost, _) in tables.items()}
            nll = measures.get("nll")
            coolest = None if nll is None else int(nll.mean(0).argmin())
            files.write_json(finished.folder / CURVES, {"groups": own, "temperature": coolest})
            return {"tables": tables, "temperature": coolest, "whole": finished.task.mixes_patients}
        return self._kept(finished, measures, tables, chosen)

    def _group_of_each(self, finished: Any) -> Tensor:
        """Return the number of each case's group; -1 where its level is not known."""
        cases = finished.cases
        if self.group is None:
            return torch.zeros(len(cases), dtype=torch.int64)
        if self._inputs(finished.task):
            return self._group_of(finished.task, torch.stack([cases[case][0] for case in range(len(cases))]))
        own = getattr(cases, "groups", [""] * len(cases))
        return torch.tensor([self.levels.index(level) if level in self.levels else -1 for level in own])

    def _tables(self, finished: Any, measures: dict[str, Tensor]) -> dict[str, tuple[int, Tensor, Tensor]]:
        """Return, by group, the patients, what they lose together, and their mean size: every patient counts alike."""
        patients: Sequence[Any] = finished.patients
        if finished.task.mixes_patients:  # the site is a person, and promises something of this person's cases
            patients = range(len(finished.patients))
        numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
        place = torch.tensor([numbers[patient] for patient in patients])
        found, group = {}, self._group_of_each(finished)
        every = [measures[OF], torch.ones(len(place), dtype=torch.float64), measures[LOST], measures[SIZE]]
        for number, name in enumerate(self.groups(finished.task)):
            chosen = group == number
            of, cases, lost, size = (  # of each patient
                values.new_zeros(len(numbers), *values.shape[1:]).index_add_(0, place[chosen], values[chosen])
                for values in every
            )
            lost = lost[of > 0] / of[of > 0, None]
            size = size[cases > 0] / cases[cases > 0, None]
            found[name] = (len(lost), lost.sum(0), size.mean(0) if len(size) else torch.zeros(CUTS))
        return found

    def _kept(
        self, finished: Any, measures: dict[str, Tensor], tables: dict[str, tuple[int, Tensor, Tensor]], chosen: Any
    ) -> dict[str, Any]:
        """Choose this hospital's cuts, keep them, and return what they do to the test cases."""
        own = _read(finished.folder / CURVES)
        groups = own.get("groups", {})
        cuts = {name: self._cuts(groups.get(name), ToldOfOthers.received(one)) for name, one in (chosen or {}).items()}
        patients = {name: int(groups.get(name, {}).get("numbers", 0)) for name in cuts}
        files.write_json(finished.folder / FILE, {"promise": self.model_dump(mode="json"), "cuts": cuts})
        rules = {
            name: {rule: None if cut is None else (n, float(lost[cut]), float(size[cut])) for rule, cut in each.items()}
            for name, each in cuts.items()
            for n, lost, size in [tables[name]]
        }
        errors, warmth = None, own.get("temperature")
        if "sure" in measures and warmth is not None:
            errors = [_error(measures, len(TEMPERATURES) // 2), _error(measures, warmth)]
        whole = finished.task.mixes_patients
        return {"tables": tables, "calibrated": patients, "rules": rules, "errors": errors, "whole": whole}

    def _cuts(self, own: Any, told: ToldOfOthers) -> dict[str, int | None]:
        """Return the cut of every rule; None where it can promise nothing."""
        lost, patients = (np.array(own["lost"]), own["numbers"]) if own else (np.zeros(CUTS), 0)
        means = np.array(told.means)
        shrunk = self._cut(lost, patients, told.strength * means, told.strength * (1 - means))
        return {"shrunk": shrunk, "pooled": told.pooled, "local": self._cut(lost, patients)}

    def _cut(self, lost: Values, patients: float, a: Values = NOTHING, b: Values = NOTHING) -> int | None:
        """Return the cut that keeps the promise. lost: by patients together; a, b: what those of others tell."""
        return smallest(bound(lost, patients, a, b, self.confidence), self.risk)

    def tells(self, part: str, found: Any, resolution: Any, least: int) -> Any:
        tables = {name: own for name, own in found["tables"].items() if own[0] >= least}
        if not tables:
            return None
        # Every patient counts alike; where the site is one, its share is the whole.
        finest = {
            name: replace(resolution, weight=1.0 if found["whole"] else 1 / own[0]) for name, own in tables.items()
        }
        if part == "validation":
            shared = tables if self.shares else {}
            curves = {name: _coarse(n, lost, finest[name]) for name, (n, lost, _) in shared.items()}
            return Told(curves=curves, temperature=found["temperature"]).model_dump(mode="json")
        tests = {
            name: ToldTest(
                calibrated=resolution.count(found["calibrated"][name]),
                patients=resolution.count(tables[name][0]),
                rules={rule: _as_kept(one, finest[name]) for rule, one in rules.items()},
            )
            for name, rules in found["rules"].items()
            if name in tables
        }
        errors = found["errors"] and [resolution.mean(error, 0, 1) for error in found["errors"]]
        return Told(tests=tests, errors=errors).model_dump(mode="json")

    # ------------------------------------------------------------------ at the server
    def read(self, part: str, told: Any, plan: Plan, cases: int) -> Told:
        read, groups = Told.received(told), self.groups(plan.task)
        wrong = (read.tests or read.errors) if part == "validation" else (read.curves or read.temperature)
        if wrong or not {*read.curves, *read.tests} <= {*groups}:
            raise Refused("promise: it tells of groups or parts that nobody asked for")
        if read.curves and not self.shares:
            raise Refused("promise: it tells a risk curve, for which nobody asked")
        told_of: list[ToldCurve | ToldTest] = [*read.curves.values(), *read.tests.values()]
        for one in told_of:
            if one.patients > cases:
                raise Refused(f"promise: it tells of {one.patients} patients, and has {cases} cases")
        for curve in read.curves.values():
            if any(later > earlier + 1e-9 for earlier, later in zip(curve.risks, curve.risks[1:], strict=False)):
                raise Refused("promise: its risk rises with the cut, which none does")
            if curve.risks[-1] != 0:
                raise Refused("promise: its risk is not 0 where nothing is left out")
        return read

    def choose(self, plan: Plan, told: Mapping[str, Told], sites: Sequence[str]) -> Mapping[str, Any]:
        chosen: dict[str, dict[str, Any]] = {site: {} for site in [*sites, EVERYONE]}
        for group in self.groups(plan.task):
            curves = {site: own.curves[group] for site, own in told.items() if group in own.curves}
            numbers = np.array([curve.patients for curve in curves.values()], dtype=np.float64)
            lost = np.array([curve.risks for curve in curves.values()]).reshape(-1, CUTS) * numbers[:, None]
            strengths, means = others(lost, numbers, self.risk)
            pooled = self._cut(lost.sum(0), float(numbers.sum())) if curves else None
            for site, own in chosen.items():
                place = list(curves).index(site) if site in curves else -1
                own[group] = ToldOfOthers(
                    strength=float(strengths[place]), means=means[place].clip(0, 1).tolist(), pooled=pooled
                ).model_dump(mode="json")
        return chosen

    def concluded(self, plan: Plan, folder: Path, told: Mapping[Any, Mapping[str, Told]]) -> Any:
        everyone = self.choose(plan, told["validation"], [])[EVERYONE]
        cuts = {group: self._cuts(None, ToldOfOthers.received(own)) for group, own in everyone.items()}
        # For a hospital that is new:
        files.write_json(folder / FILE, {"promise": self.model_dump(mode="json"), "cuts": cuts})
        risk = self._risk(plan.task.goal)
        return {
            "level": self.level,
            "confidence": self.confidence,
            "rule": self.rule,
            "says": risk.says,
            "sized": risk.sized,
            "needed": needed(self.risk, self.confidence),
            "strength": {group: own["strength"] for group, own in everyone.items()},
            "sites": {site: one.model_dump(mode="json")["tests"] for site, one in told["test"].items()},
            "temperatures": {
                site: round(float(TEMPERATURES[one.temperature]), 3)
                for site, one in told["validation"].items()
                if one.temperature is not None
            },
            "errors": {site: one.errors for site, one in told["test"].items() if one.errors},
        }

    @classmethod
    def panel(cls, runs: Sequence[Any]) -> Any:
        return panel_of(runs)

    # ------------------------------------------------------------------ predictions
    def says(self, plan: Plan, output: Tensor, inputs: Tensor, folders: Sequence[Path]) -> Sequence[dict[str, Any]]:
        risk, cuts = self._risk(plan.task.goal), self._cuts_of(plan, inputs, folders)
        rows = risk.columns(output, [CUTS - 1 if cut is None else cut for cut in cuts])
        none = {"promised": self._none}
        return [none if cut is None else {"promised": self.level, **row} for cut, row in zip(cuts, rows, strict=True)]

    def kept(
        self, plan: Plan, output: Tensor, target: Tensor, inputs: Tensor, folders: Sequence[Path]
    ) -> Tensor | None:
        cuts = self._cuts_of(plan, inputs, folders)
        if None in cuts:
            return None
        found = self._risk(plan.task.goal).measure(output, target)
        places = torch.tensor(cuts, device=found[LOST].device)[:, None]
        lost, whole = found[LOST].double().gather(1, places)[:, 0], found[OF].double()
        return torch.where(whole > 0, 1 - lost / whole.clamp(min=1), torch.nan)

    def _cuts_of(self, plan: Plan, inputs: Tensor, folders: Sequence[Path]) -> list[int | None]:
        """Return each case's cut; None where nothing is promised."""
        kept, names = self._kept_in(folders), self.groups(plan.task)
        if not self._inputs(plan.task):  # an image does not tell its group
            return [self._widest(plan, kept)] * len(inputs)
        return [kept.get(names[group]) if group >= 0 else None for group in self._group_of(plan.task, inputs).tolist()]

    def marks(self, plan: Plan, output: Tensor, folders: Sequence[Path]) -> Tensor | None:
        risk, cut = self._risk(plan.task.goal), self._widest(plan, self._kept_in(folders))
        return risk.marked(output, cut) if isinstance(risk, Structure) and cut is not None else None

    def _widest(self, plan: Plan, kept: dict[str, int | None]) -> int | None:
        """Return the cut that holds for every group; None where one has none."""
        cuts = [kept.get(name) for name in self.groups(plan.task)]
        return None if None in cuts else max(cut for cut in cuts if cut is not None)

    def _kept_in(self, folders: Sequence[Path]) -> dict[str, int | None]:
        """Return the cut of every group: the hospital's own, or else that for a new one."""
        for folder in folders:
            if found := _read(folder / FILE):
                kept = KeptCuts.received(found)
                if PromiseLayer().model_dump(mode="json") | kept.promise == self.model_dump(mode="json"):
                    return {group: rules.get(self.rule) for group, rules in kept.cuts.items()}
        return {}

    @property
    def _none(self) -> str:
        return f"no promise can be made: {needed(self.risk, self.confidence)} validation patients are needed"

    def card(self, plan: Plan, folders: Sequence[Path]) -> Sequence[str]:
        sure = f"with confidence {self.confidence:g}" if self.confidence else "on average over calibrations"
        without = [group for group, cut in self._kept_in(folders).items() if cut is None]
        return [
            f"At level {self.level:g}, {sure}: {self._risk(plan.task.goal).says}.",
            "It is for patients like those who were calibrated on. 'medsilo predict' keeps it.",
            *(f"For {group}: {self._none}." for group in without),
        ]


def _measured(risk: Risk, output: Tensor, target: Tensor) -> dict[str, Tensor]:
    beside = calibration(risk.goal, output, target) if risk.goal.classifies else {}
    return {**risk.measure(output, target), **beside}


def _coarse(patients: int, lost: Tensor, resolution: Any) -> ToldCurve:
    """Return a curve as it is told: of patients at few cuts, where the one before holds until the next; rounded up."""
    risks = lost / patients
    if resolution.exact:
        return ToldCurve(patients=patients, risks=risks.tolist())
    step = resolution.step(0, 1)
    told = [resolution.mean(min(1.0, float(risks[cut - cut % BROAD]) + step * 0.499), 0, 1) for cut in range(CUTS)]
    return ToldCurve(patients=resolution.count(patients), risks=[*told[:-1], 0.0])


def _as_kept(found: tuple[int, float, float] | None, resolution: Any) -> Kept:
    if found is None:
        return Kept(promised=False, lost=None, size=None)
    patients, lost, size = found
    return Kept(promised=True, lost=resolution.mean(lost / patients, 0, 1), size=resolution.mean(size, 0, LARGEST))


def _error(measures: dict[str, Tensor], place: int) -> float:
    """Return the expected calibration error of what is most probable, in ten places of its probability."""
    sure, right = measures["sure"][:, place], measures["right"]
    places = (sure * 10).long().clamp(max=9)
    apart = torch.zeros(10, dtype=torch.float64).index_add_(0, places, right - sure)
    return float(apart.abs().sum() / len(sure))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(files.read_bounded(path, MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
