"""Group problems into incidents, about which people get messages. Problems come from a kit's events and from
monitoring. People get a message when an incident begins, and when problems of the incident end.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from medsilo.core.text import duration
from medsilo.runs.event_reading import LAST, columns_of, shown

GATHER = 8.0  # before the first message about an incident, medsilo waits this number of seconds for more problems
SETTLED = 10.0  # the end of a problem is reported after this number of seconds without a new event
TOGETHER = 60.0  # problems that begin within this number of seconds after an incident began belong to the incident
# While a problem of an incident continues, changes of the incident are reported after STILL seconds. If all continuing
# problems may end by themselves, changes are reported after PASSING seconds.
STILL, PASSING = 20.0, 90.0
MOST = 500  # limit on open problems
NAMED, LINES = 10, 20  # maximum number of parties in a line, and maximum number of lines in a message


@dataclass(frozen=True)
class News:
    """An event: a problem begins, a problem ends, or something else happens."""

    text: str
    at: float  # seconds since 1970
    begins: str = ""
    ends: str = ""
    about: str = ""  # the party that the event is about
    brief: str = ""  # `text` without the party's name and the time
    joins: bool = False  # whether messages about problems also mention this event
    alone: bool = True  # whether people get a message about this event even if no problem continues
    passes: bool = False  # whether the problem may end without anybody's action
    changes: bool = False  # whether the type of the problem may change before the problem ends


@dataclass(frozen=True)
class Message:
    text: str
    at: float


@dataclass
class Incident:
    """An incident: problems that began within a minute of each other."""

    told: bool = False
    wrong: dict[str, News] = field(default_factory=dict)  # problems that have not ended
    # monotonic times of the problems that began after the incident's first message
    late: dict[str, float] = field(default_factory=dict)
    # problems that have ended, but whose end is not reported yet
    over: list[tuple[News, News]] = field(default_factory=list)
    beside: list[News] = field(default_factory=list)  # events that are not problems, and are not yet reported
    began: float = field(default_factory=lambda: time.monotonic())
    changed: float = field(default_factory=lambda: time.monotonic())
    ended: float | None = None  # monotonic time at which the first problem in `over` ended; None if `over` is empty


@dataclass
class Incidents:
    """Collects events of the class News into incidents, and creates messages about the incidents."""

    open: list[Incident] = field(default_factory=list)

    def take(self, news: News) -> None:
        now = time.monotonic()
        for incident in self.open if news.begins else ():
            if known := incident.wrong.get(news.begins):
                if known.changes and news.brief != known.brief:
                    incident.wrong[news.begins] = news
                    incident.late |= {news.begins: now} if incident.told else {}
                return
        for incident in self.open if news.ends else ():
            if begun := incident.wrong.pop(news.ends, None):
                incident.late.pop(news.ends, None)
                incident.over.append((begun, news))
                incident.changed, incident.ended = now, incident.ended or now
                return
        lately = [one for one in self.open if now - (one.began if news.begins else one.changed) < TOGETHER]
        fitting = [one for one in lately if not one.told or news.begins or news.joins]
        if not fitting and not (news.begins or news.alone):
            return
        incident = fitting[-1] if fitting else Incident()
        if not fitting:
            self.open.append(incident)
        incident.changed = now
        if not news.begins:
            incident.beside.append(news)
            return
        if len(self.keys()) >= MOST:
            crowd = max(self.open, key=lambda one: len(one.wrong))
            crowd.wrong.pop(next(iter(crowd.wrong)))
        incident.wrong[news.begins] = news
        if incident.told:
            incident.late[news.begins] = now

    def due(self) -> Iterator[Message]:
        now = time.monotonic()
        for incident in list(self.open):
            patience = PASSING if all(news.passes for news in incident.wrong.values()) else STILL
            if not incident.told:
                if now - incident.began < GATHER:
                    continue
                incident.told = True
                yield _begun(incident)
                incident.over, incident.ended = [], None
            elif late := [key for key, since in incident.late.items() if now - since > patience]:
                yield _message(_lines([incident.wrong[key] for key in late]))
                for key in late:
                    del incident.late[key]
            settled = not incident.wrong and now - incident.changed > SETTLED
            if incident.over and (settled or now - (incident.ended or now) > patience):
                yield _over(incident)
                incident.over, incident.beside, incident.ended = [], [], None
            if not incident.wrong and not incident.over:
                self.open.remove(incident)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"told": one.told, "wrong": {key: asdict(news) for key, news in one.wrong.items()}}
            | {"over": [[asdict(begun), asdict(end)] for begun, end in one.over]}
            | {"beside": [asdict(news) for news in one.beside]}
            for one in self.open
        ]

    @classmethod
    def of_json(cls, items: Iterable[dict[str, Any]]) -> "Incidents":
        found = cls()
        for item in items:
            over = [(News(**begun), News(**end)) for begun, end in item["over"]]
            wrong = {key: News(**news) for key, news in item["wrong"].items()}
            beside = [News(**news) for news in item["beside"]]
            ended = time.monotonic() if over else None
            found.open.append(Incident(bool(item["told"]), wrong, {}, over, beside, ended=ended))
        return found

    def keys(self) -> set[str]:
        return {key for one in self.open for key in one.wrong}


def _begun(incident: Incident) -> Message:
    """Return an incident's first message. If a problem has already ended, the message contains its duration."""
    over = [News(f"{begun.text}; over after {_took(begun, end)}", begun.at) for begun, end in incident.over]
    lines = [*over, *_lines([*incident.wrong.values(), *incident.beside])]
    incident.beside = []
    return _message(lines)


