"""What every part of a plan, or of a site's settings, is: a fixed, checked set of named values."""

from collections.abc import Mapping
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from medsilo.core.text import plain

SHOWN = 200  # letters of a value


class Section(BaseModel):
    """A part of the plan. Unknown keys are refused, values never change after checking, infinities are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Tables = Mapping[int | str, Mapping[str, type[Section]]]  # key of a section that is one of several → them, by name

MEANINGS = {
    "greater_than_equal": "is too small; give {ge} or more",
    "greater_than": "is too small; give more than {gt}",
    "less_than_equal": "is too large; give {le} or less",
    "less_than": "is too large; give less than {lt}",
    "literal_error": "is not known; choose {expected}",
    "path_type": "is no path; quote it",
    "union_tag_invalid": "is not known; choose one of {expected_tags}",
}


def in_words(
    error: ValidationError, root: type[Section], tables: Tables | None = None, tells_values: bool = True
) -> str:
    """What pydantic found wrong with values for `root`, in one line that names each key, the value and the fix.

    tells_values: false where a value may be a path of the hospital's.
    """
    words = (_in_words(detail, root, tables or {}, tells_values) for detail in error.errors())
    return "; ".join(dict.fromkeys(words))


def _in_words(detail: ErrorDetails, root: type[Section], tables: Tables, tells_values: bool) -> str:
    context = dict(detail.get("ctx") or {})
    kind, given = detail["type"], plain(repr(detail["input"]), SHOWN) if tells_values else "the value"
    if not detail["loc"]:
        keys = ", ".join(root.model_fields)
        return str(context["error"]) if kind == "value_error" else f"write a YAML mapping with keys of these: {keys}"
    key, section = _place(detail["loc"], root, tables)
    if kind == "extra_forbidden":
        value = f" with value {given}" if tells_values else ""
        return f"{key}: unknown key{value}; remove it or use one of: {', '.join(section.model_fields)}"
    if kind == "missing":
        return f"{key}: is missing; add it"
    if kind in ("union_tag_not_found", "model_type", "model_attributes_type", "dict_type"):
        first = ", 'name:' first" if key in tables else ""
        return f"{key}: {given} is no section; write '{key}:' with its keys below{first}"
    if kind == "union_tag_invalid":
        key, given = f"{key}.name", repr(context["tag"])
    if kind in MEANINGS:
        return f"{key}: {given} {MEANINGS[kind].format(**context)}"
    if kind == "value_error":
        return f"{key}: {context['error']}"
    return f"{key}: {given} is wrong: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _place(location: tuple[int | str, ...], root: type[Section], tables: Tables) -> tuple[str, type[Section]]:
    """The dotted key of an error, and the section that the key stands in."""
    first, *rest = location
    section: type[Section] = root
    within = list(location)
    if first in tables:
        # Where a union has several members, the chosen name ("fedprox") follows its key; it is no key of the plan.
        chosen = tables[first].get(str(rest[0])) if rest else None
        section, rest = (chosen, rest[1:]) if chosen else (next(iter(tables[first].values())), rest)
        within = rest
    for part in within[:-1]:
        field = section.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), section)
    return ".".join(map(str, (first, *rest))), section
