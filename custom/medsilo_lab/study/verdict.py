"""The verdict of a comparison, as verdict.json keeps it: every method's score, its difference from the one all are held
against, and whether federated training helps; with intervals, and with a name only where the interval allows one."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan
from medsilo_lab.study.cells import ALONE, Cell, Row, unlike
from medsilo_lab.study.detectable import needed
from medsilo_lab.study.evidence import (
    LEAST_SEEDS,
    LEVEL,
    Difference,
    Endpoint,
    Key,
    Scores,
    Variance,
    compare,
    errors_of,
    holm,
    joined,
    level,
    seeds_of,
)
from medsilo_lab.study.scores import SiteTest
from medsilo_lab.study.training_luck import luck_of
from medsilo_lab.study.verdict_file import (
    About,
    Differences,
    HospitalGain,
    Level,
    Needed,
    PairedDifference,
    RunOfRow,
    Verdict,
    VerdictRow,
)
from medsilo_lab.study.words import LITTLE, evidence_of, in_patients, in_points, points, repetitions

DEFAULT = "fedavg"
Seeds = dict[int, dict[str, Scores]]  # by seed, by site
ENDPOINTS: tuple[Endpoint, ...] = ("mean", "pooled", "worst-site")  # the first is asked; the others explore


class PairQuestion(NamedTuple):
    """A row compared with another one, at these sites. Asked the other way round it has the same answer."""

    row: Row
    base: Row
    sites: tuple[str, ...]
    endpoint: Endpoint

    @property
    def reversed(self) -> "PairQuestion":
        return self._replace(row=self.base, base=self.row)


def chosen_baseline(rows: Sequence[Row], against: str | None) -> str | None:
    """The row that all are held against: the one that was asked for, else FedAvg where it is among them."""
    names = {row.title for row in rows}
    if against is not None and against not in names:
        raise MedsiloError(f"--baseline {against!r}: no row has this title; rows: {', '.join(sorted(names))}")
    return against or (DEFAULT if DEFAULT in names else None)


class Statistics:
    """The statistics of a comparison's finished cells."""

    def __init__(self, cells: Sequence[Cell], against: str | None) -> None:
        self.plan = cells[0].plan
        self.where = f"in mean test {self.plan.task.goal.metric}"
        self.cells = {(cell.row, cell.seed): cell for cell in cells}  # of folds the last: they are alike but for it
        self.rows = list(dict.fromkeys(cell.row for cell in cells))
        self.scores: dict[Row, Seeds] = {row: {} for row in self.rows}
        for row, seed in self.cells:
            if scores := _scores_of([cell for cell in cells if (cell.row, cell.seed) == (row, seed)]):
                self.scores[row][seed] = scores
        self.against = chosen_baseline(self.rows, against)
        self.base = {row: self._kin(row, lambda other: other.title == self.against) for row in self.rows}
        alone = {row: self._kin(row, lambda other: other.method == ALONE) for row in self.rows if row.federated}
        self.alone = {row: own for row, own in alone.items() if own and not self._unlike(row, own)}
        self._known: dict[PairQuestion, Difference | None] = {}
        self._answers: dict[PairQuestion, PairedDifference] = {}

    def verdict(self, about: About, runs: Sequence[RunOfRow]) -> Verdict:
        """Return all of it, as verdict.json has it."""
        plan = self.plan
        self._known, self._answers = {}, {}
        sites = sorted({site for seeds in self.scores.values() for scores in seeds.values() for site in scores})
        first, joining = self._first(), self._joined(sites)
        differences = {endpoint: self._answered(self._questions(self.base, None, endpoint)) for endpoint in ENDPOINTS}
        at_site = {site: self._answered(self._questions(self.base, [site])) for site in sites}
        between = self.sentence(differences["mean"])
        rows = []
        for row in self.rows:
            entry = VerdictRow(
                title=row.title,
                method=row.method or self._plan(row).algorithm.name,
                changes=list(row.changes),
                seeds=sorted(self.scores[row]),
                score=self._score(row),
                pooled=self._score(row, endpoint="pooled"),
                sites={site: self._score(row, [site]) for site in sites},
                against=base.title if (base := self.base[row]) else None,
                unlike=self._unlike(row, base) if base else None,
                difference=Differences(
                    mean=differences["mean"].get(row),
                    pooled=differences["pooled"].get(row),
                    worst=differences["worst-site"].get(row),
                    sites={site: at_site[site].get(row) for site in sites},
                ),
                joining={site: joining[site].get(row) for site in sites},
            )
            rows.append(entry)
        return Verdict(
            task=plan.task.name,
            task_title=plan.task.title,
            synthetic=plan.task.synthetic,
            metric=plan.task.goal.metric,
            network=plan.network.name,
            seeds=sorted({seed for _, seed in self.cells}),
            folds=plan.task.fold.of if plan.task.fold else None,
            sites=sites,
            patients={site: number for site in sites if (number := self._patients(site))},
            level=LEVEL,
            single=[site for site in sites if self._is_one_patient(site)],
            against=self.against,
            headline=self._whether_it_helps(first) or between,
            between=between,
            first=first,
            declared=self._declared.title if self._declared else None,
            gains={site: gain for site in sites if (gain := self._gain(site, joining[site], len(sites)))},
            rows=rows,
            about=about,
            runs=list(runs),
        )

    def _patients(self, site: str) -> int | None:
        known = [scores[site].people for seeds in self.scores.values() for scores in seeds.values() if site in scores]
        return min(known, default=None)

    def _is_one_patient(self, site: str) -> bool:
        known = [scores[site] for seeds in self.scores.values() for scores in seeds.values() if site in scores]
        return not any(own.patients.any() for own in known)

    # ------------------------------------------------------------------ what is held against what
    def _kin(self, row: Row, is_base: Callable[[Row], bool]) -> Row | None:
        """The baseline, the one of the same norm if there is one."""
        bases = [other for other in self.rows if is_base(other)]
        if row in bases:
            return None
        alike = [other for other in bases if not self._unlike(row, other)] or bases
        return alike[0] if alike and alike[0] != row else None

    def _pairs(self, row: Row, base: Row) -> Iterator[int]:
        """The seeds in which both were tested on the same cases."""
        for seed in sorted(self.scores[row].keys() & self.scores[base].keys()):
            one, other = self.cells[row, seed].plan, self.cells[base, seed].plan
            if one.task.tests_as(other.task) and one.participation.sites == other.participation.sites:
                yield seed

    def _plan(self, row: Row) -> Plan:
        return next(cell.plan for (of, _), cell in self.cells.items() if of == row)

    def _unlike(self, row: Row, base: Row) -> str | None:
        return unlike(self._plan(row), self._plan(base))

    def _sites(self, row: Row, base: Row) -> tuple[str, ...]:
        """The sites at which both were tested."""
        mine, theirs = ({site for own in self.scores[one].values() for site in own} for one in (row, base))
        return tuple(sorted(mine if len(mine) <= len(theirs) else theirs))

    def _questions(
        self, pairs: Mapping[Row, Row | None], sites: Sequence[str] | None = None, endpoint: Endpoint = "mean"
    ) -> dict[Row, PairQuestion]:
        """Return what each row is asked: of one site every endpoint is the same."""
        found = {}
        for row, base in pairs.items():
            if base:
                names = tuple(sites) if sites else self._sites(row, base)
                found[row] = PairQuestion(row, base, names, endpoint if len(names) > 1 else "mean")
        return found

    def _difference(self, question: PairQuestion) -> Difference | None:
        """Return the difference, the same one for every place that shows it."""
        if question not in self._known:
            row, base = question.row, question.base
            held = base in (self.base.get(row), self.alone.get(row)) and self.base.get(base) != row
            if not held and row in (self.base.get(base), self.alone.get(base)):  # it is the other that is held against
                found = self._difference(question.reversed)
                self._known[question] = found.reversed() if found else None
            else:
                self._known[question] = self._compared(question)
        return self._known[question]

    def _compared(self, question: PairQuestion) -> Difference | None:
        row, base, names, endpoint = question
        seeds = list(self._pairs(row, base))
        mine, theirs = ([self.scores[each][seed] for seed in seeds] for each in (row, base))
        whole = bool(seeds) and bool(names) and all(set(names) <= own.keys() for own in [*mine, *theirs])
        if not whole:
            return None
        luck = self._luck(question).get(row)
        return compare(mine, theirs, names, endpoint=endpoint, luck=luck)

    def _luck(self, question: PairQuestion) -> dict[Row, Variance]:
        """One seed's variance of each row's difference from the base, as all rows with the base's seeds tell it."""
        base, names = question.base, question.sites
        held = self.base if self.base.get(question.row) == base else self.alone
        seeds = sorted(self.scores[base])
        alike = [base, *(row for row, own in held.items() if own == base and list(self._pairs(row, base)) == seeds)]
        whole = all(set(names) <= self.scores[row][seed].keys() for row in alike for seed in seeds)
        if len(seeds) < 2 or len(alike) < 3 or not whole:
            return {}
        scores = [seeds_of([self.scores[row][seed] for seed in seeds], names, question.endpoint) for row in alike]
        return {row: luck for row, luck in zip(alike, luck_of(np.array(scores), 0), strict=True) if luck}

    def _answered(self, family: Mapping[Key, PairQuestion]) -> dict[Key, PairedDifference]:
        """Return the answers of questions that are asked together, corrected for all of them. What was asked before,
        either way round, keeps the answer that it has."""
        new = {
            question: one
            for question in family.values()
            if not self._answer(question)
            if (one := self._difference(question))
        }
        self._answers |= _tested(new)
        return {key: answer for key, question in family.items() if (answer := self._answer(question))}

    def _answer(self, question: PairQuestion) -> PairedDifference | None:
        if question in self._answers:
            return self._answers[question]
        other = self._answers.get(question.reversed)
        return _reversed(other) if other else None

    def _score(self, row: Row, sites: Sequence[str] | None = None, endpoint: Endpoint = "mean") -> Level | None:
        """The mean over seeds, its standard deviation, and the interval; no score lies beyond 0 and 1."""
        seeds = list(self.scores[row].values())
        names = sites or sorted({site for own in seeds for site in own})
        if not seeds or not names or not all(set(names) <= own.keys() for own in seeds):
            return None
        found = level(seeds, names, endpoint=endpoint)
        each = seeds_of(seeds, names, endpoint).tolist()
        spread = statistics.stdev(each) if len(each) > 1 else None
        return Level(mean=found.mean, sd=spread, low=max(found.low, 0.0), high=min(found.high, 1.0), by_seed=each)

    @cached_property
    def _declared(self) -> Row | None:
        """The federation of which it is asked first, before anything is known, whether it helps: the row that all
        are held against, or the only one."""
        named = [row for row in self.alone if row.title == self.against or len(self.alone) == 1]
        return named[0] if named else None

    def _first(self) -> PairedDifference | None:
        """Return the answer to the first question, over all sites: one test, so nothing is to be corrected."""
        asked = self._questions({self._declared: self.alone[self._declared]}) if self._declared else {}
        return next(iter(self._answered(asked).values()), None)

    def _joined(self, sites: Sequence[str]) -> dict[str, dict[Row, PairedDifference]]:
        """By site: what joining brings. The declared federation is tested at each site, corrected for the sites alone;
        all others are corrected for each other."""
        asked = {(site, row): one for site in sites for row, one in self._questions(self.alone, [site]).items()}
        told = self._answered({key: one for key, one in asked.items() if key[1] == self._declared})
        told |= self._answered(asked)
        return {site: {row: one for (at, row), one in told.items() if at == site} for site in sites}

    def _gain(self, site: str, answers: Mapping[Row, PairedDifference], sites: int) -> HospitalGain | None:
        """Return the verdict at a site: of the declared federation, else of the one that is likeliest better."""
        asked = {row: one for row, one in answers.items() if self._declared in (None, row)}
        if not asked:
            return None
        row = min(asked, key=lambda each: (asked[each].adjusted, -asked[each].mean))
        gain = asked[row]
        if gain.sure:
            return HospitalGain(word="better" if gain.mean > 0 else "worse", method=row.title, gain=gain)
        found = self._difference(self._questions({row: self.alone[row]}, [site])[row])
        return HospitalGain(word="inconclusive", method=row.title, gain=gain, needed=self._needed(found, sites))

    def _needed(self, found: Difference | None, questions: int) -> Needed | None:
        """Return what would make a verdict of this difference, or of the least one that is worth a federation."""
        if found is None or found.alike or (found.seeds > 1 and not found.patients.variance):
            return None
        if found.seeds < LEAST_SEEDS:
            return Needed(of="seeds", number=LEAST_SEEDS)
        gain = max(abs(found.mean), LITTLE)
        of, number = needed(found, gain, (1 - LEVEL) / questions)
        return Needed(of=of, number=number, difference=gain)

    # ------------------------------------------------------------------ in words
    def _whether_it_helps(self, first: PairedDifference | None) -> str:
        if first is None or self._declared is None:
            return ""
        what, higher = self.where.removeprefix("in "), "higher" if first.mean > 0 else "lower"
        gain = f"{what} is {points(abs(first.mean))[1:]} points {higher} than with single-site training "
        gain += f"({evidence_of(first)})"
        if first.sure:
            of = in_patients(self.plan.task.goal.metric, first.mean)
            answer = f"Federated training with {self._declared.title} is {'better' if first.mean > 0 else 'worse'}"
            return f"{answer}: {gain}{f': {of}' if of else ''}."
        return f"Inconclusive: with {self._declared.title}, {gain}. {self._why(first)}"

    def _why(self, first: PairedDifference) -> str:
        """Return what keeps a verdict back."""
        if first.seeds < LEAST_SEEDS:
            told = f"A verdict needs {repetitions(LEAST_SEEDS)}"
            return f"{told}: fewer do not show how much training differs by chance."
        found = next((self._difference(one) for one, told in self._answers.items() if told is first), None)
        if found and (found.alike or not found.patients.variance):
            return "All repetitions or all patients are alike, so the runs do not show how much others would differ."
        return "Such a difference may be chance."

    def sentence(self, differences: Mapping[Row, PairedDifference]) -> str:
        """Return which methods are better than the row that all are held against."""
        held = {row: found for row, found in differences.items() if row.federated}
        if self.against is None:
            return "No baseline is named, so no method is compared with another; see --baseline."
        if not held:
            none = f"No other federated method has a finished run on {self.against}'s test cases."
            return "" if self._declared else none
        if all(found.seeds < LEAST_SEEDS for found in held.values()):
            told = ",".join(map(str, range(LEAST_SEEDS)))
            return (
                f"Fewer than {repetitions(LEAST_SEEDS)} do not show how much training differs by chance, so no method "
                f"is called better; repeat with --seeds {told}."
            )
        ahead = [row for row, found in held.items() if found.sure and found.mean > 0]
        ahead.sort(key=lambda row: -held[row].mean)
        rest = self._also(differences, ahead)
        if not ahead:
            return (
                f"No federated method is significantly better than {self.against} {self.where}, corrected for "
                f"{len(differences)} comparisons.{rest}"
            )
        listed = "; ".join(f"{row.title} by {in_points(held[row])}" for row in ahead)
        text = f"Better than {self.against} {self.where}: {listed}.{rest}"
        best = ahead[0]
        rivals = [row for row in held if row != best]
        tested = self._answered({one: PairQuestion(best, one, self._sites(best, one), "mean") for one in rivals})
        if sum(one.sure and one.mean > 0 for one in tested.values()) < len(rivals):
            return f"{text} {best.title} is not significantly better than every other, so none is named the best."
        return text

    @staticmethod
    def _also(differences: Mapping[Row, PairedDifference], said: Sequence[Row]) -> str:
        """Return what else is significantly higher or lower: methods that lose, and what is no federation."""
        higher = [row.title for row, one in differences.items() if one.sure and one.mean > 0 and row not in said]
        lower = [row.title for row, one in differences.items() if one.sure and one.mean < 0]
        found = {"Significantly higher, but no federation": higher, "Significantly lower": lower}
        return "".join(f" {words}: {', '.join(titles)}." for words, titles in found.items() if titles)


