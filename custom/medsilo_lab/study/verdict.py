"""Calculate the contents of verdict.json: scores, differences from the baseline, confidence intervals, and the verdict
whether federated training helps. A method is called better only if the confidence interval of its difference from the
baseline excludes zero.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan
from medsilo_lab.study import subgroups
from medsilo_lab.study.cells import ALONE, Cell, Row, unlike
from medsilo_lab.study.detectable import Design, Pilot
from medsilo_lab.study.evidence import (
    LEAST_PATIENTS,
    LEAST_SEEDS,
    LEVEL,
    Difference,
    Endpoint,
    Key,
    Scores,
    compare,
    errors_of,
    holm,
    joined,
    level,
    seeds_of,
)
from medsilo_lab.study.law import Variance
from medsilo_lab.study.scores import SiteTest
from medsilo_lab.study.subgroup_tables import SubgroupTable
from medsilo_lab.study.training_luck import luck_of
from medsilo_lab.study.verdict_file import (
    About,
    Differences,
    HospitalVerdict,
    Level,
    Needed,
    PairedDifference,
    RunOfRow,
    Verdict,
    VerdictRow,
)
from medsilo_lab.study.words import (
    LITTLE,
    evidence_of,
    if_unseen,
    in_patients,
    in_points,
    needed_in_words,
    points,
    repetitions,
)

DEFAULT = "fedavg"
UNPAIRED = "No verdict: no two configurations have scores of the same hospitals in the same repetitions."
ENOUGH_PATIENTS = 25  # if a hospital has too few test patients for a verdict, pages advise this number of test patients
Seeds = dict[int, dict[str, Scores]]
# the first endpoint is confirmatory, and all other endpoints are exploratory
ENDPOINTS: tuple[Endpoint, ...] = ("mean", "pooled", "worst-site")


class PairQuestion(NamedTuple):
    """Two configurations and some sites: the question is how much the configurations differ at these sites. If the two
    configurations are exchanged, the answer changes its sign.
    """

    row: Row
    base: Row
    sites: tuple[str, ...]
    endpoint: Endpoint

    @property
    def reversed(self) -> "PairQuestion":
        return self._replace(row=self.base, base=self.row)


def chosen_baseline(rows: Sequence[Row], baseline: str | None) -> str | None:
    """Return the title of the baseline. The baseline is the requested configuration; by default it is FedAvg, if the
    comparison contains FedAvg.
    """
    names = {row.title for row in rows}
    if baseline is not None and baseline not in names:
        raise MedsiloError(f"--baseline {baseline!r}: no row has this title; rows: {', '.join(sorted(names))}")
    return baseline or (DEFAULT if DEFAULT in names else None)


class Statistics:
    def __init__(self, cells: Sequence[Cell], baseline: str | None) -> None:
        self.plan = cells[0].plan
        self.where = f"in mean test {self.plan.task.goal.metric}"
        # in cross-validation, `cells` contains only the last fold of each seed
        self.cells = {(cell.row, cell.seed): cell for cell in cells}
        self.rows = list(dict.fromkeys(cell.row for cell in cells))
        self.scores: dict[Row, Seeds] = {row: {} for row in self.rows}
        self.folds: dict[tuple[Row, int], list[Cell]] = {}
        for cell in cells:
            self.folds.setdefault((cell.row, cell.seed), []).append(cell)
        self.odd: list[str] = []  # texts about excluded scores: the run, the site and the reason of the exclusion
        for row, seed in self.cells:
            folds = self.folds[row, seed]
            if scores := _scores_of(folds):
                self.scores[row][seed] = usable(scores)
                lost = sorted(scores.keys() - self.scores[row][seed].keys())
                self.odd += [f"{folds[0].name}: {site} has test scores that are no numbers" for site in lost]
        self.raw = {(cell.row, cell.seed, site) for cell in cells for site in _untrained_at(cell)}
        self.baseline = chosen_baseline(self.rows, baseline)
        self.base = {row: self._kin(row, lambda other: other.title == self.baseline) for row in self.rows}
        alone = {row: self._kin(row, lambda other: other.method == ALONE) for row in self.rows if row.federated}
        self.alone = {row: own for row, own in alone.items() if own and not self._unlike(row, own)}
        self._known: dict[PairQuestion, Difference | None] = {}
        self._answers: dict[PairQuestion, PairedDifference] = {}
        self._lucks: dict[tuple[Row, tuple[str, ...], Endpoint, bool], dict[Row, Variance]] = {}

    def verdict(self, about: About, runs: Sequence[RunOfRow]) -> Verdict:
        plan = self.plan
        self._known, self._answers, self._lucks = {}, {}, {}
        sites = sorted({site for seeds in self.scores.values() for scores in seeds.values() for site in scores})
        first, answers = self._first(), self._joined(sites)
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
                baseline=base.title if (base := self.base[row]) else None,
                unlike=self._unlike(row, base) if base else None,
                difference=Differences(
                    mean=differences["mean"].get(row),
                    pooled=differences["pooled"].get(row),
                    worst=differences["worst-site"].get(row),
                    sites={site: at_site[site].get(row) for site in sites},
                ),
                from_single_site={site: answers[site].get(row) for site in sites},
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
            baseline=self.baseline,
            headline=self._whether_it_helps(first, lacks := self._lacks(first)) or between or UNPAIRED,
            between=between,
            first=first,
            needed=lacks,
            declared=self._declared.title if self._declared else None,
            hospitals={site: found for site in sites if (found := self._at_hospital(site, answers[site], len(sites)))},
            rows=rows,
            subgroups=self._subgroups(),
            about=about,
            runs=list(runs),
        )

    def _subgroups(self) -> list[SubgroupTable]:
        """Return the scores of subgroups for the declared configuration. If no configuration is declared, use the
        baseline; if there is no baseline, use the first federated configuration.
        """
        named = [row for row in self.rows if row.title == self.baseline]
        asked = [self._declared, *named, *(row for row in self.rows if row.federated), *self.rows]
        row = next(row for row in asked if row)
        base = self.alone.get(row) or self.base.get(row)
        seeds = [*self._pairs(row, base)] if base else sorted(self.scores[row])
        study = [self._by_level(row, seed) for seed in seeds]
        if not any(seed.values() for seed in study):
            return []
        base_study = [self._by_level(base, seed) for seed in seeds] if base else []
        return subgroups.of_row(row.title, study, base.title if base else "", base_study)

    def _by_level(self, row: Row, seed: int) -> dict[str, subgroups.Levels]:
        """For each site, return a run's scores at each level of each subgroup. In cross-validation, a level has scores
        only if the site disclosed the level in every fold.
        """
        found: dict[str, subgroups.Levels] = {}
        metric = self.plan.task.goal.metric
        for site in self.scores[row].get(seed, {}):
            folds = [subgroups.level_scores(cell.folder, site, metric) for cell in self.folds[row, seed]]
            found[site] = {
                key: joined(own)
                if len(own := [one for fold in folds if (one := fold.get(key))]) == len(folds)
                else None
                for key in folds[0]
            }
        return found

    def _patients(self, site: str) -> int | None:
        known = [scores[site].people for seeds in self.scores.values() for scores in seeds.values() if site in scores]
        return min(known, default=None)

    def _is_one_patient(self, site: str) -> bool:
        known = [scores[site] for seeds in self.scores.values() for scores in seeds.values() if site in scores]
        return not any(own.patients.any() for own in known)

    # ------------------------------------------------------------------ baselines
    def _kin(self, row: Row, is_base: Callable[[Row], bool]) -> Row | None:
        """Return the baseline with which a configuration is compared. Of several baselines, prefer a baseline with the
        same normalisation layer as the configuration.
        """
        bases = [other for other in self.rows if is_base(other)]
        if row in bases:
            return None
        alike = [other for other in bases if not self._unlike(row, other)] or bases
        return alike[0] if alike and alike[0] != row else None

    def _pairs(self, row: Row, base: Row) -> Iterator[int]:
        """Yield the seeds with which both configurations were tested on the same cases."""
        for seed in sorted(self.scores[row].keys() & self.scores[base].keys()):
            one, other = self.cells[row, seed].plan, self.cells[base, seed].plan
            if one.task.tests_as(other.task) and one.participation.sites == other.participation.sites:
                yield seed

    def _plan(self, row: Row) -> Plan:
        return next(cell.plan for (of, _), cell in self.cells.items() if of == row)

    def _unlike(self, row: Row, base: Row) -> str | None:
        return unlike(self._plan(row), self._plan(base))

    def _sites(self, row: Row, base: Row) -> tuple[str, ...]:
        mine, theirs = ({site for own in self.scores[one].values() for site in own} for one in (row, base))
        return tuple(sorted(mine if len(mine) <= len(theirs) else theirs))

    def _questions(
        self, pairs: Mapping[Row, Row | None], sites: Sequence[str] | None = None, endpoint: Endpoint = "mean"
    ) -> dict[Row, PairQuestion]:
        """Return a question for each configuration that has a baseline in `pairs`."""
        found = {}
        for row, base in pairs.items():
            if base:
                names = tuple(sites) if sites else self._sites(row, base)
                found[row] = PairQuestion(row, base, names, endpoint if len(names) > 1 else "mean")
        return found

    def _difference(self, question: PairQuestion) -> Difference | None:
        """Return the difference that answers a question. A cache ensures that all parts of the verdict contain the same
        answer.
        """
        if question not in self._known:
            row, base = question.row, question.base
            held = base in (self.base.get(row), self.alone.get(row)) and self.base.get(base) != row
            if not held and row in (self.base.get(base), self.alone.get(base)):
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
        single_site = self.base.get(row) != base
        alike = (base, names, endpoint, single_site)
        if alike not in self._lucks:
            self._lucks[alike] = self._luck(question)
        luck = self._lucks[alike].get(row)
        try:
            return compare(mine, theirs, names, endpoint=endpoint, luck=luck)
        except ValueError as error:
            told = f"{row.title} and {base.title}: {error}; repeat both in a new folder, with the same data"
            raise MedsiloError(told) from error

    def _luck(self, question: PairQuestion) -> dict[Row, Variance]:
        """For each configuration, estimate the between-seed variance of its difference from the baseline. The estimate
        uses all configurations that were run with the baseline's seeds.
        """
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
        """Return the answers to a family of questions, with a correction for multiple comparisons in this family.

        If a question was already answered, the earlier answer is kept. Exchanging the two configurations of a question
        does not make a new question.
        """
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
        """Return the mean score of a configuration over seeds, the standard deviation, and a confidence interval that
        stays between 0 and 1.
        """
        seeds = list(self.scores[row].values())
        names = sites or sorted({site for own in seeds for site in own})
        if not seeds or not names or not all(set(names) <= own.keys() for own in seeds):
            return None
        found = level(seeds, names, endpoint=endpoint)
        each = seeds_of(seeds, names, endpoint).tolist()
        spread = statistics.stdev(each) if len(each) > 1 else None
        raw = [(row, seed, site) in self.raw for seed in self.scores[row] for site in names]
        return Level(
            mean=found.mean,
            sd=spread,
            low=max(found.low, 0.0),
            high=min(found.high, 1.0),
            by_seed=each,
            n=found.people or None,
            trained=sum(raw) <= len(raw) / 2,
        )

    @cached_property
    def _declared(self) -> Row | None:
        """The declared federation: the federated configuration about which the main question was fixed before any
        result. The declared federation is the baseline, or the only federated configuration.
        """
        named = [row for row in self.alone if row.title == self.baseline or len(self.alone) == 1]
        return named[0] if named else None

    def _first(self) -> PairedDifference | None:
        """Return the difference between the declared federation and single-site training, over all sites. The
        difference over all sites is a single test, so it needs no correction for multiple comparisons.
        """
        asked = self._questions({self._declared: self.alone[self._declared]}) if self._declared else {}
        return next(iter(self._answered(asked).values()), None)

    def _joined(self, sites: Sequence[str]) -> dict[str, dict[Row, PairedDifference]]:
        """For each site, return the difference between each federated configuration and single-site training.

        For the declared federation, the differences are corrected only for the number of sites. For all other federated
        configurations, the differences are corrected together as one family.
        """
        asked = {(site, row): one for site in sites for row, one in self._questions(self.alone, [site]).items()}
        told = self._answered({key: one for key, one in asked.items() if key[1] == self._declared})
        told |= self._answered(asked)
        return {site: {row: one for (at, row), one in told.items() if at == site} for site in sites}

    def _at_hospital(self, site: str, answers: Mapping[Row, PairedDifference], sites: int) -> HospitalVerdict | None:
        """Return the verdict on the declared federation at a site. If no federation is declared, the verdict is about
        the federated configuration with the strongest evidence.
        """
        asked = {row: answer for row, answer in answers.items() if self._declared in (None, row)}
        if not asked:
            return None
        row = min(asked, key=lambda each: (asked[each].adjusted, -asked[each].mean))
        difference = asked[row]
        if difference.sure:
            return HospitalVerdict(
                word="better" if difference.mean > 0 else "worse", method=row.title, difference=difference
            )
        question = self._questions({row: self.alone[row]}, [site])[row]
        return HospitalVerdict(
            word="inconclusive",
            method=row.title,
            difference=difference,
            needed=self._needed(question, (1 - LEVEL) / sites),
        )

    def _lacks(self, first: PairedDifference | None) -> Needed | None:
        """Return the sample that would decide whether federated training helps, or None if the verdict is not
        inconclusive.
        """
        if first is None or first.sure or self._declared is None:
            return None
        return self._needed(self._questions({self._declared: self.alone[self._declared]})[self._declared], 1 - LEVEL)

    def pilot(self, question: PairQuestion) -> Pilot | None:
        """Return the pilot study of a planned comparison, which consists of the scores that answer a question. If the
        question has no answer, return None.
        """
        found = self._difference(question)
        if found is None:
            return None
        seeds = list(self._pairs(question.row, question.base))
        mine, theirs = ([self.scores[each][seed] for seed in seeds] for each in (question.row, question.base))
        return Pilot.of(found, mine, theirs, question.sites)

    def pilots(self) -> dict[str, Pilot]:
        """Return pilot studies from which a comparison can be planned: one for all hospitals together, and one for each
        hospital.

        The pilot studies compare the declared federation with single-site training. If no federation is declared, the
        first federated configuration with a known difference is used.
        """
        for row in [self._declared] if self._declared else [row for row in self.rows if self.alone.get(row)]:
            sites = self._sites(row, self.alone[row])
            asked = {**({"all hospitals": None} if len(sites) > 1 else {}), **{site: [site] for site in sites}}
            found = {
                whose: pilot
                for whose, names in asked.items()
                if (pilot := self.pilot(self._questions({row: self.alone[row]}, names)[row]))
            }
            if found:
                return found
        return {}

    def _needed(self, question: PairQuestion, error: float) -> Needed | None:
        """Return the sample that would make the observed difference significant. If the observed difference is smaller
        than the smallest relevant difference, return the sample for the smallest relevant difference.
        """
        found, hospitals = self._difference(question), len(question.sites)
        if found is None or found.alike or (found.seeds > 1 and found.people > 1 and not found.patients.variance):
            return None
        if found.seeds < LEAST_SEEDS:
            return Needed(of="seeds", number=LEAST_SEEDS, hospitals=hospitals)
        pilot = self.pilot(question)
        if found.people < LEAST_PATIENTS:
            reach = pilot and pilot.reach(Design((ENOUGH_PATIENTS,) * hospitals, found.seeds), error)
            number = LEAST_PATIENTS if reach is None else ENOUGH_PATIENTS
            return Needed(of="test patients", number=number, reach=reach and min(reach, 1.0), hospitals=hospitals)
        if pilot is None:
            return None
        difference = max(abs(found.mean), LITTLE)
        missing = pilot.needed(math.copysign(difference, found.mean), error)
        return Needed(
            of=missing.of, number=missing.number, seeds=missing.seeds, difference=difference, hospitals=hospitals
        )

    # ------------------------------------------------------------------ words
    def _whether_it_helps(self, first: PairedDifference | None, lacks: Needed | None) -> str:
        if first is None or self._declared is None:
            return ""
        what, higher = self.where.removeprefix("in "), "higher" if first.mean > 0 else "lower"
        finding = f"{what} is {points(abs(first.mean))[1:]} points {higher} than with single-site training "
        finding += f"({evidence_of(first)})"
        unseen = if_unseen(first)
        further = f" {unseen[0].upper()}{unseen[1:]}." if unseen else ""
        if first.sure:
            of = in_patients(self.plan.task.goal.metric, first.mean)
            answer = f"Federated training with {self._declared.title} is {'better' if first.mean > 0 else 'worse'}"
            return f"{answer}: {finding}{f': {of}' if of else ''}.{further}"
        missing = needed_in_words(lacks, first) if first.seeds >= LEAST_SEEDS else ""
        missing = f" {missing[0].upper()}{missing[1:]}." if missing else ""
        return f"Inconclusive: with {self._declared.title}, {finding}. {self._why(first)}{further}{missing}"

    def _why(self, first: PairedDifference) -> str:
        if first.seeds < LEAST_SEEDS:
            told = f"A verdict needs {repetitions(LEAST_SEEDS)}"
            return f"{told}: fewer do not show how much training differs by chance."
        found = next((self._difference(one) for one, answer in self._answers.items() if answer is first), None)
        if found and (found.alike or not found.patients.variance):
            return "All repetitions or all patients are alike, so the runs do not show how much others would differ."
        if first.patients is not None and first.patients < LEAST_PATIENTS:
            return f"A verdict needs {LEAST_PATIENTS} test patients: with fewer, the interval may be too narrow."
        return "Such a difference may be chance."

    def sentence(self, differences: Mapping[Row, PairedDifference]) -> str:
        """Return a sentence with the names of the methods that are significantly better than the baseline."""
        held = {row: difference for row, difference in differences.items() if row.federated}
        if self.baseline is None:
            return "No baseline is named, so no method is compared with another; see --baseline."
        if not held:
            none = f"No other federated method has a finished run on {self.baseline}'s test cases."
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
                f"No federated method is significantly better than {self.baseline} {self.where}, corrected for "
                f"{len(differences)} comparisons.{rest}"
            )
        listed = "; ".join(f"{row.title} by {in_points(held[row])}" for row in ahead)
        text = f"Better than {self.baseline} {self.where}: {listed}.{rest}"
        best = ahead[0]
        rivals = [row for row in held if row != best]
        tested = self._answered(
            {rival: PairQuestion(best, rival, self._sites(best, rival), "mean") for rival in rivals}
        )
        if sum(one.sure and one.mean > 0 for one in tested.values()) < len(rivals):
            return f"{text} {best.title} is not significantly better than every other, so none is named the best."
        return text

    @staticmethod
    def _also(differences: Mapping[Row, PairedDifference], said: Sequence[Row]) -> str:
        """Return a text with two lists: configurations with significantly lower scores than the baseline, and reference
        methods with significantly higher scores than the baseline.
        """
        higher = [
            row.title
            for row, difference in differences.items()
            if difference.sure and difference.mean > 0 and row not in said
        ]
        lower = [row.title for row, one in differences.items() if one.sure and one.mean < 0]
        found = {"Significantly higher, but no federation": higher, "Significantly lower": lower}
        return "".join(f" {words}: {', '.join(titles)}." for words, titles in found.items() if titles)


def _scores_of(folds: Sequence[Cell]) -> dict[str, Scores] | None:
    """Return each site's scores of a seed, over the test cases of all cross-validation folds. If a fold is not
    finished, return None.
    """
    found = []
    for cell in folds:
        summary = cell.summary()
        if summary is None:
            return None
        found.append({site: SiteTest.read(cell.folder, site, summary.metric).scores for site in summary.telling})
    sites = [site for site in found[0] if all(site in scores for scores in found)]
    return {site: joined([scores[site] for scores in found]) for site in sites}


def usable(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    return {site: score for site, score in scores.items() if np.isfinite(score.values).all()}


def _untrained_at(cell: Cell) -> list[str]:
    """Return the sites at which a finished run tested the untrained model of round 0."""
    summary = cell.summary()
    return [] if summary is None else [site for site, chosen in summary.selected.rounds.items() if chosen == 0]


def _tested(differences: Mapping[Key, Difference]) -> dict[Key, PairedDifference]:
    """Return differences as they are written in verdict.json, with p-values and confidence intervals that are corrected
    for multiple comparisons.
    """
    p_values = {key: difference.p for key, difference in differences.items()}
    error = 1 - LEVEL
    adjusted, errors = holm(p_values), errors_of(p_values, error)
    answers = {}
    for key, difference in differences.items():
        sure = difference.decides and adjusted[key] < error
        low, high = difference.low, difference.high
        if errors[key] < error:
            low, high = difference.within(errors[key])
            if difference.decides and not sure:
                low, high = min(low, 0.0), max(high, 0.0)
        unseen = difference.if_unseen(min(errors[key], error)) if difference.unseen else None
        answers[key] = PairedDifference(
            mean=difference.mean,
            low=max(difference.low, -1.0),  # the difference between two scores lies between -1 and 1
            high=min(difference.high, 1.0),
            corrected_low=max(low, -1.0),
            corrected_high=min(high, 1.0),
            unseen_low=max(unseen[0], -1.0) if unseen else None,
            unseen_high=min(unseen[1], 1.0) if unseen else None,
            failing=difference.unseen.most(min(errors[key], error)) if difference.unseen else None,
            p=difference.p,
            seeds=difference.seeds,
            patients=difference.people or None,
            adjusted=adjusted[key],
            sure=sure,
        )
    return answers


def _reversed(difference: PairedDifference) -> PairedDifference:
    low, high = difference.interval
    back = {
        "mean": -difference.mean,
        "low": -difference.high,
        "high": -difference.low,
        "corrected_low": -high,
        "corrected_high": -low,
    }
    if difference.unseen:
        back |= {"unseen_low": -difference.unseen[1], "unseen_high": -difference.unseen[0]}
    return difference.changed(**back)
