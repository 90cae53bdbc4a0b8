"""The base of every part of a plan, of a site's settings and of messages: a fixed, checked set of named values."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from medsilo.core import optional
from medsilo.core.errors import DataError, MedsiloError, Refused, YamlError
from medsilo.core.files import read_bounded
from medsilo.core.text import plain
from medsilo.core.yaml_text import LARGEST_YAML, load_yaml


class Section(BaseModel):
    """A part of the plan, of a file or of a message: values that are checked once. Unknown keys and infinities are
    refused.

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
        """Return the section that values are which came as YAML or JSON; raises DataError. origin: for people."""
        try:
            return checked(cls, values, origin)
        except ValidationError as error:
            raise DataError(f"{origin}: {optional.in_words(error, cls)}") from error

    @classmethod
    def received(cls, values: Any) -> Self:
        """Return the section that another party sent, whose types are strict; raises Refused."""
        strict = None if "strict" in cls.model_config else True  # a class that is strict itself has fields that are not
        try:
            return cls.model_validate(values, strict=strict)
        except ValidationError as error:
            raise Refused("; ".join(dict.fromkeys(map(_in_its_words, error.errors()[:3])))) from error

    @classmethod
    def in_file(cls, path: Path, what: str, remedy: str) -> Self:
        """Return the section that a YAML file is; raises DataError. what: the file, as people know it."""
        try:
            return checked(cls, load_yaml(read_bounded(path, LARGEST_YAML).decode()) or {}, path.name)
        except ValidationError as error:
            raise DataError(f"{what}: {optional.in_words(error, cls)}", str(path)) from error
        except FileNotFoundError as error:
            raise DataError(f"{what}: there is no such file; {remedy}", str(path)) from error
        except (OSError, ValueError, YamlError) as error:
            why = str(error) if isinstance(error, YamlError) else type(error).__name__
            raise DataError(f"{what} can't be read ({why}); {remedy}", str(path)) from error


class Feature(Section):
    """A part of a plan that says itself what it can't stand beside, and what it lets leave.

    `plan` is a `medsilo.Plan`; `networks` are those of its method, without values. Plans and disclosure reports ask
    every feature and name none.
    """

    def conflicts(self, plan: Any, networks: Any) -> Iterable[str]:
        """Yield why the plan can't have this: where, what, and what to do instead."""
        return ()

    def warnings(self, plan: Any) -> Iterable[str]:
        """Yield what the person who starts the study should know."""
        return ()

    def leaves(self, plan: Any) -> Iterable[str]:
        """Yield lines of the disclosure report: what leaves a hospital through this, or is changed by it."""
        return ()


S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Any, origin: str) -> S:
    """Check values that came as YAML or JSON; raises ValidationError. origin: where they stand, for people.

    Strictly: true is no number, and 1 no truth value. They are checked as JSON, where a list stands for a tuple and
    text for a path.
    """
    try:
        text = json.dumps(values, default=str)
    except (TypeError, ValueError) as error:
        raise MedsiloError(
            f"{origin}: give texts, numbers, lists and mappings only ({error}); quote other values"
        ) from error
    return kind.model_validate_json(text, strict=True)


def _in_its_words(detail: ErrorDetails) -> str:
    """Return what is wrong with what another party sent; its own words are cut."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    where, said = plain(".".join(map(str, detail["loc"])), 80), plain(detail["msg"], 200)
    return f"its {where}: {said[0].lower()}{said[1:]}"
