"""Describe differences and verdicts in words, for pages, decision sheets and the terminal. This module does not import
numpy.
"""

from medsilo.core.text import counted
from medsilo_lab.study.verdict_file import MOST_PATIENTS, MOST_SEEDS, HospitalVerdict, Needed, PairedDifference

OF_PATIENTS = {
    "accuracy": "test cases, {} classified correctly",
    "auroc": "pairs of cases of different classes, {} put in the right order",
    "concordance": "pairs of patients, {} put in the right order",
}
NO_INTERVAL = "no interval, as nothing tells how others differ"
LITTLE = 0.02  # smallest difference that is relevant in practice; sample sizes are calculated for this difference


def repetitions(number: int) -> str:
    return f"{counted(number, 'repetition')} of the training"


def points(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f}".replace("-", "−")  # the addition of 0.0 turns −0.0 into 0.0


def interval_in_points(difference: PairedDifference) -> str:
    low, high = difference.interval
    return "no interval" if difference.open else f"{points(low)} to {points(high)}"


def evidence_of(difference: PairedDifference, seeds: bool = True) -> str:
    """Describe the confidence interval and the sample of a difference.

    Args:
        seeds: True to add the number of seeds and the correction for multiple comparisons
    """
    tested = [f"{difference.patients:,} test patient{'s' * (difference.patients != 1)}"] if difference.patients else []
    told = ", ".join([*tested, *([repetitions(difference.seeds)] if seeds or not tested else [])])
    if difference.open:
        return f"{NO_INTERVAL}; {told}"
    corrected = ", corrected," if difference.corrected and seeds else ""
    return f"95 % interval{corrected} {interval_in_points(difference)} for patients like these; {told}"


def if_unseen(difference: PairedDifference) -> str:
    """Describe in words the confidence interval that allows for untested kinds of patients, and the assumption behind
    this interval. If the interval is unknown, return an empty text.
    """
    if difference.unseen is None or difference.failing is None or difference.open:
        return ""
    low, high = difference.unseen
    share = f"{100 * difference.failing:.0f}" if difference.failing >= 0.01 else "1"
    return f"if a kind of patient not seen here fails, at most {share} % of all, {points(low)} to {points(high)}"


def in_points(difference: PairedDifference, seeds: bool = True) -> str:
    """Describe a difference with its confidence interval and its sample. If `seeds` is true, also describe the number
    of seeds and the correction for multiple comparisons.
    """
    return f"{points(difference.mean)} points ({evidence_of(difference, seeds)})"


def in_patients(metric: str, difference: float) -> str:
    """Describe a difference between two scores as a number of cases in a hundred or in a thousand. If the score is
    neither a fraction of cases nor a fraction of pairs, return an empty text.
    """
    if metric not in OF_PATIENTS:
        return ""
    whole = 100 if abs(difference) >= 0.01 else 1000
    number = round(whole * abs(difference))
    more = (
        f"{number} {'more' if difference > 0 else 'fewer'} {'is' if number == 1 else 'are'}"
        if number
        else "as many are"
    )
    return f"of {whole:,} {OF_PATIENTS[metric].format(more)}"


def needed_in_words(needed: Needed | None, now: PairedDifference | None = None) -> str:
    """Describe the sample that a comparison needs for a clear verdict. If the necessary sample is unknown, return an
    empty text.

    Args:
        now: the present sample
    """
    if needed is None:
        return ""
    of_patients, together = needed.of == "test patients", needed.hospitals > 1
    unit = "test patients" if of_patients else "repetitions of the training"
    if together and of_patients:
        unit += " at each hospital"
    here = now and (now.seeds if not of_patients else None if together else now.patients)
    has = f" (now {here:,})" if here else ""
    if needed.difference is None:
        if needed.reach is None:
            return f"a verdict needs {needed.number} {unit}{has}"
        return f"too few for a verdict{has}; {needed.number} {unit} would show ±{100 * needed.reach:.1f} points"
    least = ", the least worth planning for" if needed.difference == LITTLE else ""
    difference = f"a difference of {100 * needed.difference:.1f} points{least}"
    if needed.number is None:
        other = "more hospitals" if together else "all hospitals together"
        return (
            f"this cannot be settled here: neither {MOST_PATIENTS} test patients{' at each hospital' * together} nor "
            f"{MOST_SEEDS} repetitions of the training would show {difference}; another score, or {other}, may"
        )
    further = f" and {repetitions(needed.seeds)}" if needed.seeds else ""
    return f"about {needed.number:,} {unit}{further}{has} would show {difference}"


def verdict_in_words(found: HospitalVerdict) -> str:
    """Describe a verdict in words: the difference, its intervals and its sample. If the verdict is not clear, also name
    the sample that a clear verdict needs.
    """
    told = [if_unseen(found.difference), needed_in_words(found.needed, found.difference)]
    return "; ".join([f"{found.word}: {found.method} {in_points(found.difference)}", *filter(None, told)])
