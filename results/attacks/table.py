"""Make the file results/attacks.csv from the finished studies."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from medsilo.registry import METHODS
from results.attacks.attackers import ATTACKS
from results.attacks.cells import DEFENCES, HONEST, PLAIN, SITES, Block, Cell, Result, Setting, cells, kept
from results.attacks.costs import Cost, kept_costs
from results.result_files import Study, Table

POINTS = 3.0  # maximum loss of score, in points, that the best defence may leave
MOST_SEEDS = 9
PATCHED = 10.0  # maximum percentage points by which an attack may increase the success of its patch
# Declared exceptions to the goal, with reasons. A missed goal without a declared exception makes the command exit with
# 1.
WAY = (
    "a bound on the length leaves the way as it is, and a median or a mean of the nearest gives a wrong way of usual "
    "length some weight; where a rule with its own cost is best, that cost comes on top"
)
PERSONAL = "personal models are mixed as FedSM says, and no rule takes the place of that"
NAMED: dict[str, str] = {
    "label flip": "its updates are trained like any other and no longer; only their direction differs, as that of a "
    "hospital with other patients does. Its share of a fifth is what bounds the harm",
    "backdoor": "scores stay, and the patch works: it is learned where honest updates leave room, by updates of usual "
    "length and direction, and no rule here looks for it",
    "backdoor, replacing the model": "its update is cut to the usual length or left out while it is long; what comes "
    "through is the backdoor above",
    "a little is enough": "it is made to stay within the spread of honest updates, where every rule takes it for one",
    "inner product, ε = 0.5": WAY,
    "inner product, large ε": WAY,
    "sign flip": WAY,
    "sign flip x10": WAY,
    "scaling x100": PERSONAL,
    "expert and selector": PERSONAL,
}


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # adding 0.0 turns -0.0 into 0.0


@dataclass(frozen=True)
class Compared:
    """The results of one attack on one method with one defence over all finished seeds, and for comparison the results
    without the attack.
    """

    cells: Sequence[Cell]
    results: Sequence[Result]
    undisturbed: Sequence[Result]  # results with the same seeds, but without the attack and without the defence
    unattacked: Sequence[Result]  # results with the same seeds and the same defence, but without the attack
    honest: Sequence[Sequence[str]]  # for each seed, the hospitals whose scores are compared

    @property
    def cell(self) -> Cell:
        return self.cells[0]

    @property
    def refused(self) -> bool:
        return any(result.no_plan for result in self.results)

    @property
    def ended(self) -> int:
        return sum(result.score is None for result in self.results)

    @property
    def score(self) -> float | None:
        """Return the honest hospitals' mean score over the studies that reached the test."""
        scores = [result.score for result in self.results if result.score is not None]
        return fmean(scores) if scores else None

    @property
    def best_possible(self) -> float:
        return self._mean_of(self.undisturbed)

    @property
    def cost(self) -> float:
        return 100 * (self.best_possible - self._mean_of(self.unattacked))

    def _mean_of(self, results: Sequence[Result]) -> float:
        pairs = zip(results, self.honest, strict=True)
        return fmean(fmean((result.sites or {})[site] for site in own) for result, own in pairs)

    @property
    def loss(self) -> float:
        """Return the points that the score loses to the attack; return 100 if a study ended early."""
        return 100.0 if self.ended or self.score is None else 100 * (self.best_possible - self.score)

    @property
    def patched(self) -> float | None:
        """Return the fraction of images that models assign to the target class when the images have the patch."""
        return _mean(result.patched for result in self.results)

    @property
    def patched_difference(self) -> float:
        """Percentage points by which the attack increases the fraction of images with the patch that models assign to
        the target class.
        """
        before = _mean(result.patched for result in self.undisturbed)
        return 0.0 if self.patched is None or before is None else 100 * (self.patched - before)

    @property
    def holds(self) -> bool:
        """True if the defence meets the goal in the attack."""
        opened = "backdoor" in self.cell.attack and self.patched_difference > PATCHED
        return not self.refused and self.loss <= POINTS and not opened

    @property
    def text(self) -> str:
        if self.refused:
            return "refused"
        if self.score is None:
            return "ended"
        patch = f"; {100 * self.patched:.0f}" if "backdoor" in self.cell.attack and self.patched is not None else ""
        ended = f" ({self.ended} of {len(self.results)} ended)" if self.ended else ""
        return f"{percent(self.score)}{patch}{ended}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class Done:
    def __init__(self, blocks: Sequence[Block], folder: Path) -> None:
        self.all = list(cells(blocks))
        found = [(cell, kept(cell, folder)) for cell in self.all]
        self.results = {_key(cell): result for cell, result in found if result}
        self.cells = [cell for cell, result in found if result]

    def compared(self, cell: Cell) -> Compared | None:
        own, results, references, unattacked, honest = [], [], [], [], []
        for seed in range(MOST_SEEDS):
            one = replace(cell, seed=seed)
            result = self.results.get(_key(one))
            defended = self.results.get(_key(replace(one, attack=HONEST, bad=0)))
            reference = self.results.get(_key(replace(one, attack=HONEST, bad=0, defence=PLAIN)))
            if result and reference and reference.sites and defended:
                own.append(one)
                unattacked.append(defended)
                results.append(result)
                references.append(reference)
                honest.append([site for site in reference.sites if site not in one.bad_sites])
        return Compared(own, results, references, unattacked, honest) if own else None

    def where(self, wanted: Callable[[Cell], bool]) -> list[Compared]:
        firsts = {_key(replace(cell, seed=0)): replace(cell, seed=0) for cell in self.cells if wanted(cell)}
        return [found for cell in firsts.values() if (found := self.compared(cell))]


