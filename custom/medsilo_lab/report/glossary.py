"""The terms that pages explain: the first time that one stands on a page, it links to its meaning below."""

import re
from collections.abc import Iterator
from functools import cache

from markupsafe import Markup, escape

TERMS = {  # as a page writes it, in lower case: its meaning in one or two sentences
    "federated training": "Hospitals train one model together. Images and records stay; what training changed in the "
    "model goes to a server, which averages it.",
    "single-site training": "A hospital trains a model with its own patients alone.",
    "seed": "The number that decides chance in a run: first weights, order of cases, and who is tested. Runs with "
    "other seeds show how much of a score is chance.",
    "repetition": "One training from the start, with another seed: another order of cases and other first weights.",
    "round": "Each hospital trains for a while, then the server combines the models and returns the result.",
    "95 % interval": "The range of values that fit these patients and runs. Of 100 such studies about 95 have a range "
    "that includes the true value.",
    "significant": "Larger than chance explains: the interval leaves out zero, also after a correction for the number "
    "of questions (Holm's). With fewer than four repetitions of the training nothing is called so.",
    "better": "The difference is significant, and above zero.",
    "worse": "The difference is significant, and below zero.",
    "inconclusive": "These patients and runs do not decide. It does not mean that there is no difference.",
    "points": "Hundredths of the score: from 0.80 to 0.85 are 5 points.",
    "validation": "Cases that did not train the model, with which the best round is chosen.",
    "test patient": "A patient whose cases neither trained the model nor chose its round.",
    "pooled": "Over the cases of all hospitals together, so a large hospital counts more.",
    "configuration": "One method with its settings: a line of the comparison.",
    "normalisation layer": "A part of the network that rescales what it computes. With another kind of it the network "
    "is another one.",
    "reference": "No federated training: shown for comparison.",
    "accuracy": "The share of cases whose class the model names correctly.",
    "dice": "The overlap of the outline that the model found with the one that was drawn: 0 is none, 1 is the same.",
    "concordance": "The share of pairs of patients whom the model puts in the right order: 0.5 is guessing.",
    "hd95": "The distance between the two outlines that 95 % of their points stay within. Less is better.",
    "sensitivity": "Of the cases that are of the class, the share that is found.",
    "specificity": "Of the cases that are not of the class, the share that is not found.",
    "calibration error": "How far the model's probabilities are from what happens: 0 is best.",
}
STILL = {"a", "button", "code", "h1", "h2", "h3", "nav", "pre", "script", "style", "summary", "svg"}  # holds no link
VERDICTS = {"better", "worse"}  # terms only where nothing else stands beside them
VOID = {"br", "hr", "img", "input", "link", "meta"}
VERDICT = re.compile("(.+)")
TAG = re.compile(r"(<[^>]*>)")
OPENS = re.compile(r"<(/?)(\w+)")


@cache
def _pattern() -> re.Pattern[str]:
    longest_first = sorted(set(TERMS) - VERDICTS, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?:ly|s)?(?![\w-])", re.IGNORECASE)


def anchor(term: str) -> str:
    """Return the id of a term's meaning."""
    return "term-" + re.sub(r"\W+", "-", term).strip("-")


def explained(page: str) -> Markup:
    """Return HTML in which each term links to its meaning where it first stands, and shows it to a pointer.

    Headings, heads of tables, drawings and text that links already stay as they are.
    """
    seen: set[str] = set()
    return Markup("".join(_parts(page, seen)))


def terms_in(page: str) -> list[tuple[str, str, str]]:
    """Return id, name and meaning of the terms that a page links to, in alphabetical order."""
    return [(anchor(term), term, TERMS[term]) for term in sorted(TERMS) if f'href="#{anchor(term)}"' in page]


def _parts(page: str, seen: set[str]) -> Iterator[str]:
    within: list[str] = []  # open elements that hold no link
    for part in TAG.split(page):
        if opens := OPENS.match(part):
            closes, name = opens.groups()
            if closes and within and name == within[-1]:
                within.pop()
            elif not closes and name not in VOID and (name in STILL or (within and name == within[-1])):
                within.append(name)
            yield part
        else:
            pattern = VERDICT if part in VERDICTS else _pattern()
            yield part if within else pattern.sub(lambda word: _linked(word, seen), part)


def _linked(word: re.Match[str], seen: set[str]) -> str:
    term = word[1].lower()
    if term in seen:
        return word[0]
    seen.add(term)
    return f'<a class="term" href="#{anchor(term)}" title="{escape(TERMS[term])}">{word[0]}</a>'