def _over(incident: Incident) -> Message:
    (begun, end), *rest = sorted(incident.over, key=lambda pair: pair[0].at)
    last = max((end for _, end in incident.over), key=lambda news: news.at)
    told = f"{end.text}, after {_took(begun, end)}"
    others = [begun for begun, _ in rest]
    beside = {news.about for news in incident.beside if news.ends} - {begun.about for begun, _ in incident.over}
    parts = [*(line.text for line in _lines(others)), *([f"back: {_names(sorted(beside))}"] if beside else [])]
    told += f"; with it: {'; '.join(parts)}" if parts else ""
    still = f"; still: {'; '.join(line.text for line in _lines([*incident.wrong.values()]))}" if incident.wrong else ""
    return Message(f"medsilo: {told}{still}", last.at)


def _lines(news: list[News]) -> list[News]:
    """Merge equal texts about different parties into one text."""
    alike: dict[str, list[News]] = {}
    for one in news:
        alike.setdefault(one.brief or one.text, []).append(one)
    return [
        own[0] if len(own) == 1 else News(f"{brief}: {_names([one.about for one in own])}", own[0].at)
        for brief, own in alike.items()
    ]


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _message(lines: list[News]) -> Message:
    texts = [line.text for line in lines[:LINES]]
    texts += [f"and {len(lines) - LINES} more; see 'medsilo logs'"] if len(lines) > LINES else []
    return Message("medsilo: " + "\n".join(texts), min(line.at for line in lines))


def _took(begun: News, end: News) -> str:
    return duration(max(0.0, end.at - begun.at))


def news_of(line: str, first: bool = False) -> News | None:
    """Convert a line of events.log to an object of the class News. If nobody needs a message about the line, return
    None.
    """
    columns = columns_of(line)
    if columns is None:
        return None
    stamp, level, what, who, study, job, text = columns
    try:
        at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    of_site, of_study = f"site {who} {study}", f"study {study if study != '-' else job}"
    brief = f"{what}{f' in {study}' if study != '-' else ''}"
    warns, told = level == "WARNING", shown(line)
    if what == "started" and who == "-":
        return None if first else News(told, at, joins=True)
    if what in ("joined", "back") and who != "-":
        return News(told, at, ends=of_site, about=who, joins=what == "joined", alone=what == "back")
    if what in ("away", "refused") and who != "-" and warns:
        return News(told, at, begins=of_site, about=who, brief=brief)
    # after these events, the study waits for an automatic restart, or for a disconnected hospital to connect again
    if what == "failed" or (what == "waits" and who == "-"):
        return News(told, at, of_study, about=study, brief=f"{study}: {text}", passes=not warns, changes=True)
    if what in ("resumed", "ended") and who == "-":
        return News(told, at, ends=of_study, about=study)
    if what == "certificate" and not warns:
        return News(told, at, about=who, joins=True)
    # A slow hospital needs no message, because the hospital may still answer. If the study makes no progress, people
    # get a message about the study.
    return News(told, at, about=who) if (warns and what != "slow") or what in LAST else None