def _scores_of(folds: Sequence[Cell]) -> dict[str, Scores] | None:
    """A seed's scores by site. Folds are parts of one seed: all have to be finished, and their cases are one test."""
    found = []
    for cell in folds:
        summary = cell.summary()
        if summary is None:
            return None
        found.append({site: SiteTest.read(cell.folder, site, summary.metric).scores for site in summary.telling})
    sites = [site for site in found[0] if all(site in scores for scores in found)]
    return {site: joined([scores[site] for scores in found]) for site in sites}


def _tested(found: Mapping[Key, Difference]) -> dict[Key, PairedDifference]:
    """Differences with their p-values corrected for all of them."""
    p_values = {key: difference.p for key, difference in found.items()}
    error = 1 - LEVEL
    adjusted, errors = holm(p_values), errors_of(p_values, error)
    answers = {}
    for key, difference in found.items():
        sure = difference.decides and adjusted[key] < error
        low, high = difference.low, difference.high
        if errors[key] < error:
            low, high = difference.within(errors[key])
            if difference.decides and not sure:
                low, high = min(low, 0.0), max(high, 0.0)
        answers[key] = PairedDifference(
            mean=difference.mean,
            low=max(difference.low, -1.0),  # no difference of scores lies beyond
            high=min(difference.high, 1.0),
            corrected_low=max(low, -1.0),
            corrected_high=min(high, 1.0),
            p=difference.p,
            seeds=difference.seeds,
            patients=difference.people or None,
            adjusted=adjusted[key],
            sure=sure,
        )
    return answers


def _reversed(one: PairedDifference) -> PairedDifference:
    """Return the same difference the other way round."""
    low, high = one.interval
    return one.changed(mean=-one.mean, low=-one.high, high=-one.low, corrected_low=-high, corrected_high=-low)
