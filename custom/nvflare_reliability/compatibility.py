"""For each part, the functions of NVFlare that it was made for; where these differ, the part says so when it begins.

In a clone, `python -m tests.nvflare_names --known` adds the installed NVFlare to those that are known.
"""

import ast
import hashlib
import inspect
import json
import logging
import textwrap
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

UPSTREAM = Path(__file__).parent / "upstream"  # of each part the issue, and where one is small the patch
KNOWN = UPSTREAM / "known.json"  # by function: the hash of its code in each NVFlare that was tested
LOG = logging.getLogger(__name__)
PLACES: dict[str, tuple[str, ...]] = {}  # by part
Part = TypeVar("Part", bound=Callable[..., Any])


def made_for(*places: str, begins: str = "__init__") -> Callable[[Part], Part]:
    """Mark a part, a function or a class, with the functions of NVFlare ("module:Class.function") that it relies on.

    When it is used first, one line in the log names those that are not as they were when it was tested.

    begins: the method with which the use of a class begins
    """

    def marked(part: Part) -> Part:
        name = part.__name__
        PLACES[name] = places
        if not isinstance(part, type):
            return _saying(name, part)
        setattr(part, begins, _saying(name, getattr(part, begins)))
        return part

    return marked


def _saying(part: str, function: Part) -> Part:
    @wraps(function)
    def checked(*given: Any, **more: Any) -> Any:
        say_if_changed(part)
        return function(*given, **more)

    return checked  # type: ignore[return-value]


@cache
def say_if_changed(part: str) -> None:
    """Say, once in a process, that a part does not fit the NVFlare that is installed."""
    if others := changed(part):
        told = "%s was made for another NVFlare than %s: %s differs here; upstream/%s.md says what it is for"
        LOG.warning(told, part, version("nvflare"), ", ".join(others), part)


def changed(part: str) -> list[str]:
    """Return a part's functions of NVFlare whose code is in no NVFlare that was tested."""
    known = json.loads(KNOWN.read_text("utf-8"))
    return [place for place in PLACES[part] if hash_of(place) not in known.get(place, {}).values()]


def hash_of(place: str) -> str:
    """Return a hash of a function's code, without comments; empty where it is gone."""
    module, _, names = place.partition(":")
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        source = inspect.getsource(found)
    except (ImportError, AttributeError, TypeError, OSError):
        return ""
    code = ast.unparse(ast.parse(textwrap.dedent(source)))
    return hashlib.sha256(code.encode()).hexdigest()[:16]
