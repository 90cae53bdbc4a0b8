"""Make the tables on the pages about methods, from the classes of the methods, method_facts and the files in results/.

`python -m tools.tables` writes the tables. The list of a method's messages begins with the titles of the groups of
tensors that the method's phases send.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from medsilo import recipes
from medsilo.check.method_facts import FACTS
from medsilo.core.errors import MedsiloError
from medsilo.flare.jobs import plan_of
from medsilo.registry import METHODS
from results.result_files import FOLDER, MEAN, rows_of
from tools.markdown import table

OURS = {name: METHODS[name] for name in FACTS}
OFTEN = 6  # a key counts as specific to a method if at most this number of methods have the key
# Pages in docs/research/methods: title, words on when to try these methods, and names of the methods.
FAMILIES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "baselines": ("Baselines", "scores that every other method has to beat", ("local", "fedavg", "central")),
    "local-training": (
        "Corrected local training",
        "many local steps in a round; hospitals whose labels, structures or numbers of cases differ",
        ("fedprox", "scaffold", "feddyn", "moon", "condistfl", "fednova", "cyclic"),
    ),
    "server": (
        "Steps and weights at the server",
        "scores that rise and fall from round to round; hospitals whose updates disagree",
        ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedlws", "fedawa", "feddg-ga", "fedce"),
    ),
    "appearance": (
        "Normalisation and appearance",
        "hospitals with different scanners, stains or exposure",
        ("fedbn", "silobn", "fedrdn", "harmofl"),
    ),
    "parts": (
        "A part of the network for each hospital",
        "hospitals with different frequencies of the classes",
        ("fedper", "fedrep", "fedrod", "fedbabu"),
    ),
    "personal": (
        "A model for each hospital",
        "hospitals that need models of their own",
        ("fine-tuning", "ditto", "apfl", "per-fedavg", "pfedme", "mr-mtl", "fedala", "fedmap"),
    ),
    "adafed": ("AdaFed", "hospitals that form groups with similar data", ("adafed", "d-adafed", "f-adafed")),
    "fedsm": (
        "FedSM",
        "hospitals that differ from each other; patients of hospitals outside the study",
        ("fedsm", "fedsm-extra", "fedsm-ensemble"),
    ),
}
OWN_PARTS = "the head, and the state of the head's optimizer"
OWN_MODEL = "the hospital's own model"
OWN_NORMS = "batch norm: weights and statistics"
# Training state, without cases, that a method keeps at the hospital. Methods without an entry keep only the state of
# the optimizer.
STAYS: Mapping[str, str] = {
    "local": OWN_MODEL,
    "central": "nothing",
    "scaffold": "the hospital's control variate c_i",
    "feddyn": "the hospital's linear term",
    "moon": "the hospital's model of the previous round",
    "fedbn": OWN_NORMS,
    "silobn": "batch norm's statistics",
    "fedper": OWN_PARTS,
    "fedrep": OWN_PARTS,
    "fedrod": "the hospital's own head",
    "fedbabu": "the fine-tuned model",
    "fine-tuning": "the fine-tuned model",
    "ditto": OWN_MODEL,
    "apfl": "the hospital's own model, and the weight of this model in the mixture",
    "per-fedavg": "the adapted model",
    "pfedme": OWN_MODEL,
    "fedala": "the weights W",
    "adafed": OWN_NORMS,
    "d-adafed": OWN_NORMS,
    "f-adafed": OWN_NORMS,
}
# The changes of a plan that switch on each protection. For some protections, there are alternative changes; if the plan
# is valid with one of them, the method allows the protection.
PROTECTIONS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "[differential privacy](../../trust/privacy.md#differential-privacy)": (
        ("privacy={epsilon: 8, delta: 1e-5}", "network.norm=group"),
    ),
    "[secure aggregation](../../trust/secure-aggregation.md)": (("secure_aggregation.mode=pairwise",),),
    "[robust rules](../../trust/privacy.md#robust-rules)": (("aggregation.robust.name=median",),),
}
# maps each study of real patients to the study's value in the column "part" of contrasts.csv
REAL: Mapping[str, str] = {
    "blood cells": "what-differs-cells",
    "nuclei": "what-differs-nuclei",
    "heart disease": "what-differs-heart_uci",
    "breast cancer": "what-differs-tcga_brca",
}
# maps a method to the names of the configurations under which studies compared the method
VARIANTS = {"harmofl": ("HarmoFL, whole", "HarmoFL, mean", "HarmoFL, step")}
WORDS = {
    "fedavg": "FedAvg",
    "fedavg, twice the steps": "FedAvg with twice the steps",
    "local": "single-site training",
    "ensemble of local": "ensemble of single-site models",
}
HEADLINE = REAL["heart disease"]  # the study in the README's table, with four real hospitals


def page_of(name: str) -> str:
    """Return the name of the family to which a method belongs; each family of methods has a page."""
    return next(page for page, (_, _, names) in FAMILIES.items() if name in names)


def overview(below: str = "methods") -> str:
    """Return a table of all methods with name, paper and family."""
    rows = []
    for page, (title, _, names) in FAMILIES.items():
        for name in names:
            rows.append((f"[{name}]({below}/{page}.md#{name})", OURS[name].paper, title))
    return table(("method", "paper", "family"), rows)


def families(below: str = "methods") -> str:
    rows = [
        (f"[{title}]({below}/{page}.md)", ", ".join(f"`{name}`" for name in names), when)
        for page, (title, when, names) in FAMILIES.items()
    ]
    return table(("family", "methods", "try it for"), rows)


def method(name: str) -> str:
    """Return a table about one method: the tensors that are sent, the tensors that stay at the hospital, cost, and
    results.
    """
    own = OURS[name]
    leaves, sent, work, when = FACTS[name]
    cost = "; ".join(
        [f"{sent} times FedAvg's bytes" if sent[0].isdigit() else sent, *([work] if work != "none" else [])]
    )
    file = own.__module__.replace(".", "/")
    job = f"[jobs/{name}](../../../jobs/{name}), " if name != "central" else ""
    rows = [
        ("what travels", leaves),
        ("what stays", STAYS.get(name, "the state of the optimizer")),
        ("cost", cost.replace("–; –", "–").replace("none; ", "")),
        ("try it for", when),
        ("when it helped here", " ".join(_results(name)) or "none: we ran no study of this method with real patients"),
        (
            "combines with",
            ", ".join(_protections(name))
            or "none: neither differential privacy, nor secure aggregation, nor robust rules",
        ),
        ("own keys", ", ".join(_own_keys(own)) or "none"),
        ("where", f"{job}{_recipe(own.title)}[code](../../../custom/{file}.py)"),
    ]
    return table(("", name), rows)


def _contrasts() -> list[dict[str, str]]:
    return [line for line in rows_of(FOLDER / "contrasts.csv") if line["quantity"] == MEAN]


def _results(name: str) -> Iterator[str]:
    """Yield a sentence for each study of real patients; the sentence has the declared differences between this method
    and the baselines.
    """
    for study, part in REAL.items():
        for variant in VARIANTS.get(name, (name,)):
            own = [line for line in _contrasts() if (line["part"], line["configuration"]) == (part, variant)]
            told = [f"{_interval(line)} points compared with {WORDS[line['baseline']]}" for line in own if line["low"]]
            if told:
                which = "" if variant == name else f', with the variant "{variant.rpartition(", ")[2]}"'
                yield f"{study.capitalize()}{which} ({own[0]['n']} patients): {', '.join(told)}."


def _interval(line: Mapping[str, str]) -> str:
    text = f"{line['value']} ({line['low']} to {line['high']})".replace("-", "−")
    return f"**{text}**" if line["significant"] else text


def headline() -> str:
    """Return the README's table of a study with real patients: every configuration, with its declared difference."""
    lines = [line for line in _contrasts() if line["part"] == HEADLINE]
    over = {line["configuration"]: line for line in lines if line["low"]}
    rows = []
    for line in lines:
        if not line["baseline"]:
            name = line["configuration"]
            told = f"{_interval(over[name])} compared with {WORDS[over[name]['baseline']]}" if name in over else ""
            titles = {**{own: kind.title for own, kind in OURS.items()}, **WORDS}
            rows.append((titles.get(name, name), f"{line['value']} %", told))
    about = f"{lines[0]['n']} test patients, {lines[0]['seeds']} seeds"
    return f"UCI Heart Disease, four hospitals, {about}. Mean accuracy over hospitals:\n\n" + table(
        ("", "accuracy", "difference of accuracy in points (95 % interval)"), rows
    )


