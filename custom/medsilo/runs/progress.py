"""Describe a running study: its rounds, what each site does now, and the remaining time."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from medsilo.core.text import duration, size_text
from medsilo.runs import paths

# imported only for type checking, because these slow imports would delay `medsilo --help`
if TYPE_CHECKING:
    from pydantic import BaseModel

    from medsilo.runs.own_files import SiteActivity
    from medsilo.runs.rounds import RequestStatus, Round, SiteRound, SiteTurn

LATE = 1.5  # a site is late if it takes longer than this multiple of the time of its slowest earlier answer
GRACE = 5.0  # seconds after a request in which no site counts as late
NAMED = 5  # largest number of sites that a line lists
STARTING = "still starting"
AnyPart = TypeVar("AnyPart", bound="BaseModel")
ASKED_FOR = {"join": "joining", "deliver": "taking over the outcome", "test": "testing"}


def late_after(site: str, rounds: "Iterable[Round]", turns: "RequestStatus") -> float | None:
    """Return the seconds after which a site's answer counts as late.

    The limit is a multiple of the longest time that the site's earlier answers took, or, in its first round, that other
    sites' answers took.
    """
    own = [line.sites[site].seconds for line in rounds if site in line.sites]
    others = [turn.answered for turn in turns.sites.values() if turn.answered is not None]
    known = own or others
    return max(LATE * max(known), GRACE) if known else None


@dataclass(frozen=True)
class Moment:
    """A study's state during a round: the requests to sites, and the current work of sites on this machine."""

    turns: "RequestStatus | None" = None
    doing: "Mapping[str, SiteActivity]" = field(default_factory=dict)
    age: float = 0.0  # seconds since the file about the requests was written
    away: Mapping[str, str] = field(default_factory=dict)  # for each site that can't answer, the reason

    @classmethod
    def of_run(cls, folder: Path) -> "Moment":
        from medsilo.runs.own_files import SiteActivity
        from medsilo.runs.rounds import RequestStatus

        turns = read_now(RequestStatus, folder)
        if turns is None:
            return cls()
        told = {site: read_now(SiteActivity, paths.site_folder(folder, site)) for site in turns.sites}
        doing = {site: one for site, one in told.items() if one and (one.task, one.round) == (turns.task, turns.round)}
        return cls(turns, doing, max(0.0, time.time() - turns.at))


class StudyProgress:
    def __init__(
        self,
        sites: Iterable[str],
        planned: int,
        metric: str,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[], Moment] = Moment,
    ) -> None:
        self.states = dict.fromkeys(sites, "waiting")  # states of sites after the last round
        self.planned, self.metric, self.done, self.look = planned, metric, 0, look
        self.last: dict[str, Any] = {}  # the last round as JSON values
        self.rounds: list[Round] = []
        self._standing_out: set[str] = set()  # the sites that were already reported as outliers
        self._clock = clock
        self._ends = [clock()]  # times of the start of the study and of the end of each round

    def add(self, line: "Round") -> list[str]:
        self.done, self.last = line.round, line.as_json()
        for site in line.asked:
            self.states[site] = "answered" if site in line.sites else "refused" if site in line.refused else "lost"
        self._ends.append(self._clock())
        return [*round_lines(line, self.planned, self.metric), *self._newly_standing_out(line)]

    def _newly_standing_out(self, line: "Round") -> Iterator[str]:
        """Yield lines about sites that became outliers in this round."""
        from medsilo.runs.outliers import standing_out

        self.rounds.append(line)
        found, before = standing_out(self.rounds), self._standing_out
        self._standing_out = {*found}
        for site, lines in found.items():
            if site not in before:
                yield from (f"{_head(line, self.planned)}  STANDS OUT: {text}" for text in lines)

    # ------------------------------------------------------------------ between two rounds
    def now(self) -> dict[str, str]:
        """Return each site's current work, or its state after the last round if the work is unknown."""
        states, moment = dict(self.states), self.look()
        if moment.turns is None or self._is_over(moment.turns):
            return states
        for site, turn in moment.turns.sites.items():
            states[site] = _at_the_moment(turn, moment.doing.get(site), moment.age, self._expected(site, moment.turns))
        return states | {site: f"AWAY: {why}" for site, why in moment.away.items() if site in states}

    def _is_over(self, turns: "RequestStatus") -> bool:
        return turns.task == "round" and turns.round <= self.done

    def _expected(self, site: str, turns: "RequestStatus") -> float | None:
        return late_after(site, self.rounds, turns)

    def sentence(self) -> str:
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
        """Estimate the seconds that the remaining rounds take; None before the first round ends."""
        if len(self._ends) < 2:
            return None
        # The first round does not count for the estimate, because it also includes the start of the processes.
        ends = self._ends[1:] if len(self._ends) > 2 else self._ends
        # each round's duration according to the server
        told = [line.seconds or 0.0 for line in self.rounds[1:] or self.rounds]
        pace, rounds = max((ends[-1] - ends[0]) / (len(ends) - 1), sum(told) / len(told)), self.planned - self.done
        return max(pace * rounds - (self._clock() - ends[-1]), pace * (rounds - 1), 0.0)


def _at_the_moment(turn: "SiteTurn", doing: "SiteActivity | None", age: float, expected: float | None) -> str:
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
    """Format the states of sites as text. Sites that have answered come last; if there are many sites, only their
    number is given.
    """
    busy = [f"{site} {state}" for site, state in states.items() if state != "answered"]
    done = [site for site, state in states.items() if state == "answered"]
    shown = busy[:NAMED] + ([f"{len(busy) - NAMED} others"] if len(busy) > NAMED else [])
    if len(done) > NAMED or len(busy) > NAMED:
        shown += [f"{len(done)} answered"] * bool(done)
    else:
        shown += [f"{site} answered" for site in done]
    return ", ".join(shown)


def round_lines(line: "Round", rounds: int, metric: str) -> list[str]:
    """Format one round as lines of text, with the reason for each missing site."""
    told, width = [], max(map(len, line.asked), default=0)
    for site in line.asked:
        head = f"{_head(line, rounds)}  {site:<{width}}"
        own, reason = line.sites.get(site), line.refused.get(site) or line.lost.get(site)
        told.append(f"{head}  {_numbers(own, metric) if own else f'MISSING: {reason}'}")
        told += [f"{head}  WARNING: {warning}" for warning in line.warnings.get(site, [])]
    return told


def _head(line: "Round", rounds: int) -> str:
    return f"round {line.round:>{len(str(rounds))}}/{rounds}"


def _numbers(site_round: "SiteRound", metric: str) -> str:
    return (
        f"{metric} before {site_round.score}  loss {_value(site_round.train_loss)}  "
        f"{site_round.samples or '–'} cases  {site_round.seconds:.1f} s  "
        f"up {size_text(site_round.bytes_up)}  down {size_text(site_round.bytes_down)}"
    )


def _value(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def read_now(model: "type[AnyPart]", folder: Path) -> "AnyPart | None":
    """Read the status file of a run (RequestStatus) or of a site (SiteActivity); return None if no file can be
    read.
    """
    try:
        return model.model_validate_json((folder / paths.NOW).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file may be missing or incomplete at any time
        return None
