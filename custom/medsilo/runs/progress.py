"""The lines that a person sees of a study while it runs. Only this file reads the record of a round for that."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from medsilo.core.text import duration, size_text
from medsilo.runs import paths

if TYPE_CHECKING:  # what `medsilo --help` would have to wait for
    from pydantic import BaseModel

    from medsilo.runs.own_files import SiteActivity
    from medsilo.runs.rounds import Round, SiteRound, SiteTurn, Turns

LATE = 1.5  # times the site's longest answer so far: from there on it is late
GRACE = 5.0  # seconds that are never late
NAMED = 5  # sites in a line
STARTING = "still starting"
AnyPart = TypeVar("AnyPart", bound="BaseModel")
ASKED_FOR = {"join": "joining", "deliver": "taking over the outcome", "test": "testing"}


@dataclass(frozen=True)
class Moment:
    """The state of a study between two rounds: the server's turns, and the work of sites on this machine."""

    turns: "Turns | None" = None
    doing: "Mapping[str, SiteActivity]" = field(default_factory=dict)
    age: float = 0.0  # seconds since the turns were told
    away: Mapping[str, str] = field(default_factory=dict)  # sites that can't answer, and why

    @classmethod
    def of_run(cls, folder: Path) -> "Moment":
        """Read the moment of a run on this machine."""
        from medsilo.runs.own_files import SiteActivity
        from medsilo.runs.rounds import Turns

        turns = read_now(Turns, folder)
        if turns is None:
            return cls()
        told = {site: read_now(SiteActivity, paths.site_folder(folder, site)) for site in turns.sites}
        doing = {site: one for site, one in told.items() if one and (one.task, one.round) == (turns.task, turns.round)}
        return cls(turns, doing, max(0.0, time.time() - turns.at))


class StudyProgress:
    """The state of a study that runs: its sites, the rounds done, the time left."""

    def __init__(
        self,
        sites: Iterable[str],
        planned: int,
        metric: str,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[], Moment] = Moment,
    ) -> None:
        """look: tells what happens between two rounds."""
        self.states = dict.fromkeys(sites, "waiting")  # after the last round
        self.planned, self.metric, self.done, self.look = planned, metric, 0, look
        self.steps: Mapping[str, float] = {}  # of sites that round their validation scores
        self.last: dict[str, Any] = {}  # the last round, as JSON
        self.rounds: list[Round] = []
        self._standing_out: set[str] = set()  # sites of which that was said
        self._clock = clock
        self._ends = [clock()]  # of the start here and of the rounds seen

    def add(self, line: "Round") -> list[str]:
        """Take in one round; returns its lines."""
        self.done, self.last = line.round, line.as_json()
        for site in line.asked:
            self.states[site] = "answered" if site in line.sites else "refused" if site in line.refused else "lost"
        self._ends.append(self._clock())
        return [*round_lines(line, self.planned, self.metric, self.steps), *self._newly_standing_out(line)]

    def _newly_standing_out(self, line: "Round") -> Iterator[str]:
        """Yield what stands out since this round: each site once, until it no longer does."""
        from medsilo.runs.outliers import standing_out

        self.rounds.append(line)
        found, before = standing_out(self.rounds), self._standing_out
        self._standing_out = {*found}
        for site, lines in found.items():
            if site not in before:
                yield from (f"{_head(line, self.planned)}  STANDS OUT: {text}" for text in lines)

    # ------------------------------------------------------------------ between two rounds
    def now(self) -> dict[str, str]:
        """Return site → what it does at the moment, as far as it is known here; else how it stood after the round."""
        states, moment = dict(self.states), self.look()
        if moment.turns is None or self._is_over(moment.turns):
            return states
        for site, turn in moment.turns.sites.items():
            states[site] = _at_the_moment(turn, moment.doing.get(site), moment.age, self._expected(site, moment.turns))
        return states | {site: f"AWAY: {why}" for site, why in moment.away.items() if site in states}

    def _is_over(self, turns: "Turns") -> bool:
        return turns.task == "round" and turns.round <= self.done

    def _expected(self, site: str, turns: "Turns") -> float | None:
        """Return the seconds after which a site is late: by its own rounds, or in the first by the others' answers."""
        own = [line.sites[site].seconds for line in self.rounds if site in line.sites]
        others = [turn.answered for turn in turns.sites.values() if turn.answered is not None]
        known = own or others
        return max(LATE * max(known), GRACE) if known else None

    def sentence(self) -> str:
        """Return what happens at the moment, in one line."""
        moment = self.look()
        if moment.turns is None or self._is_over(moment.turns):
            since = self._clock() - self._ends[-1]
            ended = f"round {self.done} of {self.planned} ended {duration(since)} ago"
            return ended if self.done else f"{STARTING}, {duration(since)} so far"
        where = ASKED_FOR.get(moment.turns.task, f"round {moment.turns.round} of {self.planned}")
        left = self.seconds_left()
        facts = [f"{where}: {listed(self.now())}", *([f"about {duration(left)} left"] if left else [])]
        return "; ".join(facts)

    def seconds_left(self) -> float | None:
        """Return the seconds that the remaining rounds take at the pace so far; None before the first has ended."""
        if len(self._ends) < 2:
            return None
        ends = self._ends[1:] if len(self._ends) > 2 else self._ends  # the first round had to wait for the start
        told = [line.seconds or 0.0 for line in self.rounds[1:] or self.rounds]  # of rounds that were over before this
        pace, rounds = max((ends[-1] - ends[0]) / (len(ends) - 1), sum(told) / len(told)), self.planned - self.done
        return max(pace * rounds - (self._clock() - ends[-1]), pace * (rounds - 1), 0.0)


