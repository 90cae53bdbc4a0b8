"""Define the base class of sections of plans, of sites' settings and of messages, whose values are validated."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from medsilo.core.errors import DataError, MedsiloError, Refused, YamlError
from medsilo.core.files import read_bounded
from medsilo.core.text import plain
from medsilo.core.yaml_text import LARGEST_YAML, load_yaml


class Section(BaseModel):
    """A section of a plan, a file or a message. Unknown keys, NaN and infinity are rejected.

    >>> class Count(Section):
    ...     cases: int
    >>> Count.from_values({"cases": 3}, "the count").cases, Count.received({"cases": 3}).cases
    (3, 3)
    >>> Count.received({"cases": "3"})
    Traceback (most recent call last):
    medsilo.core.errors.Refused: its cases: input should be a valid integer
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def from_values(cls, values: Any, origin: str) -> Self:
        """Return a validated section from YAML's or JSON's values; raises DataError. origin: the values' source, for
        errors."""
        try:
            return checked(cls, values, origin)
        except ValidationError as error:
            from medsilo.core.wording import in_words

            raise DataError(f"{origin}: {in_words(error, cls)}") from error

    @classmethod
    def received(cls, values: Any) -> Self:
        """Return a validated section from another party's values, with strict types; raises Refused."""
        # a class with its own `strict` setting has exceptions for some fields
        strict = None if "strict" in cls.model_config else True
        try:
            return cls.model_validate(values, strict=strict)
        except ValidationError as error:
            raise Refused("; ".join(dict.fromkeys(map(_in_its_words, error.errors()[:3])))) from error

    @classmethod
    def in_file(cls, path: Path, what: str, remedy: str) -> Self:
        """Read a section from a YAML file; raises DataError. what: the file's name in errors."""
        try:
            return checked(cls, load_yaml(read_bounded(path, LARGEST_YAML).decode()) or {}, path.name)
        except ValidationError as error:
            from medsilo.core.wording import in_words

            raise DataError(f"{what}: {in_words(error, cls)}", str(path)) from error
        except FileNotFoundError as error:
            raise DataError(f"{what}: there is no such file; {remedy}", str(path)) from error
        except (OSError, ValueError, YamlError) as error:
            why = str(error) if isinstance(error, YamlError) else type(error).__name__
            raise DataError(f"{what} can't be read ({why}); {remedy}", str(path)) from error


class Feature(Section):
    """A section of a plan that declares its conflicts with other sections and the numbers that sites send for it.

    `plan` is a `medsilo.Plan`; `networks` are its method's networks on torch's meta device. Plans and disclosure
    reports call these methods of all features.
    """

    def conflicts(self, plan: Any, networks: Any) -> Iterable[str]:
        """Yield a message for each conflict with the plan, with its key, cause and remedy."""
        return ()

    def warnings(self, plan: Any) -> Iterable[str]:
        """Yield warnings to the lead."""
        return ()

    def leaves(self, plan: Any) -> Iterable[str]:
        """Yield lines of the disclosure report about tensors or numbers that this feature makes sites send, or
        changes."""
        return ()


S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Any, origin: str) -> S:
    """Return a validated section from YAML's or JSON's values; raises ValidationError. origin: the values' source, for
    errors.

    Types are strict: true is not a number, and 1 is not a truth value. A list may become a tuple, and a string a path.
    """
    try:
        text = json.dumps(values, default=str)
    except (TypeError, ValueError) as error:
        raise MedsiloError(
            f"{origin}: give texts, numbers, lists and mappings only ({error}); quote other values"
        ) from error
    return kind.model_validate_json(text, strict=True)


def _in_its_words(detail: ErrorDetails) -> str:
    """Describe a validation error of another party's message, without control characters and truncated."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    where, said = plain(".".join(map(str, detail["loc"])), 80), plain(detail["msg"], 200)
    return f"its {where}: {said[0].lower()}{said[1:]}"
