"""Describe the invalid values of a section in one line, which names the key, the value and the remedy for each invalid
value.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from medsilo.core.section import Section
from medsilo.core.text import plain

SHOWN = 200  # limit on the bytes of a value that an error message quotes
MOST = 4  # limit on the number of faults that one error message lists
# the class that the value of `name` selects in each section with this key; None if no class has this name
Chosen = Mapping[Any, type[Section] | None]

MEANINGS = {
    "greater_than_equal": "is too small; give {ge} or more",
    "greater_than": "is too small; give more than {gt}",
    "less_than_equal": "is too large; give {le} or less",
    "less_than": "is too large; give less than {lt}",
    "literal_error": "is not known; choose {expected}",
    "int_type": "is not a whole number (an integer); give one, like 3",
    "float_type": "is not a number; give one, like 0.1",
    "multiple_of": "is not a multiple of {multiple_of}; give one",
    "string_type": "is no text (a string); quote it",
    "string_pattern_mismatch": "can't stand here; begin with a letter or a digit, and go on with letters, digits, '.', "
    "'_', '-' or blanks (of a SHA-256: 64 of 0-9 and a-f)",
    "too_short": "has too few values; give {min_length} or more",
    "union_tag_invalid": "is not known; choose one of {expected_tags}",
    "name_not_known": "is not known; {remedy}",
    "bool_type": "is no truth value; give true or false",
    "tuple_type": "is not a list; write [A, B]",
    "list_type": "is not a list; write [A, B]",
}
NUMBERS = ("int_type", "float_type")
# names that other tools use, each with the corresponding key of a plan
ALSO_CALLED = {  # NVFlare's recipes use the names in the first lines
    **dict.fromkeys(("n", "min_clients", "n_clients", "num_clients", "clients"), "minimum"),
    **dict.fromkeys(("num_rounds", "n_rounds"), "rounds"),
    **dict.fromkeys(("epochs", "num_epochs", "aggregation_epochs"), "local_epochs"),
    **{"lr": "learning_rate", "bs": "batch_size", "method": "algorithm"},
}


def in_words(
    error: ValidationError, root: type[Section], chosen: Chosen | None = None, tells_values: bool = True
) -> str:
    """Describe pydantic's errors about a section in one line, which names the key, the value and the remedy for each
    error.

    Args:
        chosen: The class that the key `name` selects for each section; None for an unknown name.
        tells_values: Whether the line may quote values, which may be a hospital's paths.
    """
    faults = error.errors()
    # pydantic also reports a list as too short if a value in the list is invalid.
    lists = {fault["loc"][:-1] for fault in faults}
    faults = [one for one in faults if one["type"] != "too_short" or one["loc"] not in lists]
    words = list(dict.fromkeys(_in_words(one, root, chosen or {}, tells_values) for one in faults))
    more = [f"and {len(words) - MOST} more"] if len(words) > MOST + 1 else []
    return "; ".join([*words[:MOST], *more] if more else words)


def _in_words(detail: ErrorDetails, root: type[Section], chosen: Chosen, tells_values: bool) -> str:
    context = dict(detail.get("ctx") or {})
    kind, given = detail["type"], plain(repr(detail["input"]), SHOWN) if tells_values else "the value"
    if not detail["loc"]:
        keys = ", ".join(root.model_fields)
        return str(context["error"]) if kind == "value_error" else f"write a YAML mapping with keys of these: {keys}"
    key, section = _place(detail["loc"], root, chosen)
    if kind == "extra_forbidden":
        return unknown_key(key, detail["input"], list(section.model_fields), _keys_of(root), tells_values)
    if kind == "missing":
        return f"{key}: is missing; add it"
    if kind in ("union_tag_not_found", "name_missing", "model_type", "model_attributes_type", "dict_type"):
        named = key in chosen or _has_name(section.model_fields.get(key.rpartition(".")[2]))
        if named and isinstance(detail["input"], str):
            return f"{key}: {given} is not a section; set {key}.name={detail['input']}"
        first = ", 'name:' first" if named else ""
        return f"{key}: {given} is not a section; write '{key}:' with its keys below{first}"
    if kind == "union_tag_invalid":
        key, given = f"{key}.name", repr(context["tag"])
    if kind == "name_not_known":
        key, given = f"{key}.name", repr(context["name"])
    if kind in NUMBERS and isinstance(detail["input"], bool):
        return f"{key}: {given.lower()} is a truth value (YAML takes yes and no for such); give a number"
    if kind in MEANINGS:
        choices = str(context.get("expected") or context.get("expected_tags") or "").replace("'", "")
        hint = _meant(given.strip("'"), choices.replace(" or ", ", ").split(", "))
        return f"{key}: {given} {MEANINGS[kind].format(**context)}{hint}"
    if kind == "value_error":
        return f"{key}: {context['error']}"
    return f"{key}: {given} is wrong: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def unknown_key(
    key: str, value: Any, known: Sequence[str], sections: Mapping[str, Sequence[str]], tells_value: bool = True
) -> str:
    """Return an error message that names an unknown key and suggests a similar valid key.

    Args:
        known: The valid keys of the section that has the unknown key.
        sections: The valid keys of all sections, by section.
    """
    given = f" with value {plain(repr(value), SHOWN)}" if tells_value else ""
    remedy = _meant(key.rpartition(".")[2], known, sections) or f" or use one of: {', '.join(known)}"
    return f"{key}: unknown key{given}; remove it{remedy}"


def _keys_of(root: type[Section]) -> dict[str, list[str]]:
    """Return each key of a section, together with the nested keys if the key's value is a section."""
    kinds = {key: field.annotation for key, field in root.model_fields.items()}
    is_section = {key: isinstance(kind, type) and issubclass(kind, Section) for key, kind in kinds.items()}
    return {key: [*kinds[key].model_fields] if is_section[key] else [] for key in kinds}  # type: ignore[union-attr]


