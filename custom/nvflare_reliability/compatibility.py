"""Record the NVFlare functions on which each patch depends. If the code of a recorded function differs from the tested
NVFlare versions, log a warning.

In a clone of the repository, `python -m tests.nvflare_names --known` adds the installed NVFlare to the tested versions.
"""

import ast
import hashlib
import inspect
import json
import logging
import textwrap
import threading
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

UPSTREAM = Path(__file__).parent / "upstream"
KNOWN = UPSTREAM / "known.json"  # hashes of each function's code in the tested NVFlare versions
LOG = logging.getLogger(__name__)
PLACES: dict[str, tuple[str, ...]] = {}
# For each patch that NVFlare may have adopted, a function that tests whether the installed NVFlare contains the patch.
TRIED: dict[str, Callable[[], bool]] = {}
PARSING = threading.Lock()  # In Python 3.11, a SystemError can occur if two threads parse code at the same time.
Part = TypeVar("Part", bound=Callable[..., Any])


def made_for(
    *names: str, begins: str = "__init__", merged: Callable[[], bool] | None = None, whole: bool = True
) -> Callable[[Part], Part]:
    """Record the NVFlare functions on which a patch depends.

    When the patch is first used, one log line names the functions whose code differs from the tested versions.

    Args:
        *places: The NVFlare functions, each as "module:Class.function".
        begins: The method that is called first, if the patch is a class.
        merged: Returns True if the installed NVFlare has merged the patch. The function is called once per process, and
            an error counts as False. A merged patch only logs once that it was merged, and returns None.
        whole: False if a merged patch still has something to do. Such a patch calls `is_merged` itself.
    """

    def marked(part: Part) -> Part:
        name = part.__name__
        PLACES[name] = names
        if merged:
            TRIED[name] = merged
        if not isinstance(part, type):
            return _unless(name, part) if merged and whole else _saying(name, part)
        setattr(part, begins, _saying(name, getattr(part, begins)))
        return part

    return marked


def _saying(part: str, function: Part) -> Part:
    @wraps(function)
    def checked(*args: Any, **more: Any) -> Any:
        say_if_changed(part)
        return function(*args, **more)

    return checked  # type: ignore[return-value]


def _unless(part: str, function: Part) -> Part:
    own = _saying(part, function)

    @wraps(function)
    def checked(*args: Any, **more: Any) -> Any:
        return None if is_merged(part) else own(*args, **more)

    return checked  # type: ignore[return-value]


@cache
def is_merged(part: str) -> bool:
    """Return True if the installed NVFlare already contains a patch. For each patch that NVFlare contains, the process
    writes one log line.
    """
    try:
        merged = TRIED[part]()
    except Exception:  # the test may not work with the installed version of NVFlare
        LOG.debug("%s can't be tried with NVFlare %s", part, version("nvflare"), exc_info=True)
        return False
    if merged:
        LOG.info("%s is off: NVFlare %s does its work itself", part, version("nvflare"))
    return merged


@cache
def say_if_changed(part: str) -> None:
    """Log a warning, once per process, if a patch depends on a function whose code differs in the installed NVFlare."""
    if others := changed(part):
        told = "%s was made for another NVFlare than %s: %s differs here; medsilo's upstream/%s.md says why"
        LOG.warning(told, part, version("nvflare"), ", ".join(others), part)


def changed(part: str) -> list[str]:
    """Return the functions on which a patch depends and whose code differs from all tested NVFlare versions."""
    known = json.loads(KNOWN.read_text("utf-8"))
    return [place for place in PLACES[part] if hash_of(place) not in known.get(place, {}).values()]


def hash_of(target: str) -> str:
    """Return a hash of a function's code without the comments; if the function does not exist, return an empty text."""
    module, _, names = target.partition(":")
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        source = inspect.getsource(found)
    except (ImportError, AttributeError, TypeError, OSError):
        return ""
    with PARSING:
        code = ast.unparse(ast.parse(textwrap.dedent(source)))
    return hashlib.sha256(code.encode()).hexdigest()[:16]
