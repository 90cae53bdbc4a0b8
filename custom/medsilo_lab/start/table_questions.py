"""Questions about a table: patients, outcome, codes for 'not known', and inputs that reveal the outcome."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from medsilo.tasks.cells import LIMIT
from medsilo.tasks.table_reader import TableReader
from medsilo_lab.start.questions import Proposal, Question, Values, listed
from medsilo_lab.start.table_folder import (
    DATE,
    EVENTS,
    MANY,
    MOST_CLASSES,
    MOST_LEVELS,
    TARGETS,
    WORDS,
    CaseTable,
    TableFacts,
    plain_name,
)
from medsilo_lab.start.wording import YES, names_a_place, yes_last

TELLS = 0.98  # a single column with at least this AUROC reveals the outcome
HOSPITALS = "hospitals"
LEAST_LINES = 20
CODES = tuple(digit * count for digit in "987" for count in range(1, 6))
GAP = 0.6  # a large number is a code only if every other value is smaller than this fraction of the number
LINE_NUMBERS = frozenset(("id", "nr", "no", "num", "number", "index", "idx", "row", "rownumber", "line", "lfdnr", "x"))
# if the name of an outcome contains one of these words, the value 1 may mean that the event did not occur
TURNED = re.compile("alive|surviv|vital|lebt|censor|zensiert")
NOT_KNOWN = frozenset(  # words that mean an unknown value in any column
    (
        *("unknown", "not known", "missing", "unk", "not available", "not recorded", "not reported", "not documented"),
        *("not assessed", "not done", "no data", "n/a", "n.a.", "n.a", "n.d.", "n/d", "--", "---"),
        *("unbekannt", "nicht bekannt", "fehlt", "keine angabe", "keine angaben", "k.a.", "k. a.", "k.a", "k/a"),
        *("nicht erhoben", "nicht erfasst", "nicht dokumentiert", "inconnu", "inconnue", "non connu", "non renseigné"),
        *("no consta", "sin datos", "sin dato", "desconocido", "desconocida", "no disponible", "s/d", "sconosciuto"),
        *("non noto", "non disponibile", "non rilevato", "desconhecido", "sem dados", "onbekend", "nezname"),
    )
)
# words that mean an unknown value in the outcome column, but may be known values in input columns
UNKNOWN = NOT_KNOWN | frozenset(
    (
        *("pending", "ausstehend", "tbd", "offen", "indeterminate", "nd", "nk", "ne", "n.e.", "not evaluable"),
        *("not assessable", "nicht beurteilbar", "nicht auswertbar"),
    )
)
DAMAGED = re.compile(r"\d(?:[.,]\d+)?[eE]\+\d+")  # matches a long number that Excel has rounded
DEAD = frozenset(("dead", "died", "deceased", "tot", "verstorben", "gestorben", "décédé", "fallecido", "deceduto"))
ENTRY = frozenset(("start", "tstart", "starttime", "timestart", "entry", "entrytime", "begin"))
EXIT = frozenset(("stop", "tstop", "stoptime", "timestop", "exit", "exittime", "end", "endtime"))
TIMES = {"event": ("todeath", "todeceased", "toevent"), "seen": ("lastfollowup", "tofollowup", "lastcontact")}
BEGINS = ("diag", "surg", "operat", "random", "enrol", "inclus", "admis", "begin", "baseline", "aufnahme", "op")
ENDS: tuple[str, ...] = (
    "lastcontact",
    "lastfollowup",
    "followup",
    "fu",
    "lastseen",
    "lastvisit",
    "lastalive",
    "death",
    "censor",
)
ENDS += ("letzterkontakt", "dernierenouvelle", "ultimocontacto", "status", "lfu")
AFTER = re.compile(  # matches a column name which shows that the column is known only after the outcome
    r"discharg|lengthofstay|hospitalstay|autopsy|morgue|causeofdeath|deathcause|dateofdeath|deathdate|hospice|"
    r"entlass|liegedauer|verweildauer|todesursache|sortie|dureedesejour|alta$|fechadealta|dimission|"
    r"readmi|postop|followup|lastcontact|lastvisit|outcome|^los$|losdays|losd$|billing|drg"
)
# first letter of the name of a unit of time → number of days
PERIODS = {"d": 1.0, "t": 1.0, "w": 7.0, "m": 365 / 12, "y": 365.0, "j": 365.0}
PERIOD = "d|days?|tage?|w|wks?|weeks?|wochen?|mo?|mon|months?|monate?|y|yrs?|years?|jahre?"
AT = re.compile(  # matches a time at the end of a column name, as in crp_d30, mort_90d and month 6
    rf"(?:^|[\W_])(?:(?P<unit>{PERIOD})[\W_]?(?P<count>\d{{1,4}})|(?P<count_>\d{{1,4}})[\W_]?(?P<unit_>{PERIOD}))$"
)
ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
TYPED = re.compile(r"[\W_]+")


def facts_of(seen: Proposal) -> tuple[TableFacts, CaseTable] | None:
    """Return the facts that were found about a hospital's table, and the table. If the hospital's data are not a table,
    return None.
    """
    facts = seen.sight.facts
    if not isinstance(facts, TableFacts):
        return None
    only = next(iter(facts.tables.values())) if len(facts.tables) == 1 else None
    table = facts.tables.get(seen.site, only)
    return (facts, table) if table else None


def grouped(table: CaseTable, name: str) -> str:
    own = table.of(name)
    counts = np.bincount(own.codes[own.codes >= 0])
    least, most = int(counts.min()), int(counts.max())
    each = f"{least} to {most} lines" if least < most else f"{most} line{'s' * (most > 1)}"
    return f"{listed(own.distinct[:3], len(own.distinct))}: {len(own.distinct)} values, {each} each"


def _named(answer: str) -> set[str]:
    return {name.strip() for name in answer.split(",") if name.strip()}


# ---------------------------------------------------------------------------------------------------- patients
def patients(seen: Proposal) -> Iterator[Question]:
    if (found := facts_of(seen)) is None or "patient" in found[1].said:
        return
    _, table = found
    named = [name for name in table.patients_called if "name" not in plain_name(name)] or table.patients_called
    alone: Mapping[str, Values] = {"each line is a patient": {"table.patient": ""}}

    def by(name: str) -> Values:
        return {"table.patient": table_column(table, name)}

    grouping = [name for name in named if len(table.distinct(name)) < table.of(name).filled]
    only = named[0] if len(named) == 1 else None
    if not named or (only and plain_name(only) in LINE_NUMBERS and not grouping):
        evidence = "; ".join(f"{name} ({grouped(table, name)})" for name in _like_names(table)[:4])
        what = f"column {only!r} numbers the lines, so " if only else ""
        yield Question(
            "patients",
            f"{what}nothing names the patient of {table.lines} lines; columns that could: {evidence or 'none'}. Is "
            "each line a patient of its own? Else name the column that says whose it is",
            alone,
            free=by,
        )
        return
    distinct = {name: len(table.distinct(name)) for name in named}
    if len({*map(distinct.__getitem__, named)}) > 1 or (len(named) > 1 and not _nested(table, named[0], named[1:])):
        order = sorted(named, key=distinct.__getitem__)
        evidence = "; ".join(f"{name} ({grouped(table, name)})" for name in order)
        yield Question(
            "patients",
            f"{len(named)} columns could name the patients: {evidence}. Which does?",
            {name: by(name) for name in order},
            safe=_nested(table, order[0], order[1:]),
            free=by,
        )
        return
    name = table.patient or named[0]
    yield from _odd_names(table, name)


def table_column(table: CaseTable, name: str) -> str:
    from medsilo.core.errors import DataError

    if name not in table.columns:
        raise DataError(f"{name!r} is no column of {table.path.name}; there are {listed([*table.columns])}")
    return name


def _like_names(table: CaseTable) -> list[str]:
    """Return the columns that may contain patients: columns with many different values, some of which occur in several
    lines.
    """
    found = []
    for name in table.columns:
        own = table.of(name)
        numbers = own.numbers[own.known]
        together = (np.diff(own.codes) != 0).sum() == len(own.distinct) - 1
        whole = (np.nan_to_num(numbers, nan=0.5) % 1 == 0) & ((numbers >= 1000) | together)
        if table.lines / 20 < len(own.distinct) < own.filled and (whole | np.isnan(numbers)).all():
            found.append(name)
    return sorted(found, key=lambda name: len(table.distinct(name)))


def _nested(table: CaseTable, coarse: str, others: Sequence[str]) -> bool:
    """Return True if each value of each column in `others` occurs with only one value of the column `coarse`."""
    first = table.of(coarse).codes
    for name in others:
        own = table.of(name).codes
        pairs = np.unique(np.stack([own, first])[:, (own >= 0) & (first >= 0)], axis=1)
        if len(np.unique(pairs[0])) < pairs.shape[1]:
            return False
    return bool((first >= 0).all())


def plain_spelling(name: str) -> str:
    """Normalise a name: remove differences of case, punctuation and leading zeros."""
    letters = name.casefold() if name.isalnum() else TYPED.sub("", name.casefold())
    return ZEROS.sub("", letters) if "0" in letters else letters


def _odd_names(table: CaseTable, name: str) -> Iterator[Question]:
    own = table.of(name)
    if damaged := [value for value in own.column.values if DAMAGED.fullmatch(value)]:
        yield Question(
            "rounded",
            f"column {name!r} has numbers that a program for tables rounded ({listed(damaged)}), so that several "
            "patients may have one. Are they to be taken as they are? If not, export the column as text",
            {"take them as they are": {}},
        )
        return
    values = [*filter(None, own.column.values)]  # leading zeros are kept, because 0007 and 7 may be different patients
    spelt = [plain_spelling(value) for value in values]
    counts = Counter(spelt)
    if len(counts) < len(values):
        groups: dict[str, list[str]] = {}
        for value, plain in sorted(zip(values, spelt, strict=True)):
            if counts[plain] > 1:
                groups.setdefault(plain, []).append(value)
        alike = [*groups.values()]
        evidence = "; ".join(" and ".join(values) for values in alike[:3])
        yield Question(
            "spelling",
            f"{len(alike)} patients of column {name!r} differ from others by letters' size, punctuation or zeros "
            f"alone: {evidence}. Are they different people? If not, correct the table first",
            {"they are different people": {}},
        )
    lacking = table.lines - own.filled
    if lacking > 0.2 * table.lines and own.codes[0] >= 0:
        yield Question(
            "nobody",
            f"column {name!r} is empty in {lacking} of {table.lines} lines, as in a sheet with merged cells. Are these "
            "lines to be left out? If not, write the patient into each line first",
            {"leave them out": {}},
        )


def whose(seen: Proposal) -> Iterator[Question]:
    """Ask whether each table belongs to one hospital, or whether a column names the hospital of each line."""
    if (found := facts_of(seen)) is None:
        return
    facts, _ = found
    if facts.by_column:
        sites = listed([f"{name} ({count})" for name, count in facts.sites.items()])
        yield Question(
            "research",
            f"column {facts.by_column!r} says whose a line is: {sites}. Are these hospitals, which learn together as "
            "in research, or is the table of one hospital?",
            {HOSPITALS: {}, "one hospital": {"table.alone": True}},
            safe=True,
        )
    tables = facts.tables.values()
    called = {table.path.stem if table.path.parent == facts.folder else table.path.parent.name for table in tables}
    if len(tables) < 2 or seen.sight.hospitals or all(map(names_a_place, called)):
        return
    shown = [f"{own.path.name} ({own.lines} lines, {site} in the plan)" for site, own in facts.tables.items()]
    names = [own.distinct(own.patient) for own in tables if own.patient and not _counts_up(own, own.patient)]
    many = Counter(value for own in names for value in own)
    twice = sum(count > 1 for count in many.values())
    also = f"; {twice} patients are in two of them, as in copies" if twice else ""
    yield Question(
        "tables",
        f"{len(facts.tables)} tables: {listed(shown)}{also}. Is each a hospital's? A plan names them as shown, or as "
        "their files",
        {"hospitals, as shown": {}, "hospitals, as their files": {"table.hospitals": True}},
        safe=not twice,
        of_all=True,
    )


def _counts_up(table: CaseTable, name: str) -> bool:
    numbers = table.of(name).numbers[table.of(name).known]
    return bool(len(numbers)) and bool((np.abs(numbers) <= 2 * len(numbers)).all())


def hospitals(seen: Proposal) -> Iterator[Question]:
    """If a patient has the same name or number at two hospitals, ask whether this is one person. Ask about lines that
    are identical at two hospitals.
    """
    if (found := facts_of(seen)) is None or not (site := found[1].site):
        return
    _, table = found
    if (patient := table.patient) is None:
        return
    where, who = table.of(site), table.of(patient)
    known = (where.codes >= 0) & (who.codes >= 0)
    pairs = np.unique(np.stack([who.codes, where.codes])[:, known], axis=1)
    several = np.flatnonzero(np.bincount(pairs[0]) > 1)
    if len(several):
        names = [who.distinct[place] for place in several[:8].tolist()]
        yield Question(
            "hospitals",
            f"{len(several)} patients have lines at several hospitals by column {site!r}: "
            f"{listed(names, len(several))}. Are these the same people, as when they moved? If hospitals number their "
            "own patients, correct the table",
            {"the same people": {}},
        )
    read = [*_numbers(table, exclude=(*table.learned, patient, site))]
    if len(read) < 2:
        return
    rows = np.column_stack([table.of(name).of_lines for name in [*read]])
    full = ~np.isnan(rows).any(1) & (where.codes >= 0)
    _, line = np.unique(rows[full], axis=0, return_inverse=True)
    pairs = np.unique(np.stack([line.reshape(-1), where.codes[full]]), axis=1)
    copies = int((np.bincount(pairs[0]) > 1).sum()) if pairs.size else 0
    if copies > max(4, 0.02 * table.lines):
        yield Question(
            "copies",
            f"{copies} lines are alike at two hospitals by column {site!r}, in {listed(read)}. Are they of different "
            "people? If not, remove the copies first",
            {"they are different people": {}},
        )


# ---------------------------------------------------------------------------------------------------- the outcome
def outcome(seen: Proposal) -> Iterator[Question]:
    if (found := facts_of(seen)) is None:
        return
    facts, table = found
    if table.asked or "survival" in table.said:
        return
    learned = facts.outcome_of(table)
    names = table.called((*TARGETS, *EVENTS), lambda name: 2 <= len(table.distinct(name)) <= MOST_CLASSES)
    closed = {*learned, *table.said.get("left", {}), *table.patients_called}
    after = [name for name in names if AFTER.search(plain_name(name)) and not plain_name(name).startswith("outcome")]
    others = [name for name in names if name not in closed and name not in after]
    others = [name for name in others if table.of(name).filled >= table.lines / 3]
    if not others:
        return
    answers: dict[str, Values] = {" and ".join(learned): {}}
    if table.survival and facts.kind != "survival":
        answers[" and ".join(table.survival)] = {"table.survival": [*table.survival]}
    for name in others:
        timed = facts.kind == "survival" and name in table.called(EVENTS)
        answers[name] = {"table.survival": [learned[0], name]} if timed else {"table.target": name}
    shown = "; ".join(f"{name} ({_told(table, name)})" for name in (learned[-1], *others))
    yield Question(
        "outcome",
        f"several columns could be what is learned: {shown}. Which is it? Those that would tell it are not read",
        answers,
        free=lambda answer: {"table.target": table_column(table, answer)},
    )


def _told(table: CaseTable, name: str) -> str:
    own = table.of(name)
    counts = np.bincount(own.codes[own.codes >= 0], minlength=len(own.distinct))
    if len(own.distinct) > MOST_CLASSES:
        return f"{len(own.distinct)} values"
    return ", ".join(f"{value}: {count} lines" for value, count in zip(own.distinct, counts.tolist(), strict=True))


def event(seen: Proposal) -> Iterator[Question]:
    """Ask which value of the event column means that the event occurred, unless the values are 0 and 1, or words such
    as "dead" and "alive".
    """
    if (found := facts_of(seen)) is None or found[0].kind != "survival" or "event" in found[1].said:
        return
    facts, table = found
    name = facts.outcome_of(table)[1]
    values = table.distinct(name)
    said = [value for value in values if value.casefold() in YES]
    turned = TURNED.search(plain_name(name))
    dead = [value for value in values if value.casefold() in DEAD]
    if len(dead) == 1 or (not turned and (values in (["0", "1"], ["1"]) or len(said) == 1)):
        return
    order = sorted(values) if turned else yes_last(values)[::-1]
    yield Question(
        "event",
        f"column {name!r} is the event ({_told(table, name)}). Which value says that it came?",
        {value: {"table.event": value} for value in order},
    )


def survival(seen: Proposal) -> Iterator[Question]:
    """Ask whether two dates and an event are a survival outcome. medsilo cannot learn survival if patients enter the
    study at different times. If a column has such entry times, ask whether to learn the event as classes, without
    times.
    """
    if (found := facts_of(seen)) is None or found[0].kind != "classification" or "survival" in found[1].said:
        return
    facts, table = found
    [target] = facts.outcome_of(table)
    begins = [name for name in table.columns if plain_name(name) in ENTRY and table.is_numbers(name)]
    ends = [name for name in table.columns if plain_name(name) in EXIT and table.is_numbers(name)]
    if begins and ends and len(table.distinct(target)) == 2:
        first, last = begins[0], ends[0]
        left = {**table.said.get("left", {}), first: "is a time of entry", last: "is a time of exit"}
        yield Question(
            "entry",
            f"{first!r}, {last!r} and {target!r} are a survival with times of entry, which medsilo does not learn. Are "
            f"{target!r} to be learned as classes, without times? If not, write one line for each patient, with the "
            "time from the first entry to the event",
            {"as classes": {"table.left": left}},
        )
        return
    times = {word: [name for name in table.columns if _is_time(table, name, words)] for word, words in TIMES.items()}
    if all(times.values()) and len(table.distinct(target)) == 2:
        until, seen_last = (time[0] for time in times.values())
        yield Question(
            "survival",
            f"{until!r} and {seen_last!r} are the two times of a survival, of which {target!r} has "
            f"{_told(table, target)}. Is {target!r} to be learned as classes, however long somebody was seen? If not, "
            "write one column with the time to the event or to the last visit",
            {"classes": {}},
        )
        return
    dates = [name for name in table.columns if _is_date(table, name)]
    first_date = next((name for word in BEGINS for name in dates if word in plain_name(name)), None)
    last_date = next((name for word in ENDS for name in dates if word in plain_name(name)), None)
    classes = table.distinct(target)
    mortal = target in table.called(EVENTS) or any(value.casefold() in DEAD for value in classes)
    if first_date and last_date and first_date != last_date and mortal and len(classes) == 2:
        name = next(free for free in ("time", "survival_days", "days_between") if free not in table.columns)
        spans = {
            "table.spans": {name: [first_date, last_date]},
            "table.survival": [name, target],
            "table.target": None,
        }
        yield Question(
            "survival",
            f"{first_date!r} and {last_date!r} are dates, and {target!r} has {_told(table, target)}. Is the time from "
            "one to the other to be learned, as survival?",
            {"survival": spans, "classes": {}},
        )


def _is_time(table: CaseTable, name: str, words: Sequence[str]) -> bool:
    """Return True if the name of a column contains a word in `words`, and if the column has many different numbers."""
    if not any(word in plain_name(name) for word in words):
        return False
    own = table.of(name)
    return len(np.unique(own.numbers[own.known & ~np.isnan(own.numbers)])) > LEAST_LINES / 2


def _is_date(table: CaseTable, name: str) -> bool:
    own = table.of(name).distinct
    return bool(own) and sum(bool(DATE.match(value)) for value in own[:200]) > 0.9 * len(own[:200])


# ---------------------------------------------------------------------------------------------------- values
def codes(seen: Proposal) -> Iterator[Question]:
    """Ask about numbers such as 999 and -9, and words such as 'no consta', that may stand for unknown values."""
    if (found := facts_of(seen)) is None:
        return
    _, table = found
    known = table.said.get("codes", {})
    odd = {name: own for name in _read_or_learned(*found) if name not in known and (own := codes_in(table, name))}
    learned = found[0].outcome_of(table)
    for name in _read_or_learned(*found):
        if name in known or (name in learned and not (found[0].labels and name == learned[-1])):
            continue
        words = [
            value for value in table.distinct(name) if value.casefold() in (UNKNOWN if name in learned else NOT_KNOWN)
        ]
        if words and len(table.distinct(name)) - len(words) > 1:
            odd[name] = [*odd.get(name, []), *words]
    for name, why in found[0].left.items():
        if why == WORDS and name not in known and (texts := _words_among_numbers(table, name)):
            odd[name] = texts
    if odd:
        shown = "; ".join(f"{name}: {', '.join(_counted(table, name, own))}" for name, own in odd.items())
        yield Question(
            "codes",
            f"values that may stand for 'not known': {shown}. Are they to be taken for missing? Else name the columns "
            "in which they are, divided by commas",
            {"not known": {"table.codes": {**known, **odd}}, "they are values": {}},
            safe=True,
            free=lambda answer: {"table.codes": {**known, **{name: odd.get(name, []) for name in _named(answer)}}},
        )


def limits(seen: Proposal) -> Iterator[Question]:
    if (found := facts_of(seen)) is None:
        return
    facts, table = found
    others = {name for name, why in facts.left.items() if why != WORDS and not why.startswith(MANY)}
    closed = {*others, *facts.outcome_of(table), *table.said.get("limits", ())}
    odd = {name: own for name in table.columns if name not in closed and (own := limits_in(table, name))}
    odd = {name: own for name, own in odd.items() if not {*own} <= {*table.said.get("codes", {}).get(name, ())}}
    if not odd:
        return
    shown = [
        f"{name}: {int(table.of(name).column.isin({*own}).sum())} of {table.of(name).filled} values ({listed(own)})"
        for name, own in odd.items()
    ]
    codes, left = table.said.get("codes", {}), table.said.get("left", {})
    used = [*table.said.get("limits", ())]
    apart = dict.fromkeys(odd, "has values below or above what could be measured")

    def named(answer: str) -> Values:
        asked = [table_column(table, name) for name in _named(answer)]
        return {
            "table.limits": [*used, *asked],
            "table.left": left | {own: why for own, why in apart.items() if own not in asked},
        }

    yield Question(
        "limits",
        f"values below or above a limit of detection: {'; '.join(shown)}. Is the limit to be used in their place? Else "
        "name the columns in which it is, divided by commas; others are left out",
        {
            "use the limit": {"table.limits": [*used, *odd]},
            "count as missing": {
                "table.codes": codes | {name: [*codes.get(name, ()), *own] for name, own in odd.items()}
            },
            "leave the columns out": {"table.left": left | apart},
        },
        safe=True,
        free=named,
    )


def limits_in(table: CaseTable, name: str) -> list[str]:
    """Return the values of a numeric column that are detection limits, such as <0,5."""

    def is_number(text: str) -> bool:
        return TableReader.number(text, table.decimal) is not None

    own = table.of(name)
    there = [value for value, known in zip(own.column.values, own.known.tolist(), strict=True) if known]
    texts = [value for value in there if not is_number(value)]
    found = [text for text in texts if LIMIT.match(text) and is_number(LIMIT.sub("", text, 1))]
    words = [text for text in texts if text not in found]
    numbers = len(there) - len(texts)
    return [] if numbers < 3 or len(words) > 3 or any(re.search(r"\d", text) for text in words) else found


def _words_among_numbers(table: CaseTable, name: str) -> list[str]:
    """Return the texts without digits in a column of numbers. If the column has more than three different texts without
    digits, return an empty list.
    """
    own = table.of(name)
    texts = [value for value in own.distinct if TableReader.number(value) is None]
    several = len(own.distinct) - len(texts) > MOST_CLASSES and own.texts < table.lines / 2
    if not several or not 0 < len(texts) <= 3 or any(re.search(r"\d", text) for text in texts):
        return []
    return texts


def _counted(table: CaseTable, name: str, values: Sequence[str]) -> list[str]:
    own = table.of(name)
    counts = np.bincount(own.codes[own.codes >= 0], minlength=len(own.distinct))
    return [f"{value} in {counts[own.distinct.index(value)]} lines" for value in values]


def codes_in(table: CaseTable, name: str) -> list[str]:
    """Return the numbers in a column that look like codes for unknown values, such as 99, 999 and -9.

    A code is a negative number among positive numbers, or a number such as 99 or 888 that is far above all other
    numbers.
    """
    numbers = table.of(name).numbers[table.of(name).known]
    if not len(numbers) or np.isnan(numbers).any():
        return []
    if (numbers >= 0).all() and f"{numbers.max():g}".replace(".", "") not in CODES:
        return []
    values = [(float(TableReader.number(value) or 0), value) for value in table.distinct(name)]
    found = [value for number, value in values if number < 0 and value.lstrip("-") in (*CODES, "1", "2", "3")]
    rest = [number for number, value in values if value not in found]
    if len(found) < sum(number < 0 for number, _ in values) or len(rest) < 2 or len(found) > 3:
        found, rest = [], [number for number, _ in values]
    tops: list[str] = []
    for number, value in sorted(values, reverse=True):
        if value.replace(".", "") not in CODES or number not in rest or len(rest) < 3:
            break
        below = [other for other in rest if other < number]
        short = len(rest) <= MOST_LEVELS
        near = next((other for other in sorted(below, reverse=True) if str(int(other)) not in CODES), below[-1])
        apart = near <= GAP * number if not short else (near < number - 1 and near <= GAP * number)
        if len(value) < 2 and not (short and len(below) <= MOST_CLASSES):
            break
        if not apart and not (str(int(number)) in CODES and str(int(max(below))) in tops):
            break
        tops.append(value)
        rest.remove(number)
    return [*found, *tops]


def _numbers(table: CaseTable, exclude: Sequence[str]) -> Iterator[str]:
    for name in table.columns:
        if name not in exclude and table.of(name).filled and table.is_numbers(name):
            yield name


def _read_or_learned(facts: TableFacts, table: CaseTable) -> list[str]:
    read = [column["name"] if isinstance(column, dict) else column for column in facts.columns]
    return [*read, *(name for name in facts.outcome_of(table) if name in table.columns)]


# ---------------------------------------------------------------------------------------------------- inputs
def inputs(seen: Proposal) -> Iterator[Question]:
    """Ask whether to leave out inputs that reveal the outcome, are measured after the outcome,
    or are empty if the outcome is known.
    """
    if (found := facts_of(seen)) is None:
        return
    facts, table = found
    read = [name for name in _read_or_learned(*found) if name not in facts.outcome_of(table)]
    left = table.said.get("left", {})

    def without(names: Mapping[str, str]) -> Mapping[str, Values]:
        return {"leave them out": {"table.left": {**left, **names}}, "keep them": {}}

    def keeping(names: Mapping[str, str]) -> Callable[[str], Values]:
        return lambda answer: {"table.left": {**left, **{own: names[own] for own in names.keys() - _named(answer)}}}

    if table.said.get("fill"):
        fill = table.said["fill"]
        yield Question(
            "visits",
            f"{listed(fill)} are empty in all lines that have an outcome, and stand in other lines of the same "
            "patients, as where baseline and follow-up have lines of their own. Is their value in a patient's earlier "
            "line to be taken?",
            {"take them": {"table.fill": fill}, "leave them out": {"table.fill": []}},
            safe=True,
        )
    learned = facts.outcome_of(table)[-1]
    later = {name: days for name in read if (days := _days_in(name)) > (_days_in(learned) or math.inf)}
    again = [name for name in read if facts.kind != "regression" and _days_in(name) and _stem(name) == _stem(learned)]
    told = {name: name for name in read if AFTER.search(plain_name(name)) or name in again}
    told |= {name: f"{name} (day {days:g}; {learned}: day {_days_in(learned):g})" for name, days in later.items()}
    after = dict.fromkeys(told, "is known after the outcome")
    if after:
        yield Question(
            "after",
            f"{listed([*told.values()])} may be known only after the outcome, or with it. Leave them out? Else name "
            "those that are known before, divided by commas",
            without(after),
            safe=True,
            free=keeping(after),
        )
    areas = {name: area for name in read if name not in after and (area := tells(facts, table, name)) > TELLS}
    if areas:
        shown = ", ".join(f"{name} ({area:.3f})" for name, area in areas.items())
        names = dict.fromkeys(areas, "tells the outcome alone")
        yield Question(
            "telling",
            f"these columns alone tell the outcome, by the area under the curve: {shown}. Leave them out? Else name "
            "those that are known before it, divided by commas",
            without(names),
            safe=True,
            free=keeping(names),
        )
    known = table.has_outcome() if table.learned else np.zeros(0, bool)
    if len(known) and known.any() and not known.all():
        lacking = [name for name in read if (table.of(name).codes[known] < 0).all()]
        if empty := dict.fromkeys(lacking, "is empty where the outcome is known"):
            yield Question(
                "empty",
                f"{listed([*empty])} are empty in all {int(known.sum())} lines that have an outcome. Leave them out?",
                without(empty),
                safe=True,
            )


def _days_in(name: str) -> float:
    """Return the day of a measurement as the column name states it. If the column name contains no time, return 0.

    >>> _days_in("crp_d30"), _days_in("mort_90d"), _days_in("Month 6"), _days_in("age")
    (30.0, 90.0, 182.5, 0.0)
    """
    found = AT.search(name.lower())
    unit, count = (found["unit"] or found["unit_"], found["count"] or found["count_"]) if found else ("d", "0")
    return int(count) * PERIODS[unit[0]]


def _stem(name: str) -> str:
    return plain_name(AT.sub("", name.lower()))


def tells(facts: TableFacts, table: CaseTable, name: str) -> float:
    """Return the AUROC with which a single column predicts a class or an event. For a numeric outcome, return 1 if
    sorting lines by the column nearly sorts them by the outcome, otherwise 0.
    """
    learned = facts.outcome_of(table)
    own, goal = table.of(name), table.of(learned[-1])
    both = (own.codes >= 0) & (goal.codes >= 0)
    scores = own.of_lines
    if both.sum() < LEAST_LINES or len(goal.distinct) < 2:
        return 0.0
    if facts.kind == "regression" or (facts.kind == "survival" and not np.isnan(scores[both]).any()):
        number = table.of(learned[0]).of_lines
        same = both & ~np.isnan(number) & ~np.isnan(scores)
        steps = np.unique(scores[same])
        if len(steps) > MOST_CLASSES and abs(np.corrcoef(_ranks(scores[same]), _ranks(number[same]))[0, 1]) > TELLS:
            return 1.0
        if facts.kind == "regression":
            return 0.0
    best = 0.0
    for place in range(len(goal.distinct)):
        came = goal.codes[both] == place
        if _is_rare(came):
            continue
        # the score of a category is the fraction of the category's lines in which the event occurred
        if np.isnan(scores[both]).any():
            codes = own.codes[both]
            share = np.bincount(codes, came) / np.maximum(np.bincount(codes), 1)
            area = area_under(share[codes], came)
        else:
            area = area_under(scores[both], came)
        best = max(best, area, 1 - area)
    filled, known = own.codes >= 0, goal.codes >= 0
    if not filled.all() and facts.kind == "classification":
        for place in range(len(goal.distinct)):
            came = goal.codes[known] == place
            if not _is_rare(came):
                area = area_under(filled[known].astype(float), came)
                best = max(best, area, 1 - area)
    return best


def _is_rare(came: np.ndarray) -> bool:
    """Return True if a class has too few lines for an AUROC, as the "class" of a line of totals has."""
    return bool(min(came.sum(), (~came).sum()) < LEAST_LINES / 4)


def _ranks(values: np.ndarray) -> np.ndarray:
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[codes.reshape(-1)]


def area_under(scores: np.ndarray, came: np.ndarray) -> float:
    """Return the area under the ROC curve (Mann and Whitney 1947).

    >>> area_under(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True]))
    0.875
    """
    positive = int(came.sum())
    negative = len(came) - positive
    return float((_ranks(scores)[came].sum() - positive * (positive + 1) / 2) / max(1, positive * negative))


DETECTORS = (whose, patients, hospitals, outcome, survival, event, limits, codes, inputs)