def _has_name(field: FieldInfo | None) -> bool:
    """True if a field's value is a section whose class the key `name` chooses."""
    return any("name" in kind.model_fields for kind in _sections_in(field.annotation)) if field else False


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def near_key(word: str, known: Sequence[str], sections: Mapping[str, Sequence[str]] | None = None) -> str | None:
    """Return the valid key that is most similar to an unknown key; None if no valid key is similar.

    Args:
        known: The valid keys of the same section, which are tried first.
        sections: The valid keys of all sections, by section; a key found here is returned as "section.key".
    """
    names = [ALSO_CALLED.get(word.lower(), word), word.lower()]
    near = next((close[0] for name in names if (close := get_close_matches(name, known, 1))), None)
    for section, keys in (sections or {}).items():
        near = near or next((f"{section}.{name}" for name in names if name in keys), None)
    return near


def _meant(word: str, known: Sequence[str], sections: Mapping[str, Sequence[str]] | None = None) -> str:
    near = near_key(word, known, sections)
    return f" (did you mean {near}?)" if near else ""


def _place(location: tuple[int | str, ...], root: type[Section], chosen: Chosen) -> tuple[str, type[Section]]:
    """Return the dotted key that an error concerns, and the class of the section that contains this key."""
    section, within = chosen.get(location[0]) or root, location[:-1]
    for part in within[1:] if location[0] in chosen else within:
        if field := section.model_fields.get(str(part)):
            section = next(_sections_in(field.annotation), section)
        else:
            section = _one_named(str(part), section)
    return ".".join(map(str, location)), section


def _one_named(name: str, base: type[Section]) -> type[Section]:
    """Among the subclasses of `base`, return the class whose field `name` has the given name as its default. Return
    `base` if no subclass has the given name as its default.
    """
    kinds = (kind for own in base.__subclasses__() for kind in (own, *own.__subclasses__()))
    fields = ((kind, kind.model_fields.get("name")) for kind in kinds)
    return next((kind for kind, field in fields if field and field.default == name), base)
