"""Distinguish a program's own code from the code of installed packages."""

import ast
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from medsilo.core.package import PLACE

INSTALLED = [PLACE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
OTHERS = {"site-packages", "dist-packages"}  # names of folders that contain installed packages


def is_installed(file: Path | str) -> bool:
    """True if a source file belongs to an installed package."""
    return bool(OTHERS.intersection(Path(file).parts) or any(map(Path(file).is_relative_to, _installed(*sys.path))))


@cache
def _installed(*names: str) -> list[Path]:
    """Return the folders that contain installed packages, including folders on PYTHONPATH that contain installed
    packages.
    """
    return [*INSTALLED, *(Path(place) for place in names if any(Path(place).glob("*.dist-info")))]


def own_line(error: BaseException) -> str:
    """Return the last line of an error's traceback that lies in the program's own code, or "" if no line does.

    The returned text has the form " (FILE, line 12, in dice)". The returned text omits the folder of the source file,
    because a hospital may send the text to the server.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_installed(frame.filename) and not frame.filename.startswith("<frozen")]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


def uncalled(kind: Any) -> set[str]:
    """Return the names of a class's public methods that nothing calls.

    A method counts as called if the package's code uses its name, or if a base class from another package defines the
    method. If nothing calls a method, the author probably misspelt the name of a method that medsilo calls.
    """
    package = kind.__module__.partition(".")[0]
    own = [one for one in kind.__mro__ if one.__module__.partition(".")[0] == package]
    known = {name for one in kind.__mro__ if one not in own for name in vars(one)}
    checks = getattr(kind, "__pydantic_decorators__", None)  # pydantic calls these validators
    known |= {name for part in fields(checks) for name in getattr(checks, part.name)} if checks else set()
    left = {
        name
        for one in own
        for name, value in vars(one).items()
        if not name.startswith("_") and name not in known and inspect.isfunction(value)
    }
    named = set[str]()
    for name, value in [(name, value) for one in own for name, value in vars(one).items() if inspect.isfunction(value)]:
        # code objects are used, because a class in a notebook may have no source code
        named |= {*value.__code__.co_names} - {name}
    left -= named
    for text in _sources(own, package):
        if not left:
            break
        left -= {_named(node) for node in ast.walk(ast.parse(dedent(text)))}
    return left


def _sources(modules: list[Any], package: str) -> Iterator[str]:
    """Yield the source code that may call a class's methods: first the code of the class, then the modules of the
    class's package.
    """
    for one in [*modules, *(module for name, module in [*sys.modules.items()] if name.partition(".")[0] == package)]:
        try:
            yield inspect.getsource(one)
        except (OSError, TypeError):  # a class or module may have no source file
            continue


def _named(node: ast.AST) -> str:
    """Return the name, the attribute or the string constant in a node of a syntax tree; "" for any node of another
    kind.
    """
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
