"""Define the base class of all sections: validated parts of a plan, of a site's settings or of a message."""

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
    """A section of a plan, of a settings file or of a message. A section rejects unknown keys, NaN and infinity.

    >>> class Count(Section):
    ...     cases: int
    >>> Count.from_values({"cases": 3}, "the count").cases, Count.received({"cases": 3}).cases
    (3, 3)
    >>> Count.received({"cases": "3"})
    Traceback (most recent call last):
    medsilo.core.errors.Refused: the field cases: input should be a valid integer
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def from_values(cls, values: Any, origin: str) -> Self:
        """Return a section with validated values. Raises DataError for invalid values.

        Args:
            values: the values of YAML or JSON
            origin: the name of the values' source in errors
        """
        try:
            return checked(cls, values, origin)
        except ValidationError as error:
            from medsilo.core.wording import in_words

            raise DataError(f"{origin}: {in_words(error, cls)}") from error

    @classmethod
    def received(cls, values: Any) -> Self:
        """Return a section with validated values that another party sent. Raises Refused for invalid values."""
        # If a class sets `strict` itself, its fields may convert a value of a similar type to the declared type.
        strict = None if "strict" in cls.model_config else True
        try:
            return cls.model_validate(values, strict=strict)
        except ValidationError as error:
            raise Refused("; ".join(dict.fromkeys(map(_in_its_words, error.errors()[:3])))) from error

    @classmethod
    def in_file(cls, path: Path, subject: str, remedy: str) -> Self:
        """Return a section that is read from a file. Raises DataError for an unreadable file or invalid values.

        Args:
            path: the YAML file
            subject: the file's name in errors
            remedy: advice to the user about an unreadable file
        """
        try:
            return checked(cls, load_yaml(read_bounded(path, LARGEST_YAML).decode()) or {}, path.name)
        except ValidationError as error:
            from medsilo.core.wording import in_words

            raise DataError(f"{subject}: {in_words(error, cls)}", str(path)) from error
        except FileNotFoundError as error:
            raise DataError(f"{subject}: there is no such file; {remedy}", str(path)) from error
        except (OSError, ValueError, YamlError) as error:
            why = str(error) if isinstance(error, YamlError) else type(error).__name__
            raise DataError(f"{subject} can't be read ({why}); {remedy}", str(path)) from error


class Feature(Section):
    """A section of a plan. A feature lists conflicts with other sections of the plan, and describes the tensors that
    sites send because of it.

    The validation of a plan and the disclosure report call the methods of each feature of the plan.
    """

    def conflicts(self, plan: Any, networks: Any) -> Iterable[str]:
        """Yield one message for each conflict between this section and the plan. A message names the key, the cause and
        the remedy.

        Args:
            plan: the whole plan, a `medsilo.Plan`
            networks: the networks of the plan's method by name, on PyTorch's meta device
        """
        return ()

    def warnings(self, plan: Any) -> Iterable[str]:
        """Yield warnings that the lead of the study should read."""
        return ()

    def leaves(self, plan: Any) -> Iterable[str]:
        """Yield the lines of the disclosure report that describe the numbers or tensors that sites send because of this
        feature.

        If a feature discloses nothing new but changes tensors before a site sends them, the lines describe this change.
        """
        return ()


S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Any, origin: str) -> S:
    """Return a section with validated values of YAML or JSON. Raises ValidationError for invalid values.

    The value true is not valid as a number, and 1 is not valid as a truth value. A list is valid as a tuple, and a
    string is valid as a path.

    Args:
        origin: the name of the values' source in errors
    """
    try:
        text = json.dumps(values, default=str)
    except (TypeError, ValueError) as error:
        raise MedsiloError(
            f"{origin}: give texts, numbers, lists and mappings only ({error}); quote other values"
        ) from error
    return kind.model_validate_json(text, strict=True)


def _in_its_words(detail: ErrorDetails) -> str:
    """Return a short, printable description of a validation error in a message from another party."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    where, said = plain(".".join(map(str, detail["loc"])), 80), plain(detail["msg"], 200)
    return f"the field {where}: {said[0].lower()}{said[1:]}"
