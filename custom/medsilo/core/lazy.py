"""Names that are imported when they are first used, so that importing the module that gives them costs nothing."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


@cache
def places_in(file: str) -> dict[str, str]:
    """Return the modules of the names that a file imports for type checkers."""
    blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazily(module: str, file: str) -> Callable[[str], object]:
    """Return a module's `__getattr__`, which imports a name of `places_in(file)` when it is first used."""

    def get(name: str) -> object:
        if name not in places_in(file):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = named_in(file, name)
        setattr(sys.modules[module], name, found)
        return found

    return get


def named_in(file: str, name: str) -> object:
    """Return one of these names; raises an ImportError that says what to install where its package is absent."""
    place = places_in(file)[name]
    try:
        module = import_module(place)
    except ModuleNotFoundError as error:
        package = place.partition(".")[0]
        if error.name != package:
            raise
        told = f"{name} comes with {package}, which is not here; install {package.replace('_', '-')}"
        raise ImportError(told, name=package) from None
    if not hasattr(module, name):  # a module in a package
        import_module(f"{place}.{name}")
    return getattr(module, name)