Key = tuple[str, str, str, int, str, int]


def _key(cell: Cell) -> Key:
    return cell.setting.title, cell.method, cell.attack, cell.bad, cell.defence, cell.seed


# ---------------------------------------------------------------------------------------------------- tables
def attacks_table() -> Table:
    rows = [(attack.name, attack.does, attack.knows) for attack in ATTACKS.values()]
    return Table(("attack", "a bad hospital", "knows"), rows, "The attacks")


def settings_table(done: Done) -> Table:
    settings = {cell.setting.title: cell.setting for cell in done.cells}
    rows = [(one.title, _numbers(one.task), _numbers(one.network), _numbers(one.training)) for one in settings.values()]
    return Table(("study", "task", "network", "training"), rows, "The studies")


def _numbers(section: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if key == "name" else f"{key} {value}" for key, value in section.items())


def scores_table(done: Done, setting: Setting, method: str, bad: int) -> Table:
    found = done.where(lambda cell: (cell.setting, cell.method, cell.bad) == (setting, method, bad))
    defences = [name for name in DEFENCES if any(one.cell.defence == name for one in found)]
    rows = []
    for attack in dict.fromkeys(one.cell.attack for one in found):
        own = {one.cell.defence: one for one in found if one.cell.attack == attack}
        reference = next(iter(own.values()))
        seeds = max(len(one.results) for one in own.values())
        texts = [own[name].text if name in own else "–" for name in defences]
        rows.append((attack, percent(reference.best_possible), *texts, str(seeds)))
    part = f"{setting.title}, {METHODS[method].title}, {bad} of 5 bad"
    return Table(("attack", "undisturbed", *defences, "seeds"), rows, part)


def score_tables(done: Done) -> list[Table]:
    places = dict.fromkeys((cell.setting.title, cell.method, cell.bad) for cell in done.cells if cell.bad)
    settings = {cell.setting.title: cell.setting for cell in done.cells}
    order = sorted(places, key=lambda place: (place[0], list(METHODS).index(place[1]), place[2]))
    return [scores_table(done, settings[title], method, bad) for title, method, bad in order]


def costs_table(done: Done, measured: Sequence[Cost]) -> Table:
    found = done.where(lambda cell: cell.bad == 0)
    places = list(dict.fromkeys((one.cell.setting.title, one.cell.method) for one in found))
    header = [f"{title.partition(':')[0]}, {METHODS[method].title}" for title, method in places]
    rows = []
    for cost in measured:
        own = {(one.cell.setting.title, one.cell.method): one for one in found if one.cell.defence == cost.defence}
        points = [_points(own[place]) if place in own else "–" for place in places]
        rows.append((cost.defence, *points, f"{cost.seconds:.1f}x", f"{cost.memory:.1f}x"))
    heads = ("defence", *header, "server's time", "memory")
    return Table(heads, rows, "What a defence costs without an attacker")


def _points(one: Compared) -> str:
    return "refused" if one.refused else "ended" if one.ended else _signed(-one.loss)


# ---------------------------------------------------------------------------------------------------- the goal
def best_defence(found: Sequence[Compared]) -> str | None:
    """Return the defence that meets the goal against most attacks; of several such defences, the defence with the
    smallest mean loss of score.
    """
    own = {name: [one for one in found if one.cell.defence == name and not one.refused] for name in DEFENCES}
    own = {name: rows for name, rows in own.items() if rows and name != PLAIN}

    def rank(name: str) -> tuple[int, float]:
        return sum(one.holds for one in own[name]), -fmean(one.loss for one in own[name])

    return max(own, key=rank) if own else None


def goal_table(done: Done) -> tuple[Table, list[Compared]]:
    """Return a table of each method's best defence against one dishonest hospital, with the attacks in which this
    defence misses the goal.
    """
    rows: list[Sequence[str]] = []
    missed: list[Compared] = []
    found = done.where(lambda cell: cell.bad == 1)
    for title, method in dict.fromkeys((one.cell.setting.title, one.cell.method) for one in found):
        own = [one for one in found if (one.cell.setting.title, one.cell.method) == (title, method)]
        place = f"{title}, {METHODS[method].title}"
        best = best_defence(own)
        if best is None:
            rows.append((place, "every one is refused", "", ""))
            continue
        under = [one for one in own if one.cell.defence == best]
        failed = [one for one in under if not one.holds]
        missed += failed
        told = "; ".join(f"{one.cell.attack} ({_why(one)})" for one in failed) or "none"
        rows.append((place, best, f"{len(under) - len(failed)} of {len(under)}", told))
    return Table(("study", "best defence", "held", "missed"), rows, "The goal: one bad hospital of five"), missed


