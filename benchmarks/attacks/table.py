"""docs/results/attacks.md, made of the cells that are done."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.attacks.attackers import ATTACKS
from benchmarks.attacks.cells import DEFENCES, HONEST, PLAIN, Block, Cell, Result, Setting, cells, kept
from benchmarks.attacks.costs import Cost
from medsilo.registry import METHODS

POINTS = 3.0  # of the score, that the best defence may lose
PATCHED = 10.0  # points, by which the patch may succeed more often than in the undisturbed federation
# Where the goal may be missed, and why; what misses it and does not stand here makes the command exit with 1.
NAMED: dict[str, str] = {}


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


@dataclass(frozen=True)
class Compared:
    """One attack on one method under one defence, over all seeds that are done, against the undisturbed federation."""

    method: str
    attack: str
    bad: int
    defence: str
    results: Sequence[Result]
    undisturbed: Sequence[Result]  # with the same seeds, without attack and defence
    honest: Sequence[Sequence[str]]  # the hospitals whose scores are compared

    @property
    def refused(self) -> bool:
        """Whether the plan refuses the defence for this method."""
        return any(result.no_plan for result in self.results)

    @property
    def ended(self) -> int:
        """How many studies ended before the test."""
        return sum(result.score is None for result in self.results)

    @property
    def score(self) -> float | None:
        """The honest hospitals' mean, over the studies that were tested."""
        scores = [result.score for result in self.results if result.score is not None]
        return fmean(scores) if scores else None

    @property
    def best_possible(self) -> float:
        """The mean of the same hospitals in the undisturbed federation."""
        return fmean(
            fmean((result.sites or {})[site] for site in own)
            for result, own in zip(self.undisturbed, self.honest, strict=True)
        )

    @property
    def loss(self) -> float:
        """Points below the undisturbed federation; 100 where a study ended."""
        return 100.0 if self.ended or self.score is None else 100 * (self.best_possible - self.score)

    @property
    def patched(self) -> float | None:
        """How often the patch makes an image the target's."""
        return _mean(result.patched for result in self.results)

    @property
    def patched_gain(self) -> float:
        """Points by which the patch succeeds more often than in the undisturbed federation."""
        before = _mean(result.patched for result in self.undisturbed)
        return 0.0 if self.patched is None or before is None else 100 * (self.patched - before)

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        opened = "backdoor" in self.attack and self.patched_gain > PATCHED
        return not self.refused and self.loss <= POINTS and not opened

    @property
    def text(self) -> str:
        """The table's entry."""
        if self.refused:
            return "refused"
        if self.score is None:
            return "ended"
        patch = f"; {100 * self.patched:.0f}" if "backdoor" in self.attack and self.patched is not None else ""
        ended = f" ({self.ended} of {len(self.results)} ended)" if self.ended else ""
        return f"{percent(self.score)}{patch}{ended}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class Done:
    """The cells of some blocks that are done."""

    def __init__(self, blocks: Sequence[Block], folder: Path) -> None:
        self.all = list(cells(blocks))
        found = [(cell, kept(cell, folder)) for cell in self.all]
        self.results = {_key(cell): result for cell, result in found if result}
        self.cells = [cell for cell, result in found if result]

    def compared(self, cell: Cell) -> Compared | None:
        """Return a cell with the same one of all other seeds; None where nothing is done of it."""
        sought = [replace(cell, seed=seed) for seed in range(9)]
        with_reference = [
            (one, self.results[_key(one)], reference)
            for one in sought
            if _key(one) in self.results
            and (reference := self.results.get(_key(replace(one, attack=HONEST, bad=0, defence=PLAIN))))
            and reference.sites
        ]
        if not with_reference:
            return None
        own, results, references = zip(*with_reference, strict=True)
        honest = [[site for site in reference.sites if site not in one.bad_sites] for one, _, reference in with_reference]
        return Compared(cell.method, cell.attack, cell.bad, cell.defence, results, references, honest)

    def where(self, wanted: Callable[[Cell], bool]) -> list[Compared]:
        """Return what is done of these cells, in their order, seeds together."""
        firsts = {_key(replace(cell, seed=0)): replace(cell, seed=0) for cell in self.cells if wanted(cell)}
        return [found for cell in firsts.values() if (found := self.compared(cell))]


