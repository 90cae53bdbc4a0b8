"""The lines that a person sees of a study while it runs. Only this file reads the record of a round for that."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # what `medsilo --help` would have to wait for
    from medsilo.runs.schema import Round, SiteRound


@dataclass
class SiteProgress:
    """The facts of one site after the last round."""

    state: Literal["waiting", "answered", "refused", "lost"] = "waiting"
    score: float | None = None
    loss: float | None = None
    seconds: float | None = None


class StudyProgress:
    """The state of a study that runs: its sites, the rounds done, the best so far, the time left."""

    def __init__(
        self, sites: Iterable[str], planned: int, metric: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sites = {site: SiteProgress() for site in sites}
        self.planned, self.metric, self.done = planned, metric, 0
        self.best: tuple[int, float] | None = None  # the round and the mean score of the model it began with
        self.last: dict[str, Any] = {}  # the last round, as JSON
        self.exceptional: list[str] = []  # its lines about missing sites, warnings and sites that stand out
        self.standing_out: dict[str, list[str]] = {}  # site → what stands out in its updates, in all rounds so far
        self._rounds: list[Round] = []
        self._clock = clock
        self._ends = [clock()]  # of the start here and of the rounds seen

    def add(self, line: "Round") -> list[str]:
        """Take in one round; returns its lines."""
        self.done, self.last = line.round, line.as_json()
        for site in line.asked:
            state = self.sites.setdefault(site, SiteProgress())
            own = line.sites.get(site)
            if own:
                state.state, state.score = "answered", own.validation
                state.loss, state.seconds = own.train_loss, own.seconds
            else:
                state.state = "refused" if site in line.refused else "lost"
        scores = [own.validation for own in line.sites.values() if own.validation is not None]
        mean = sum(scores) / len(scores) if scores else None
        if mean is not None and (self.best is None or mean > self.best[1]):
            self.best = (self.done, mean)
        self._ends.append(self._clock())
        told = [*_told(line, self.planned, self.metric), *self._newly_standing_out(line)]
        self.exceptional = [text for text, usual in told if not usual]
        return [text for text, _ in told]

    def _newly_standing_out(self, line: "Round") -> Iterator[tuple[str, bool]]:
        """Yield what stands out since this round: each site once, until it no longer does."""
        from medsilo.runs.standing import standing_out

        self._rounds.append(line)
        before, self.standing_out = self.standing_out, standing_out(self._rounds)
        for site, lines in self.standing_out.items():
            if site not in before:
                yield from ((f"{_head(line, self.planned)}  STANDS OUT: {text}", False) for text in lines)

    def elapsed(self) -> float:
        """Return the seconds since the study began here."""
        return self._clock() - self._ends[0]

    def seconds_left(self) -> float | None:
        """Return the seconds that the remaining rounds take at the pace so far; None before the first has ended."""
        if len(self._ends) < 2:
            return None
        ends = self._ends[1:] if len(self._ends) > 2 else self._ends  # the first round had to wait for the start
        return (ends[-1] - ends[0]) / (len(ends) - 1) * (self.planned - self.done)


def round_lines(line: "Round", rounds: int, metric: str) -> list[str]:
    """Return the lines of one round; a site that is missing says why."""
    return [text for text, _ in _told(line, rounds, metric)]


def _told(line: "Round", rounds: int, metric: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a round, and whether it is a usual one."""
    head = _head(line, rounds)
    width = max(map(len, line.asked), default=0)
    for site in line.asked:
        own = line.sites.get(site)
        reason = line.refused.get(site) or line.lost.get(site)
        yield f"{head}  {site:<{width}}  {_numbers(own, metric) if own else f'MISSING: {reason}'}", bool(own)
        for warning in line.warnings.get(site, []):
            yield f"{head}  {site:<{width}}  WARNING: {warning}", False


def _head(line: "Round", rounds: int) -> str:
    return f"round {line.round:>{len(str(rounds))}}/{rounds}"


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _numbers(own: "SiteRound", metric: str) -> str:
    return (
        f"{metric} before {_value(own.validation)}  loss {_value(own.train_loss)}  "
        f"{own.samples or 'sealed'} cases  {own.seconds:.1f} s  "
        f"up {_bytes(own.bytes_up)}  down {_bytes(own.bytes_down)}"
    )


def _value(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
