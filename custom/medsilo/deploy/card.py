"""The card of a super model: what a hospital's people read before they use it."""

from medsilo.core.package import package_facts
from medsilo.deploy.model import Experts
from medsilo.deploy.origin import Origin

INTENDED_USE = (
    "Research and evaluation of the task named above, on images like those of the hospitals listed; not a medical "
    "device. A person who can judge the result looks at each one before it is used."
)
LIMITS = (
    "It was trained and validated on the hospitals above only: measure it on cases of your own first.",
    "Scores are over test cases of the same hospitals; other scanners, protocols and patients may give worse ones.",
    "A score is a mean: it says nothing about rare cases and small groups of patients.",
)
RULES = {
    "threshold": "A selector looks at each image and says which hospital's images it resembles. Where its probability "
    "is strictly above gamma = {gamma}, that hospital's personal model answers, else the global model.",
    "argmax": "A selector looks at each image and says whose model does best on such images: the global one or a "
    "hospital's personal one. That model answers.",
    "mixture": "All models answer, and a selector says for each image by what shares their probabilities are mixed.",
}


def card(model: Experts, origin: Origin) -> str:
    """The text of card.md."""
    plan, package = origin.plan, package_facts()
    kept = [site for site in model.sites if site not in model.agreed]
    synthetic = "\n**Trained on SYNTHETIC data: for trying out the software only.**\n" if plan.task.synthetic else ""
    return f"""# Super model: {plan.task.title}
{synthetic}
## What it is
One global model, {len(model.agreed)} personal models and a selector, trained by {len(model.sites)} hospitals together
with {plan.algorithm.name} without sharing images. {RULES[model.rule].format(gamma=model.threshold)}

| | |
|---|---|
| hospitals | {", ".join(model.sites)} |
| agreed to share their personal model | {", ".join(model.agreed) or "none"} |
| represented by the global model | {", ".join(kept) or "none"} |
| input | {plan.task.channels} channel(s), {plan.task.goal.classes} classes, network {plan.network.name} |
| spacing of training images (x, y, z in mm) | {_ranges(origin.spacing or plan.task.spacing)} |
| rounds of training | {plan.rounds} |
| medsilo | {package["version"]}, {package["hash"][:12]} |
| plan hash | {plan.hash} |

## Gamma
{_gamma(model, origin)}

## Intended use
{INTENDED_USE}

## Limits
- The selector compares appearance with the hospitals it was trained at. An image from elsewhere may resemble one of
  them and yet need another model; low confidence is a hint, high confidence is no proof.
- A hospital's personal model follows that hospital's way of annotating.
{_lacking(model, origin)}- {LIMITS[0]}
"""


def _gamma(model: Experts, origin: Origin) -> str:
    if model.threshold is None:
        return f'The rule "{model.rule}" has no gamma.'
    if origin.tuning is None or origin.tuning.threshold != model.threshold:
        return f"{model.threshold:g}, as it was set; it was not tuned."
    rows = "\n".join(f"| {gamma:g} | {cases} | {score:.4f} |" for gamma, cases, score in origin.tuning.curve)
    metric, (low, high) = origin.plan.task.goal.metric, origin.tuning.plateau
    return (
        f"{model.threshold:g}: the middle of the range from {low:g} to {high:g}, within which all values tried have "
        f"the best mean {metric} over the validation cases of all hospitals together.\n\n"
        f"| gamma | cases | mean {metric} |\n|---|---|---|\n{rows}"
    )


def _lacking(model: Experts, origin: Origin) -> str:
    """Return what personal models can't have learned at their hospitals."""
    own = ((site, ", ".join(origin.absent[site])) for site in model.agreed if site in origin.absent)
    lines = (f"- {site} has not: {names}. Its personal model knows of these only what other" for site, names in own)
    return "".join(f"{line} hospitals' weights brought, untested.\n" for line in lines)


def _ranges(ranges: tuple[tuple[float, float], ...] | None) -> str:
    return ", ".join(f"{low:g} to {high:g}" for low, high in ranges) if ranges else "not recorded"
