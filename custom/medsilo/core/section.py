"""What every part of a plan, or of a site's settings, is: a fixed, checked set of named values."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class Section(BaseModel):
    """A part of the plan. Unknown keys are refused, values never change after checking, infinities are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Chosen = Mapping[Any, type[Section] | None]  # key of a section that is one of several → the one that is meant

MEANINGS = {
    "greater_than_equal": "is too small; give {ge} or more",
    "greater_than": "is too small; give more than {gt}",
    "less_than_equal": "is too large; give {le} or less",
    "less_than": "is too large; give less than {lt}",
    "literal_error": "is not known; choose {expected}",
    "path_type": "is no path; quote it",
    "union_tag_invalid": "is not known; choose one of {expected_tags}",
    "name_not_known": "is not known; {remedy}",
}


def in_words(
    error: ValidationError, root: type[Section], chosen: Chosen | None = None, tells_values: bool = True
) -> str:
    """What pydantic found wrong with values for `root`, in one line that names each key, the value and the fix.

    chosen: under the key of each section whose class its name decides, that class; None where the name is not known.
    tells_values: false where a value may be a path of the hospital's.
    """
    words = (_in_words(detail, root, chosen or {}, tells_values) for detail in error.errors())
    return "; ".join(dict.fromkeys(words))


def _in_words(detail: ErrorDetails, root: type[Section], chosen: Chosen, tells_values: bool) -> str:
    context = dict(detail.get("ctx") or {})
    kind, given = detail["type"], repr(detail["input"]) if tells_values else "the value"
    if not detail["loc"]:
        keys = ", ".join(root.model_fields)
        return str(context["error"]) if kind == "value_error" else f"write a YAML mapping with keys of these: {keys}"
    key, section = _place(detail["loc"], root, chosen)
    if kind == "extra_forbidden":
        value = f" with value {given}" if tells_values else ""
        return f"{key}: unknown key{value}; remove it or use one of: {', '.join(section.model_fields)}"
    if kind == "missing":
        return f"{key}: is missing; add it"
    if kind in ("union_tag_not_found", "name_missing", "model_type", "model_attributes_type", "dict_type"):
        first = ", 'name:' first" if key in chosen else ""
        return f"{key}: {given} is no section; write '{key}:' with its keys below{first}"
    if kind == "union_tag_invalid":
        key, given = f"{key}.name", repr(context["tag"])
    if kind == "name_not_known":
        key, given = f"{key}.name", repr(context["name"])
    if kind in MEANINGS:
        return f"{key}: {given} {MEANINGS[kind].format(**context)}"
    if kind == "value_error":
        return f"{key}: {context['error']}"
    return f"{key}: {given} is wrong: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _place(location: tuple[int | str, ...], root: type[Section], chosen: Chosen) -> tuple[str, type[Section]]:
    """The dotted key of an error, and the section that the key stands in."""
    section, within = chosen.get(location[0]) or root, location[:-1]
    for part in within[1:] if location[0] in chosen else within:
        field = section.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), section)
    return ".".join(map(str, location)), section
