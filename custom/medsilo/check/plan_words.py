"""List the plan's names, labels and descriptions, which every hospital reads, so that a person can check that none
identifies a patient.
"""

from collections.abc import Iterator
from typing import Any

from medsilo.check.result import Table
from medsilo.plan import Plan, keys_of

TITLE = "Words of the plan, which every hospital reads"
NOTE = (
    "None of them may be a person's, an address, a file or a record number. Bounds that fit one patient alone point to "
    "that patient."
)


def words_table(plan: Plan) -> Table:
    return Table(TITLE, ("key", "words"), [[key, words] for key, words in _words(plan) if words], NOTE)


def _words(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from ((f"study.{name}", told or "") for name, told in plan.study.model_dump().items())
    yield "participation.sites", ", ".join(plan.participation.sites)
    yield "participation.evaluation_sites", ", ".join(plan.participation.evaluation_sites)
    yield "labels", ", ".join(plan.task.goal.label_names)
    whole, told = (plan.task.model_dump(mode="json", exclude_defaults=kind) for kind in (False, True))
    met = {name: told.get(name, value) for name, value in whole.items() if name not in ("name", "labels")}
    for key, value in keys_of(met):
        yield f"task.{key}", _in_words(value)
        for one in value if isinstance(value, list) else ():
            if isinstance(one, dict) and "name" in one:
                facts = (f"{what}: {_in_words(own)}" for what, own in one.items() if what != "name")
                yield f"task.{key}, {one['name']}", "; ".join(facts)


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    if isinstance(value, dict):
        return str(value["name"]) if "name" in value else "; ".join(f"{key}: {own}" for key, own in value.items())
    return "" if value is None else str(value)
