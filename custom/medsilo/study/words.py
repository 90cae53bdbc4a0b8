"""A gain in points and in patients, as pages and the terminal say it. Light: no page brings numpy for it."""

from medsilo.runs.schema import HospitalGain, PairedDifference

OF_PATIENTS = {  # scores that are a share of something that a reader can count
    "accuracy": "test cases, {} classified correctly",
    "concordance": "pairs of patients, {} put in the right order",
}


def points(value: float) -> str:
    """Return a difference in points, with its sign."""
    return f"{100 * value:+.1f}".replace("-", "−")


def in_points(found: PairedDifference) -> str:
    """Return a gain with its interval."""
    return f"{points(found.mean)} points ({points(found.low)} to {points(found.high)})"


def in_patients(metric: str, gain: float) -> str:
    """Return how many more of a hundred are right, or of a thousand; nothing for a score that is no such share."""
    if metric not in OF_PATIENTS:
        return ""
    whole = 100 if abs(gain) >= 0.01 else 1000
    number = round(whole * abs(gain))
    more = f"{number} {'more' if gain > 0 else 'fewer'} {'is' if number == 1 else 'are'}" if number else "as many are"
    return f"of {whole:,} {OF_PATIENTS[metric].format(more)}"


def verdict_in_words(found: HospitalGain) -> str:
    """Return the verdict, with how many patients or seeds are needed where there are too few."""
    if not found.word.startswith("too few"):
        return found.word
    return f"{found.word} to tell" if found.needed is None else f"{found.word}: {found.needed:,} needed"