def _why(one: Compared) -> str:
    if one.ended:
        return f"{one.ended} of {len(one.results)} studies ended"
    points = f"{_signed(-one.loss)} points, {_signed(-one.cost)} without an attacker"
    return f"{points}, patch {one.patched_difference:+.0f}" if "backdoor" in one.cell.attack else points


# ---------------------------------------------------------------------------------------------------- outliers
def named_table(done: Done) -> Table:
    rows = []
    for one in done.where(lambda cell: cell.defence == PLAIN):
        pairs = zip(one.cells, one.results, strict=True)
        known = [(set(cell.bad_sites), out) for cell, result in pairs if (out := result.stood_out) is not None]
        if not known:
            continue
        place = f"{one.cell.setting.title.partition(':')[0]}, {METHODS[one.cell.method].title}"
        studies, bad = len(known), one.cell.bad
        named = f"{sum(len(own & out) for own, out in known)} of {studies * bad}" if bad else "–"
        wrongly = f"{sum(len(out - own) for own, out in known)} of {studies * (len(SITES) - bad)}"
        right = f"{sum(own == out for own, out in known)} of {studies}"
        rows.append((place, one.cell.attack, str(bad), named, wrongly, right))
    header = ("study", "attack", "bad", "bad hospitals named", "honest ones named", "studies with just the bad ones")
    return Table(header, rows, "Outliers", keys=3)


# ---------------------------------------------------------------------------------------------------- the file
def study(blocks: Sequence[Block], folder: Path, tiny: bool = False) -> tuple[Study, list[str]]:
    done = Done(blocks, folder)
    goal, missed = goal_table(done)
    unnamed = sorted({f"{one.cell.attack} on {one.cell.method}" for one in missed if one.cell.attack not in NAMED})
    reasons = [f"{name}: {why}" for name, why in NAMED.items() if any(one.cell.attack == name for one in missed)]
    if unnamed:
        reasons.append(f"{', '.join(unnamed)}: no reason is known; more seeds will tell whether it is chance")
    seconds = sum(result.seconds for result in done.results.values())
    packages = {result.package for result in done.results.values()}
    left = len(done.all) - len(done.cells)
    state = f"{len(done.cells)} studies, {seconds / 60:.0f} minutes of one core"
    state += f"; {left} are not done yet" if left else ""
    state += f"; made with {len(packages)} versions of the package" if len(packages) > 1 else ""
    header = {
        "title": "Dishonest hospitals",
        "data": "synthetic activity, histology, prostate",
        "command": "python -m results.attacks --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "runs": state,
        "about": [one.format(points=POINTS, patched=PATCHED) for one in (INTRODUCTION, GOAL, SCORES, COSTS, OUTLIERS)],
        "finding": [f"why the goal is missed: {reason}" for reason in reasons],
    }
    costs = costs_table(done, kept_costs(folder, tiny) if done.cells else [])
    tables = [settings_table(done), attacks_table(), goal, *score_tables(done), costs, named_table(done)]
    return Study(header, tables), unnamed


INTRODUCTION = """\
Five synthetic hospitals, small networks, few rounds, every method's default numbers. Real participants answer the real
coordinator in one process; what a bad hospital sends passes the same checks as every other update. Which hospital is
bad changes with the seed. Nobody chose a number of a method, a defence or an attack by these tables; the numbers of
training were chosen on undisturbed studies alone. The amplitude attack was changed once, because its first form did no
harm to an undefended study. Multi-Krum was added to the methods beside FedAvg when it had done well there."""

GOAL = """\
The goal: one defence for all attacks keeps the honest hospitals' mean test score within {points:.0f} points of the
undisturbed federation (all five honest, plain mean), and lets the backdoor's patch succeed at most {patched:.0f} points
more often. The best defence is the one under which most attacks are held. It is chosen on the same studies, so its
figure is slightly optimistic. With at most three seeds of some 200 test images each, three points are within chance.
Beside each miss stands what the same defence loses without an attacker. AdaFed takes no mean over hospitals, so no rule
can replace it; its figures are those of the plain mean."""

SCORES = """\
Scores: mean test score in % of the honest hospitals over the seeds. For backdoors, after the semicolon: in how many of
a hundred test images of the other class the patch makes the honest hospitals' models name the target class. "ended":
the study ended before the test, because the global model had diverged and honest updates were rejected. "refused": the
plan rejects this defence for this method. Guessing has 50 in classification."""

COSTS = """\
Costs: points of the test score against the plain mean, all five hospitals honest, same seeds. Time (the processor's)
and memory: a round of the server's aggregation with five U-Nets of 2.6 million weights, against the plain mean in the
same run."""

OUTLIERS = """\
Outliers: whom the summary names as an outlier under the plain mean, that is, without any defence. Hospitals over all
studies; and the studies in which the summary names the bad hospitals and nobody else."""
