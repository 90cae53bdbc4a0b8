"""The words of a plan that may be a hospital's own, and that every other hospital reads."""

from collections.abc import Iterator

from medsilo.check.result import Table
from medsilo.plan import Plan

TITLE = "Words of the plan, which every hospital reads"
NOTE = "None of them may be a person's, an address, a file or a record number."


def words_table(plan: Plan) -> Table:
    """Return the names of hospitals, classes, channels, columns and their levels."""
    return Table(TITLE, ("key", "words"), [[key, ", ".join(words)] for key, words in _words(plan) if words], NOTE)


def _words(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    yield "participation.sites", [*plan.participation.sites]
    yield "participation.evaluation_sites", [*plan.participation.evaluation_sites]
    yield "labels", [*plan.task.goal.label_names]
    for key, values in plan.task.model_dump(mode="json").items():
        if key == "labels" or not isinstance(values, list):
            continue
        texts = [own if isinstance(own, str) else own.get("name", "") for own in values if isinstance(own, str | dict)]
        yield f"task.{key}", [text for text in texts if text]
        yield from (
            (f"task.{key}, {own['name']}", own["levels"])
            for own in values
            if isinstance(own, dict) and "name" in own and own.get("levels")
        )
