"""docs/results/advise.md: what the adviser said of each federation and what came out, beside one answer for all."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from benchmarks.advise.outcomes import POINT, Outcome
from docs.markdown import table
from medsilo.study.adviser import leads, ranked
from medsilo.study.adviser_rules import RULES

ALWAYS = ("fedavg", "fedbn", "ditto")
GOAL, OF = 9, 12  # declared before
FIXED = "88872ff"  # the commit whose rules were tried
Choice = Callable[[Outcome], str | None]
HEAD = """# The adviser, tried on federations that no rule was made from

`medsilo advise` ([evidence](../evidence.md)) names the method that does best in a measuring study. Here it is held
against what came out of every method, on GENERATED federations: {made} on which its rules were made, and {held} that
were run once, after the rules were fixed (commit {fixed}, which has their numbers, too). Hospitals differ by known
amounts in looks, labels, what is asked for, and size (`benchmarks/advise/federations.py`). Written by

    python -m benchmarks.advise --write

which goes on where it was stopped. All numbers are in `benchmarks/advise/made.csv` and `held_out.csv`.

An answer is right where its method is within {point:g} point of the method with the best mean test score, in that mean
and at its worst hospital. The adviser sees the first half of the rounds of seven methods with the first seed, together
as much work as three and a half trainings, and of them only what hospitals tell; no test score. Data are the same for
all seeds of training; {seeds}.

Rules that this page had before asked for distances between hospitals, and for three methods' losses after five rounds.
They were right in 18 of 20 federations where they were made, and in 4 of 12 held out. Those twelve (101 to 112) are
now among those on which rules are made. How much of a fit is in the new ones: of 360 ways to rank methods (how many
rounds, loss or score, how much the worst hospital counts, which methods) the one that was best on eleven of the twelve
mixtures of shifts was right in 20 of the 32 when each mixture was left out in turn.

{verdict}

{lead}

How hard the goal is: in the 22 federations of tables with two seeds of training, the method with the best TEST score
with one seed was right, by the scores of the other seed, in 31 of 44 tries: seeing the test scores of one training is
right seven times in ten on tables. The measure stays as it was declared.
"""


def document(made: Sequence[Outcome], held: Sequence[Outcome]) -> str:
    """Return the page."""
    number = Counter(one.seeds for one in (*made, *held))
    seeds = ", ".join(f"{count} federations have {own}" for own, count in sorted(number.items()))
    facts = {"made": len(made), "held": len(held), "point": 100 * POINT, "seeds": seeds}
    head = HEAD.format(**facts, fixed=FIXED, verdict=_verdict(made, held), lead=_lead([*made, *held]))
    parts = [head]
    for title, outcomes in (("Held out", held), ("Those on which the rules were made", made)):
        if outcomes:
            parts += [f"## {title}\n", summary(outcomes), _each(outcomes)]
    return "\n".join(parts).rstrip() + "\n"


def _verdict(made: Sequence[Outcome], held: Sequence[Outcome]) -> str:
    """Return whether the goal was met, and who did better."""
    right = {name: sum(one.right(choice(one)) for one in held) for name, choice in answers(held).items()}
    own = right.pop("medsilo advise")
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
    return {"medsilo advise": lambda one: one.advised} | {
        f"always {method}": lambda one, method=method: method for method in (*ALWAYS, *others)
    }


def summary(outcomes: Sequence[Outcome], own: bool = True) -> str:
    """Return how often each way of answering was right, and how far behind the best method; own: the adviser's too."""
    rows = []
    for name, choice in list(answers(outcomes).items())[0 if own else 1 :]:
        given = [(one, method) for one in outcomes if (method := choice(one))]
        right = sum(one.right(method) for one, method in given)
        behind = [one.behind(method) for one, method in given]
        means = fmean(score.mean for score in behind), fmean(score.worst for score in behind)
        rows.append((name, f"{right} of {len(outcomes)}", *map(_points, means)))
    return table(("answer", "right", "behind the best, mean", "worst hospital"), rows)


def _each(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in outcomes:
        method, rule = one.advised, one.rule
        behind = one.behind(method) if method else None
        told = (_points(behind.mean), _points(behind.worst)) if behind else ("–", "–")
        answer = rule.name if rule else "none", method or "–", one.best
        rows.append((one.name, one.cases, one.shifts, *answer, *told, "yes" if one.right(method) else "no"))
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
        for rule in RULES
    ]
