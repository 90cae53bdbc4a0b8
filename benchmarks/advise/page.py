"""docs/results/advise.md: what the adviser said of each federation and what came out, beside one answer for all."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from benchmarks.advise.outcomes import COMMITTEE, POINT, Outcome
from docs.markdown import table
from medsilo.study.adviser import leads, ranked
from medsilo.study.adviser_rules import EVERY_RULE

ALWAYS = (COMMITTEE, "fedavg", "fedbn", "ditto")
NAMES = {COMMITTEE: "the four together"}
GOAL, OF = 9, 12  # declared before
FIXED = "5490365"  # the commit whose rules were tried
Choice = Callable[[Outcome], str]
HEAD = """# The adviser, tried on federations that no rule was made from

`medsilo advise` ([evidence](../evidence.md)) names the method that does best in a measuring study, or where none is
clearly ahead the best four, whose models answer together. Here it is held against what came out of every method, on
GENERATED federations: {made} on which its rules were made, and {held} that were run once, after the rules were fixed
(commit {fixed}). Hospitals differ by known amounts in looks, labels, what is asked for, and size
(`benchmarks/advise/federations.py`). Written by

    python -m benchmarks.advise --write

which goes on where it was stopped. All numbers are in `benchmarks/advise/made.csv` and `held_out.csv`.

An answer is right where it is within {point:g} point of the best, in the mean test score and at the worst hospital. The
best is the method with the highest mean, or the four together where theirs is higher. The adviser sees the first half
of the rounds of seven methods with the first seed, together as much work as three and a half trainings, and of them
only what hospitals tell; no test score. Four methods together are four trainings, and at each case four models. Data
are the same for all seeds of training; {seeds}.

Rules that this page had before named one method always. The first ones asked for distances between hospitals, and for
three methods' losses after five rounds: right in 4 of 12 held out (101 to 112). The second ones named the method with
the least loss: right in 6 of 12 held out (201 to 212). These 24 are now among those on which rules are made. When the
rules of now were fixed, 23 of these federations had been run with several models together, the others have been since.

{verdict}

{lead}

{alone}

How hard it is to name one method: in the 22 federations of tables with two seeds of training among the first 44, the
method with the best TEST score with one seed was right, by the scores of the other seed, in 31 of 44 tries.
"""


def document(made: Sequence[Outcome], held: Sequence[Outcome]) -> str:
    """Return the page."""
    number = Counter(one.seeds for one in (*made, *held))
    seeds = ", ".join(f"{count} federations have {own}" for own, count in sorted(number.items()))
    facts = {"made": len(made), "held": len(held), "point": 100 * POINT, "seeds": seeds}
    head = HEAD.format(
        **facts, fixed=FIXED, verdict=_verdict(made, held), lead=_lead([*made, *held]), alone=_alone(held)
    )
    parts = [head]
    for title, outcomes in (("Held out", held), ("Those on which the rules were made", made)):
        if outcomes:
            parts += [f"## {title}\n", summary(outcomes), _each(outcomes)]
    return "\n".join(parts).rstrip() + "\n"


def _verdict(made: Sequence[Outcome], held: Sequence[Outcome]) -> str:
    """Return whether the goal was met, and who did better."""
    right = {name: sum(one.right(choice(one)) for one in held) for name, choice in answers(held).items()}
    own = right["medsilo advise"]
    above = [f"{name} in {count}" for name, count in right.items() if count > own]
    before = sum(one.right(one.advised) for one in made)
    text = (
        f"**The goal, declared before, was {GOAL} of {OF}. The adviser was right in {own} of {len(held)}: the goal is "
        f"{'met' if own >= GOAL else 'missed'}.**"
    )
    if left := OF - len(held):
        text += f" {left} of the {OF} are not finished yet."
    if above:
        text += f" Better on these: {'; '.join(above)}."
    if before * len(held) > own * len(made):
        text += (
            f" On the federations on which its rules were made it is right in {before} of {len(made)}: they fit these."
        )
    return text


def _alone(held: Sequence[Outcome]) -> str:
    """Return how often the first method alone was right."""
    right = sum(one.right(one.first) for one in held)
    return f"The first method alone, for whom one training has to do, was right in {right} of {len(held)} held out."


def _lead(outcomes: Sequence[Outcome]) -> str:
    """Return how often the adviser was right where a method was clearly ahead, and where not."""
    clear = [one for one in outcomes if leads(one.losses, *ranked(one.losses)[:2])]
    close = [one for one in outcomes if one not in clear]
    right = [f"{sum(one.right(one.advised) for one in own)} of {len(own)}" for own in (clear, close)]
    return (
        f"Over all {len(outcomes)} federations the adviser was right in {right[0]} where it saw one method clearly "
        f"ahead, and in {right[1]} where it said that it is a close call."
    )


def answers(outcomes: Iterable[Outcome]) -> dict[str, Choice]:
    """Return ways of answering by their names: the adviser's, and those that name one method whatever is measured."""
    everywhere = set.intersection(*(set(one.scores) for one in outcomes))
    others = sorted(everywhere - set(ALWAYS))
    return {"medsilo advise": lambda one: one.advised, "the first method alone": lambda one: one.first} | {
        f"always {NAMES.get(method, method)}": lambda one, method=method: method for method in (*ALWAYS, *others)
    }


def summary(outcomes: Sequence[Outcome], own: bool = True) -> str:
    """Return how often each way of answering was right, and how far behind the best; own: the adviser's too."""
    rows = []
    for name, choice in list(answers(outcomes).items())[0 if own else 2 :]:
        right = sum(one.right(choice(one)) for one in outcomes)
        behind = [one.behind(choice(one)) for one in outcomes]
        means = fmean(score.mean for score in behind), fmean(score.worst for score in behind)
        rows.append((name, f"{right} of {len(outcomes)}", *map(_points, means)))
    return table(("answer", "right", "behind the best, mean", "worst hospital"), rows)


def _each(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in outcomes:
        behind, right = one.behind(one.advised), "yes" if one.right(one.advised) else "no"
        answer = one.rule.name, ", ".join(one.members), NAMES.get(one.best, one.best)
        rows.append((one.name, one.cases, one.shifts, *answer, _points(behind.mean), _points(behind.worst), right))
    heads = ("federation", "training cases", "what differs", "rule", "advised", "best")
    return table((*heads, "behind, mean", "worst hospital", "right"), rows)


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def tries_of(made: Sequence[Outcome], held: Sequence[Outcome]) -> list[dict[str, str | int]]:
    """Return how often each rule was right, as adviser.csv has it."""
    return [
        {
            "rule": rule.name,
            "made_right": sum(one.right(one.advised) for one in made if one.rule == rule),
            "made": sum(one.rule == rule for one in made),
            "held_out_right": sum(one.right(one.advised) for one in held if one.rule == rule),
            "held_out": sum(one.rule == rule for one in held),
        }
        for rule in EVERY_RULE
    ]
