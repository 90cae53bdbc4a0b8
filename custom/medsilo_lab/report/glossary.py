"""Explain the terms of a page at the end of the page."""

import re

TERMS = {
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
    "balanced_accuracy": "The share of cases whose class the model names correctly, in each class, then averaged over "
    "classes.",
    "auroc": "The share of pairs of cases of different classes that the model puts in the right order: 0.5 is "
    "guessing.",
    "label_accuracy": "The share of findings that the model says rightly, of all that a case can have.",
    "dice": "The overlap of the outline that the model found with the one that was drawn: 0 is none, 1 is the same.",
    "concordance": "The share of pairs of patients whom the model puts in the right order: 0.5 is guessing.",
    "hd95": "The distance between the two outlines that 95 % of their points stay within. Less is better.",
    "sensitivity": "Of the cases that are of the class, the share that is found.",
    "specificity": "Of the cases that are not of the class, the share that is not found.",
    "calibration error": "How far the model's probabilities are from what happens: 0 is best.",
}
VERDICTS = {"better", "worse"}  # a word is explained only if it is the whole text of an HTML element of the page
NO_WORDS = re.compile(r"<(svg|pre|code|style)\b.*?</\1>|<[^>]*>", re.DOTALL)


def terms_in(page: str) -> list[tuple[str, str]]:
    text = NO_WORDS.sub(" ", page)

    def stands(term: str) -> bool:
        if term in VERDICTS:
            return f">{term}<" in page
        return re.search(rf"(?<![\w-]){re.escape(term)}(?:ly|s)?(?![\w-])", text, re.IGNORECASE) is not None

    return [(term, meaning) for term, meaning in sorted(TERMS.items()) if stands(term)]