def _at_the_moment(turn: "SiteTurn", doing: "SiteActivity | None", age: float, expected: float | None) -> str:
    """Return what a site does, and how late it is."""
    if turn.answered is not None:
        return "answered"
    if turn.asked is None and doing is None:
        return "waiting"
    if doing is None:
        what = f"asked {duration((turn.asked or 0.0) + age)} ago"
    else:
        what = doing.deed if doing.share is None else f"{doing.deed} {doing.share:.0%}".replace("%", " %")
    late = (turn.asked or 0.0) + age - expected if expected is not None else 0.0
    refused = doing is not None and doing.deed == "refused"
    return f"{what}, late by {duration(late)}" if late >= 1 and not refused else what


def listed(states: Mapping[str, str]) -> str:
    """Return sites with what they do, those that have answered last and only counted where they are many."""
    busy = [f"{site} {state}" for site, state in states.items() if state != "answered"]
    done = [site for site, state in states.items() if state == "answered"]
    shown = busy[:NAMED] + ([f"{len(busy) - NAMED} others"] if len(busy) > NAMED else [])
    if len(done) > NAMED or len(busy) > NAMED:
        shown += [f"{len(done)} answered"] * bool(done)
    else:
        shown += [f"{site} answered" for site in done]
    return ", ".join(shown)


def round_lines(line: "Round", rounds: int, metric: str, steps: Mapping[str, float] | None = None) -> list[str]:
    """Return the lines of one round; a site that is missing says why. steps: of sites that round their scores."""
    told, width = [], max(map(len, line.asked), default=0)
    for site in line.asked:
        head = f"{_head(line, rounds)}  {site:<{width}}"
        own, reason = line.sites.get(site), line.refused.get(site) or line.lost.get(site)
        told.append(f"{head}  {_numbers(own, metric, (steps or {}).get(site, 0.0)) if own else f'MISSING: {reason}'}")
        told += [f"{head}  WARNING: {warning}" for warning in line.warnings.get(site, [])]
    return told


def _head(line: "Round", rounds: int) -> str:
    return f"round {line.round:>{len(str(rounds))}}/{rounds}"


def _numbers(own: "SiteRound", metric: str, step: float) -> str:
    rounded = f" ± {step / 2:g} (rounded)" if step and own.validation is not None else ""
    return (
        f"{metric} before {_value(own.validation)}{rounded}  loss {_value(own.train_loss)}  "
        f"{own.samples or '–'} cases  {own.seconds:.1f} s  "
        f"up {size_text(own.bytes_up)}  down {size_text(own.bytes_down)}"
    )


def _value(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def read_now(model: "type[AnyPart]", folder: Path) -> "AnyPart | None":
    """Read what goes on in a run (Turns), or at a site whose folder is here (Doing); None where it can't be said."""
    try:
        return model.model_validate_json((folder / paths.NOW).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it comes and goes
        return None
