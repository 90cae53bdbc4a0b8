"""Make the tables on the pages about methods, from the classes of the methods and the files in results/.

`python -m tools.tables` writes the tables. The list of a method's messages begins with the titles of the groups of
tensors that the method's phases send.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from medsilo import recipes
from medsilo.core.errors import MedsiloError
from medsilo.flare.jobs import plan_of
from medsilo.registry import METHODS
from results.result_files import FOLDER, MEAN, rows_of
from tools.markdown import table

OURS = {name: METHODS[name] for name in METHODS.ours}
OFTEN = 6  # a key counts as specific to a method if at most this number of methods have the key
PAGES = Path(__file__).resolve().parents[1] / "docs/research/methods"
# Pages in docs/research/methods: title, and words on when to try the methods of the page.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "baselines": ("Baselines", "scores that every other method has to beat"),
    "local-training": (
        "Corrected local training",
        "many local steps in a round; hospitals whose labels, structures or numbers of cases differ",
    ),
    "server": (
        "Steps and weights at the server",
        "scores that rise and fall from round to round; hospitals whose updates disagree",
    ),
    "appearance": ("Normalisation and appearance", "hospitals with different scanners, stains or exposure"),
    "parts": ("A part of the network for each hospital", "hospitals with different frequencies of the classes"),
    "personal": ("A model for each hospital", "hospitals that need models of their own"),
    "adafed": ("AdaFed", "hospitals that form groups with similar data"),
    "fedsm": ("FedSM", "hospitals that differ from each other; patients of hospitals outside the study"),
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
# keys that some methods need before they support differential privacy
WITH_PRIVACY: Mapping[str, Mapping[str, Any]] = {
    "harmofl": {"amplitude": {"measured": "before"}},
    "adafed": {"pretraining": {"source": "file"}},
    "d-adafed": {"pretraining": {"source": "file"}},
    "fedsm": {"selector_sync": "server-adam"},
}
HEADLINE = REAL["heart disease"]  # the study in the README's table, with four real hospitals


def number() -> str:
    """Return the number of federated methods."""
    return str(len(OURS.keys() - {"local", "central"}))


def names_on(page: str) -> list[str]:
    """Return the names of the methods that have a section on a family's page, in the order of the sections."""
    return [title.lower() for title in re.findall(r"^## (.+)$", (PAGES / f"{page}.md").read_text("utf-8"), re.M)]


def overview(below: str = "methods") -> str:
    """Return a table of all methods with name, paper and family."""
    rows = []
    for page, (title, _) in FAMILIES.items():
        for name in names_on(page):
            rows.append((f"[{name}]({below}/{page}.md#{name})", OURS[name].paper, title))
    return table(("method", "paper", "family"), rows)


def families(below: str = "methods") -> str:
    rows = [
        (f"[{title}]({below}/{page}.md)", ", ".join(f"`{name}`" for name in names_on(page)), when)
        for page, (title, when) in FAMILIES.items()
    ]
    return table(("family", "methods", "try it for"), rows)


def method(name: str) -> str:
    """Return a table about one method: the tensors that are sent, the tensors that stay at the hospital, cost, and
    results.
    """
    own = OURS[name]
    sent, work = own.bytes_sent, own.extra_work
    cost = "; ".join(
        [f"{sent} times FedAvg's bytes" if sent[0].isdigit() else sent, *([work] if work != "none" else [])]
    )
    file = own.__module__.replace(".", "/")
    job = f"[jobs/{name}](../../../jobs/{name}), " if name != "central" else ""
    rows = [
        ("what travels", own.sends),
        ("what stays", own.stays),
        ("cost", cost.replace("–; –", "–").replace("none; ", "")),
        ("try it for", own.suits),
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


def private() -> str:
    """Return a table of the methods that support differential privacy, by the networks that train with noise."""
    rows: dict[str, list[str]] = {}
    for name, kind in OURS.items():
        if kind.declares_account():
            keys = WITH_PRIVACY.get(name, {})
            own = kind.model_validate({"name": name, **keys}).privacy_mechanism(())
            networks = ", ".join(f"`{network}`" for network in own.networks)
            told = f"{networks}; {own.disclosure_notes}" if own.exact_networks else networks
            needs = f" with `{_written(keys)}`" if keys else ""
            rows.setdefault(told, []).append(f"{kind.title}{needs}")
    return table(("methods", "networks trained with noise"), [(", ".join(names), told) for told, names in rows.items()])


def _written(keys: Mapping[str, Any]) -> str:
    """Return the keys of a section in one line, such as `pretraining.source: file`."""
    [(key, value)] = keys.items()
    return f"{key}.{_written(value)}" if isinstance(value, Mapping) else f"{key}: {value}"


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
    """Yield the protections that the method allows, such as differential privacy; each is tested by parsing a plan with
    it.
    """
    job, own = ("local", ["algorithm.name=central"]) if name == "central" else (name, [])
    for words, variants in PROTECTIONS.items():
        for changes in variants:
            try:
                plan_of(job, [*own, *changes], local=True)
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
