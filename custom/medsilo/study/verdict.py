"""The verdict of a comparison, as verdict.json keeps it: every method's score, its difference from the one all are held
against, and whether joining pays; with intervals, and with a name only where the interval allows one."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan
from medsilo.runs.schema import (
    About,
    Differences,
    HospitalGain,
    Level,
    PairedDifference,
    RunOfRow,
    Verdict,
    VerdictRow,
)
from medsilo.study.boundaries import error_at
from medsilo.study.cells import ALONE, Cell, Row, unlike
from medsilo.study.evidence import (
    LEVEL,
    Difference,
    Endpoint,
    Key,
    Scores,
    Variance,
    compare,
    holm,
    joined,
    level,
    luck_of,
    needed,
    seeds_of,
    sensitivity,
)
from medsilo.study.scores import SiteTest
from medsilo.study.words import in_patients, in_points, points

DEFAULT = "fedavg"
LITTLE = 0.02  # a gain that is worth no federation
LIKELY = 0.2  # p-value below which a gain is promising
SEEDS = 3  # with which training's luck is known well enough to say anything
Word = Literal["worth it", "promising", "no gain", "too few patients", "too few seeds"]
Seeds = dict[int, dict[str, Scores]]  # by seed, by site
ENDPOINTS: tuple[Endpoint, ...] = ("mean", "pooled", "worst-site")  # the first is asked; the others explore


def chosen_baseline(rows: Sequence[Row], against: str | None) -> str | None:
    """The row that all are held against: the one that was asked for, else FedAvg where it is among them."""
    names = {row.title for row in rows}
    if against is not None and against not in names:
        raise MedsiloError(f"--against {against!r}: no row has this title; rows: {', '.join(sorted(names))}")
    return against or (DEFAULT if DEFAULT in names else None)


class Statistics:
    """The statistics of a comparison's finished cells."""

    def __init__(self, cells: Sequence[Cell], against: str | None, planned: int | None = None) -> None:
        """planned: the seeds that there will be at most, where the answer may come before."""
        self.planned = planned
        self.plan = cells[0].plan
        self.where = f"in mean test {self.plan.task.goal.metric}"
        self.cells = {(cell.row, cell.seed): cell for cell in cells}  # of folds the last: they are alike but for it
        self.rows = list(dict.fromkeys(cell.row for cell in cells))
        self.found: dict[Row, Seeds] = {row: {} for row in self.rows}
        for row, seed in self.cells:
            if scores := _scores_of([cell for cell in cells if (cell.row, cell.seed) == (row, seed)]):
                self.found[row][seed] = scores
        self.against = chosen_baseline(self.rows, against)
        self.base = {row: self._kin(row, lambda other: other.title == self.against) for row in self.rows}
        alone = {row: self._kin(row, lambda other: other.method == ALONE) for row in self.rows if row.federated}
        self.alone = {row: own for row, own in alone.items() if own and not self._unlike(row, own)}

    def verdict(self, about: About, runs: Sequence[RunOfRow]) -> Verdict:
        """Return all of it, as verdict.json has it."""
        plan = self.plan
        sites = sorted({site for seeds in self.found.values() for scores in seeds.values() for site in scores})
        found = {endpoint: self._differences(self.base, endpoint=endpoint) for endpoint in ENDPOINTS}
        differences = {endpoint: _tested(own, self._error) for endpoint, own in found.items()}
        at_site = {site: _tested(self._differences(self.base, [site]), self._error) for site in sites}
        found_at = {site: self._differences(self.alone, [site]) for site in sites}
        first, joining = self._first(), self._joined(found_at)
        between = self.sentence(differences["mean"])
        seen = sensitivity([one for row, one in found["mean"].items() if row.federated])
        rows = []
        for row in self.rows:
            entry = VerdictRow(
                title=row.title,
                method=row.method or self._plan(row).algorithm.name,
                changes=list(row.changes),
                seeds=sorted(self.found[row]),
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
            level=LEVEL,
            single=[site for site in sites if self._is_one_patient(site)],
            against=self.against,
            could_have_seen=seen,
            headline=self._whether_joining_pays(first) or between,
            between=between,
            first=first,
            declared=self._declared.title if self._declared else None,
            gains={site: gain for site in sites if (gain := self._gain(site, found_at, joining[site]))},
            rows=rows,
            planned=self.planned,
            about=about,
            runs=list(runs),
        )

    @cached_property
    def _error(self) -> float:
        """The p-value below which a difference is sure, with as many seeds as all rows that are asked about have."""
        asked = [self._declared, self.alone[self._declared]] if self._declared else self.rows
        return error_at(min(len(self.found[row]) for row in asked), self.planned)

    def _is_one_patient(self, site: str) -> bool:
        known = [scores[site] for seeds in self.found.values() for scores in seeds.values() if site in scores]
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
        for seed in sorted(self.found[row].keys() & self.found[base].keys()):
            one, other = self.cells[row, seed].plan, self.cells[base, seed].plan
            if one.task.tests_as(other.task) and one.participation.sites == other.participation.sites:
                yield seed

    def _plan(self, row: Row) -> Plan:
        return next(cell.plan for (of, _), cell in self.cells.items() if of == row)

    def _unlike(self, row: Row, base: Row) -> str | None:
        return unlike(self._plan(row), self._plan(base))

    def _difference(
        self,
        row: Row,
        base: Row,
        sites: Sequence[str] | None = None,
        endpoint: Endpoint = "mean",
        luck: Variance | None = None,
    ) -> Difference | None:
        seeds = list(self._pairs(row, base))
        mine, theirs = ([self.found[each][seed] for seed in seeds] for each in (row, base))
        names = sites or sorted({site for own in mine for site in own})
        whole = bool(seeds) and all(set(names) <= own.keys() for own in [*mine, *theirs])
        return compare(mine, theirs, names, endpoint=endpoint, luck=luck, error=self._error) if whole else None

    def _luck(
        self, base: Row, rows: Sequence[Row], sites: Sequence[str] | None, endpoint: Endpoint
    ) -> dict[Row, Variance]:
        """One seed's variance of each row's difference from the base, as all rows with the base's seeds tell it."""
        seeds = sorted(self.found[base])
        alike = [base, *(row for row in rows if list(self._pairs(row, base)) == seeds)]
        names = sites or sorted({site for own in self.found[base].values() for site in own})
        whole = all(set(names) <= self.found[row][seed].keys() for row in alike for seed in seeds)
        if len(seeds) < 2 or len(alike) < 3 or not names or not whole:
            return {}
        scores = np.array([seeds_of([self.found[row][seed] for seed in seeds], names, endpoint) for row in alike])
        return {row: luck for row, luck in zip(alike, luck_of(scores, 0), strict=True) if luck}

    def _differences(
        self, pairs: Mapping[Row, Row | None], sites: Sequence[str] | None = None, endpoint: Endpoint = "mean"
    ) -> dict[Row, Difference]:
        """Each row's difference from its base; what is known of training's luck is known from all of them."""
        found = {}
        for base in dict.fromkeys(base for base in pairs.values() if base):
            rows = [row for row, own in pairs.items() if own == base]
            luck = self._luck(base, rows, sites, endpoint)
            for row in rows:
                if difference := self._difference(row, base, sites, endpoint, luck.get(row)):
                    found[row] = difference
        return found

    def _score(self, row: Row, sites: Sequence[str] | None = None, endpoint: Endpoint = "mean") -> Level | None:
        """The mean over seeds, its standard deviation, and the interval; no score lies beyond 0 and 1."""
        seeds = list(self.found[row].values())
        names = sites or sorted({site for own in seeds for site in own})
        if not seeds or not names or not all(set(names) <= own.keys() for own in seeds):
            return None
        found = level(seeds, names, endpoint=endpoint)
        each = seeds_of(seeds, names, endpoint).tolist()
        spread = statistics.stdev(each) if len(each) > 1 else None
        return Level(mean=found.mean, sd=spread, low=max(found.low, 0.0), high=min(found.high, 1.0), by_seed=each)

    @cached_property
    def _declared(self) -> Row | None:
        """The federation of which it is asked first, before anything is known, whether joining pays: the row that all
        are held against, or the only one."""
        named = [row for row in self.alone if row.title == self.against or len(self.alone) == 1]
        return named[0] if named else None

    def _first(self) -> PairedDifference | None:
        """Return the answer to the first question, over all sites: one test, so nothing is to be corrected."""
        found = self._differences(self.alone).get(self._declared) if self._declared else None
        return _tested({"first": found}, self._error)["first"] if found else None

    def _joined(self, found_at: Mapping[str, Mapping[Row, Difference]]) -> dict[str, dict[Row, PairedDifference]]:
        """By site: what joining brings. The declared federation is tested at each site, corrected for the sites alone;
        all others are corrected for each other."""
        found = {(site, row): one for site, own in found_at.items() for row, one in own.items()}
        first = _tested({key: one for key, one in found.items() if key[1] == self._declared}, self._error)
        tested = first | _tested({key: one for key, one in found.items() if key not in first}, self._error)
        return {site: {row: tested[at, row] for at, row in found if at == site} for site in found_at}

    def _gain(
        self, site: str, found_at: Mapping[str, Mapping[Row, Difference]], tested: Mapping[Row, PairedDifference]
    ) -> HospitalGain | None:
        """Return the verdict on joining at a site: of the declared federation, else of the one that is likeliest."""
        asked = {row: one for row, one in tested.items() if self._declared in (None, row)}
        if not asked:
            return None
        row = min(asked, key=lambda each: (asked[each].adjusted, -asked[each].mean))
        gain, found = asked[row], found_at[site][row]
        patients = next(scores[site] for scores in self.found[row].values()).people
        what, number = needed(found, patients, max(gain.mean, LITTLE), self._error / len(found_at))
        word: Word = "too few seeds" if what == "seeds" else "too few patients"
        if gain.sure and gain.mean > 0:
            word, number = "worth it", None
        elif gain.seeds == 1:
            word, number = "too few seeds", SEEDS
        elif gain.high <= LITTLE:
            word, number = "no gain", None
        elif gain.mean > 0 and gain.p < LIKELY:
            word = "promising"
        return HospitalGain(word=word, method=row.title, gain=gain, patients=patients, needed=number)

    # ------------------------------------------------------------------ in words
    def _whether_joining_pays(self, first: PairedDifference | None) -> str:
        if first is None or self._declared is None:
            return ""
        gain = f"with {self._declared.title}, {self.where.removeprefix('in ')} is {points(abs(first.mean))[1:]} points "
        gain += f"{'higher' if first.mean > 0 else 'lower'} than with training alone"
        after = f", after {first.seeds} of at most {self.planned} seeds" if self.planned else ""
        interval = f"95 % interval {points(first.low)} to {points(first.high)}{after}"
        if first.sure:
            of = in_patients(self.plan.task.goal.metric, first.mean)
            answer = "Yes, joining pays" if first.mean > 0 else "No, joining costs"
            return f"{answer}: {gain} ({interval}){f': {of}' if of else ''}."
        why = "These runs cannot tell such a difference from chance"
        if first.seeds == 1:
            why = "There is one seed, so training's luck is not known"
        return f"It is open whether joining pays: {gain} ({interval}). {why}."

    def sentence(self, differences: Mapping[Row, PairedDifference]) -> str:
        """Return which methods are surely better than the row that all are held against."""
        held = {row: found for row, found in differences.items() if row.federated}
        if self.against is None:
            return "No row is named to hold the others against, so nothing is tested; see --against."
        if not held:
            none = f"No other federated method has a finished run on {self.against}'s test cases."
            return "" if self._declared else none
        if all(found.seeds == 1 for found in held.values()):
            return "One seed says nothing about the luck of training, so no winner is named; repeat with --seeds 0,1,2."
        ahead = [row for row, found in held.items() if found.sure and found.mean > 0]
        ahead.sort(key=lambda row: -held[row].mean)
        rest = self._also(differences, ahead) + self._other_norms(held)
        if not ahead:
            return (
                f"No federated method is surely better than {self.against} {self.where}: no interval stays "
                f"above zero after correction for {len(differences)} comparisons.{rest}"
            )
        listed = "; ".join(f"{row.title} by {in_points(held[row])}" for row in ahead)
        text = f"Better than {self.against} {self.where}: {listed}.{rest}"
        rivals = {row: self._difference(ahead[0], row) for row in held if row != ahead[0]}
        tested = _tested({row: difference for row, difference in rivals.items() if difference})
        if sum(one.sure and one.mean > 0 for one in tested.values()) < len(rivals):
            return f"{text} {ahead[0].title} is not surely better than every other, so none is named the best."
        return text

    @staticmethod
    def _also(differences: Mapping[Row, PairedDifference], said: Sequence[Row]) -> str:
        """Return what else is surely higher or lower: methods that lose, and what is no federation."""
        higher = [row.title for row, one in differences.items() if one.sure and one.mean > 0 and row not in said]
        lower = [row.title for row, one in differences.items() if one.sure and one.mean < 0]
        found = {"Surely higher, but no federation": higher, "Surely lower": lower}
        return "".join(f" {words}: {', '.join(titles)}." for words, titles in found.items() if titles)

    def _other_norms(self, held: Mapping[Row, PairedDifference]) -> str:
        """Rows whose networks have another norm than the base's: what they gain may be the norm's."""
        told = {row.title: words for row in held if (base := self.base[row]) and (words := self._unlike(row, base))}
        return "".join(
            f" {title} differs from {self.against} in more than the method: {w}." for title, w in told.items()
        )


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


def _tested(found: Mapping[Key, Difference], error: float = 1 - LEVEL) -> dict[Key, PairedDifference]:
    """Differences with their p-values corrected for all of them; error: below which they are sure."""
    adjusted = holm({key: difference.p for key, difference in found.items()})
    return {
        key: PairedDifference(
            mean=difference.mean,
            low=max(difference.low, -1.0),  # no difference of scores lies beyond
            high=min(difference.high, 1.0),
            p=difference.p,
            seeds=difference.seeds,
            adjusted=adjusted[key],
            sure=difference.decides and adjusted[key] < error,
        )
        for key, difference in found.items()
    }