def _protections(name: str) -> Iterator[str]:
    """Yield the protections that the method allows, such as differential privacy; whether a protection is allowed is
    tested by parsing a plan.
    """
    job, own = ("local", ["algorithm.name=central"]) if name == "central" else (name, [])
    for words, variants in PROTECTIONS.items():
        for changes in variants:
            try:
                plan_of(job, [*own, *changes], here=True)
            except MedsiloError:
                continue
            yield words
            break


def _recipe(title: str) -> str:
    """Return a link to the recipe that trains a user's script with this method, or an empty text without a recipe."""
    name = f"{title.replace('-', '')}Recipe"
    found = next((known for known in dir(recipes) if known.lower() == name.lower()), "")
    return f"[`{found}`](../own-script.md#methods), " if found else ""


def _own_keys(kind: type[BaseModel]) -> Iterator[str]:
    held = Counter(key for known in OURS.values() for key in known.model_fields)
    for key in kind.model_fields:
        if held[key] <= OFTEN and key != "name":
            yield f"`{key}={_default(kind, key)}`".replace("=`", "`")


def _default(method: type[BaseModel], key: str) -> str:
    value = method.model_fields[key].get_default(call_default_factory=True)
    plain = value is not PydanticUndefined and isinstance(value, bool | int | float | str | tuple)
    return re.sub(r"^(True|False)$", lambda found: found[0].lower(), str(value)) if plain else ""
