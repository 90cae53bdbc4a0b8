"""What a person sees of a study while it runs. Only this file reads the record of a round for that."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Record = Mapping[str, Any]


@dataclass
class SiteState:
    """What is known of one site after the last round."""

    state: Literal["waiting", "answered", "refused", "lost"] = "waiting"
    score: float | None = None
    loss: float | None = None
    seconds: float | None = None


class Progress:
    """The state of a study that runs: its sites, the rounds done, the best so far, the time left."""

    def __init__(
        self, sites: Iterable[str], planned: int, metric: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sites = {site: SiteState() for site in sites}
        self.planned, self.metric, self.done = planned, metric, 0
        self.best: tuple[int, float] | None = None  # the round and the mean score of the model it began with
        self.last: dict[str, Any] = {}  # the last round, as JSON
        self.exceptional: list[str] = []  # its lines about missing sites and warnings
        self._clock = clock
        self._ends = [clock()]  # of the start here and of the rounds seen

    def add(self, record: Record) -> list[str]:
        """Take in one round; returns its lines."""
        self.done, self.last = record["round"], dict(record)
        for site in record["asked"]:
            state = self.sites.setdefault(site, SiteState())
            facts = record["sites"].get(site)
            if facts:
                state.state, state.score = "answered", facts["validation"]
                state.loss, state.seconds = facts["train_loss"], facts["seconds"]
            else:
                state.state = "refused" if site in record["refused"] else "lost"
        scores = [facts["validation"] for facts in record["sites"].values() if facts["validation"] is not None]
        mean = sum(scores) / len(scores) if scores else None
        if mean is not None and (self.best is None or mean > self.best[1]):
            self.best = (self.done, mean)
        self._ends.append(self._clock())
        told = list(_told(record, self.planned, self.metric))
        self.exceptional = [line for line, usual in told if not usual]
        return [line for line, _ in told]

    def elapsed(self) -> float:
        """Return the seconds since the study began here."""
        return self._clock() - self._ends[0]

    def seconds_left(self) -> float | None:
        """Return the seconds that the remaining rounds take at the pace so far; None before the first has ended."""
        if len(self._ends) < 2:
            return None
        ends = self._ends[1:] if len(self._ends) > 2 else self._ends  # the first round had to wait for the start
        return (ends[-1] - ends[0]) / (len(ends) - 1) * (self.planned - self.done)


def round_lines(record: Record, rounds: int, metric: str) -> list[str]:
    """Return the lines of one round; a site that is missing says why."""
    return [line for line, _ in _told(record, rounds, metric)]


def _told(record: Record, rounds: int, metric: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a round, and whether it is a usual one."""
    head = f"round {record['round']:>{len(str(rounds))}}/{rounds}"
    width = max(map(len, record["asked"]), default=0)
    for site in record["asked"]:
        facts = record["sites"].get(site)
        reason = record["refused"].get(site) or record["lost"].get(site)
        text = _facts(facts, metric) if facts else f"MISSING: {reason}"
        yield f"{head}  {site:<{width}}  {text}", bool(facts)
        for line in record.get("warnings", {}).get(site, []):
            yield f"{head}  {site:<{width}}  WARNING: {line}", False


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _facts(facts: dict[str, Any], metric: str) -> str:
    return (
        f"{metric} before {_value(facts['validation'])}  loss {_value(facts['train_loss'])}  "
        f"{facts['samples']} cases  {facts['seconds']:.1f} s  "
        f"up {_bytes(facts['bytes_up'])}  down {_bytes(facts['bytes_down'])}"
    )


def _value(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