Key = tuple[str, str, str, int, str, int]


def _key(cell: Cell) -> Key:
    return cell.setting.title, cell.method, cell.attack, cell.bad, cell.defence, cell.seed


# ---------------------------------------------------------------------------------------------------- tables
def rows_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def attacks_table() -> list[str]:
    return rows_of(
        ("attack", "a bad hospital", "knows"), ((attack.name, attack.does, attack.knows) for attack in ATTACKS.values())
    )


def scores_table(done: Done, setting: Setting, method: str, bad: int) -> list[str]:
    """Return attacks by defences for one method and number of bad hospitals."""
    found = done.where(lambda cell: (cell.setting, cell.method, cell.bad) == (setting, method, bad))
    defences = [name for name in DEFENCES if any(one.defence == name for one in found)]
    rows = []
    for attack in dict.fromkeys(one.attack for one in found):
        own = {one.defence: one for one in found if one.attack == attack}
        reference = next(iter(own.values()))
        seeds = max(len(one.results) for one in own.values())
        texts = [own[name].text if name in own else "–" for name in defences]
        rows.append((attack, percent(reference.best_possible), *texts, str(seeds)))
    return rows_of(("attack", "undisturbed", *defences, "seeds"), rows)


def score_tables(done: Done) -> list[str]:
    lines = []
    places = dict.fromkeys((cell.setting.title, cell.method, cell.bad) for cell in done.cells if cell.bad)
    settings = {cell.setting.title: cell.setting for cell in done.cells}
    for title, method, bad in sorted(places, key=lambda place: (place[0], list(METHODS).index(place[1]), place[2])):
        lines += [f"### {title}, {METHODS[method].title}, {bad} of 5 bad", ""]
        lines += scores_table(done, settings[title], method, bad)
    return lines


def costs_table(done: Done, costs: Sequence[Cost]) -> list[str]:
    """Return what each defence costs without an attacker."""
    found = done.where(lambda cell: cell.bad == 0)
    places = dict.fromkeys((one.method, len(one.honest[0])) for one in found)
    methods = sorted({method for method, _ in places}, key=list(METHODS).index)
    rows = []
    for cost in costs:
        texts = []
        for method in methods:
            own = [one for one in found if one.method == method and one.defence == cost.defence]
            texts.append("; ".join("refused" if one.refused else f"{-one.loss:+.1f}" for one in own) or "–")
        rows.append((cost.defence, *texts, f"{cost.seconds:.1f}x", f"{cost.memory:.1f}x"))
    return rows_of(("defence", *(METHODS[method].title for method in methods), "server's time", "memory"), rows)


# ---------------------------------------------------------------------------------------------------- the goal
def best_defence(found: Sequence[Compared]) -> str | None:
    """Return the defence whose worst loss over all attacks is least."""
    names = [name for name in DEFENCES if name != PLAIN]
    worst = {
        name: max(one.loss for one in found if one.defence == name)
        for name in names
        if any(one.defence == name and not one.refused for one in found)
    }
    return min(worst, key=worst.__getitem__) if worst else None


def goal_table(done: Done) -> tuple[list[str], list[Compared]]:
    """Return, for one bad hospital, what the best defence loses in each attack, and where it misses the goal."""
    rows, missed = [], []
    found = done.where(lambda cell: cell.bad == 1)
    for method in sorted({one.method for one in found}, key=list(METHODS).index):
        own = [one for one in found if one.method == method]
        best = best_defence(own)
        if best is None:
            rows.append((METHODS[method].title, "none is possible", "", ""))
            continue
        under = [one for one in own if one.defence == best]
        held = [one for one in under if one.holds]
        failed = [one for one in under if not one.holds]
        missed += failed
        told = "; ".join(f"{one.attack} ({_why(one)})" for one in failed) or "none"
        rows.append((METHODS[method].title, best, f"{len(held)} of {len(under)}", told))
    return rows_of(("method", "best defence", "held", "missed"), rows), missed


def _why(one: Compared) -> str:
    if one.ended:
        return f"{one.ended} of {len(one.results)} studies ended"
    points = f"{-one.loss:+.1f} points"
    return f"{points}, patch {one.patched_gain:+.0f}" if "backdoor" in one.attack else points
