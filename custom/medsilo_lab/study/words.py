"""A difference and a verdict in words, as pages, sheets and the terminal say them. Light: without numpy."""

from medsilo.core.text import counted
from medsilo_lab.study.verdict_file import HospitalGain, Needed, PairedDifference

OF_PATIENTS = {  # scores that are a share of something that a reader can count
    "accuracy": "test cases, {} classified correctly",
    "concordance": "pairs of patients, {} put in the right order",
}
MOST = "1,000"  # test patients that are named
LITTLE = 0.02  # a difference that is worth no federation: no smaller one is planned for


def repetitions(number: int) -> str:
    """Return how often the training was repeated, each time with another seed."""
    return f"{counted(number, 'repetition')} of the training"


def points(value: float) -> str:
    """Return a difference in points, with its sign."""
    return f"{round(100 * value, 1) + 0.0:+.1f}".replace("-", "−")  # and never −0.0


def evidence_of(found: PairedDifference, seeds: bool = True) -> str:
    """Return a difference's interval, and what it rests on. seeds: whether nothing beside says how many there are, and
    that it is corrected."""
    tested = [f"{found.patients:,} test patient{'s' * (found.patients != 1)}"] if found.patients else []
    told, (low, high) = (
        ", ".join([*tested, *([repetitions(found.seeds)] if seeds or not tested else [])]),
        found.interval,
    )
    return f"95 % interval{', corrected,' if found.corrected and seeds else ''} {points(low)} to {points(high)}; {told}"


def in_points(found: PairedDifference, seeds: bool = True) -> str:
    """Return a difference with its interval, and what it rests on; seeds as above."""
    return f"{points(found.mean)} points ({evidence_of(found, seeds)})"


def in_patients(metric: str, gain: float) -> str:
    """Return how many more of a hundred are right, or of a thousand; nothing for a score that is no such share."""
    if metric not in OF_PATIENTS:
        return ""
    whole = 100 if abs(gain) >= 0.01 else 1000
    number = round(whole * abs(gain))
    more = f"{number} {'more' if gain > 0 else 'fewer'} {'is' if number == 1 else 'are'}" if number else "as many are"
    return f"of {whole:,} {OF_PATIENTS[metric].format(more)}"


def needed_in_words(needed: Needed | None, now: PairedDifference | None = None) -> str:
    """Return what a comparison has too little of; nothing where that is not known. now: what it has."""
    if needed is None:
        return ""
    of_patients = needed.of == "test patients"
    unit, has = "test patients" if of_patients else "repetitions of the training", ""
    if now and (here := now.patients if of_patients else now.seeds):
        has = f" (now {here:,})"
    if needed.difference is None:
        return f"a verdict needs {needed.number} {unit}{has}"
    number = f"more than {MOST}" if needed.number is None else f"about {needed.number:,}"
    least = ", the least worth planning for" if needed.difference == LITTLE else ""
    return f"{number} {unit}{has} would show a difference of {100 * needed.difference:.1f} points{least}"


def verdict_in_words(found: HospitalGain) -> str:
    """Return the verdict with its difference, its interval and what it rests on, and what is missing."""
    missing = needed_in_words(found.needed, found.gain)
    return f"{found.word}: {found.method} {in_points(found.gain)}{f'; {missing}' if missing else ''}"
