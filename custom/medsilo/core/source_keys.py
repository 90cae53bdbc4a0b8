"""Read the keys of a section from the source code of its class, because importing the class would import PyTorch."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PLAN_CLASS = "medsilo.plan:Plan"
ROOT = "medsilo.core.section:Section"  # the base class of all sections
MOST_BASES = 32
OTHERWISE = {"alias", "validation_alias"}  # arguments that give a field a key other than the field's name


class _Source(NamedTuple):
    classes: Mapping[str, ast.ClassDef]
    imported: Mapping[str, str]  # each imported name as "module:Name", by the name that the importing module uses


class SourceKeys(NamedTuple):
    """The keys of a class, in the order of the source code. Each key has the class of its value as "module:Class", or
    "" for a plain value.
    """

    keys: Mapping[str, str]

    def below(self, path: Sequence[str]) -> "SourceKeys | None":
        """Return the keys of a nested section, or None if the keys are unknown.

        Args:
            path: The keys that lead to the nested section.
        """
        found: SourceKeys | None = self
        for key in path:
            found = keys_in_source(found.keys.get(key, "")) if found else None
        return found


def keys_in_source(where: str) -> SourceKeys | None:
    """Return the keys of a class, including inherited keys; None if the keys can't be determined from the source
    code.
    """
    keys = _keys_of(where, MOST_BASES)
    return None if keys is None else SourceKeys(keys)


@cache
def _keys_of(where: str, left: int) -> Mapping[str, str] | None:
    """Return the keys of a class, each with the class of its value; None if the keys can't be determined from the
    source code.

    Args:
        left: The most levels of base classes to follow.
    """
    if where == ROOT:
        return {}
    module, _, name = where.partition(":")
    source = _source_of(module)
    own = source.classes.get(name) if source else None
    if source is None or left == 0:
        return None
    if own is None:  # a class that the module does not define is imported from another module
        return _keys_of(source.imported[name], left - 1) if name in source.imported else None
    if not own.bases or not _is_plain(own):
        return None
    keys: dict[str, str] = {}
    for base in reversed(own.bases):
        above = _keys_of(_place_of(base, module, source), left - 1)
        if above is None:
            return None
        keys |= above
    for line in own.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_key(line):
            keys[line.target.id] = _section_of(line.annotation, module, source)
    return keys


def _is_plain(own: ast.ClassDef) -> bool:
    """True if the fields of a class have no aliases, no model configuration and no early validators, so that each field
    is exactly one key.
    """
    words = {word.arg for node in ast.walk(own) if isinstance(node, ast.Call) for word in node.keywords}
    names = {
        name.id
        for line in own.body
        if isinstance(line, ast.Assign)
        for name in line.targets
        if isinstance(name, ast.Name)
    }
    rules = [rule for line in own.body if isinstance(line, ast.FunctionDef) for rule in line.decorator_list]
    early = [rule for rule in rules if "model_validator" in ast.unparse(rule) and "after" not in ast.unparse(rule)]
    return not (words & OTHERWISE or "model_config" in names or early)


def _is_key(line: ast.AnnAssign) -> bool:
    assert isinstance(line.target, ast.Name)
    kind = line.annotation.value if isinstance(line.annotation, ast.Subscript) else line.annotation
    return not line.target.id.startswith("_") and _word(kind) != "ClassVar"


def _section_of(annotation: ast.expr, module: str, source: _Source) -> str:
    """Return the class in an annotation such as `Class` or `Class | None`, as "module:Class"; "" if the class is
    unknown.
    """
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.right, ast.Constant):
        annotation = annotation.left
    return _place_of(annotation, module, source)


def _place_of(node: ast.expr, module: str, source: _Source) -> str:
    """Return the class to which a name in a module refers, as "module:Class"; "" if the class is unknown."""
    name = node.id if isinstance(node, ast.Name) else ""
    return f"{module}:{name}" if name in source.classes else source.imported.get(name, "")


def _word(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def _source_of(module: str) -> _Source | None:
    try:
        file = _file_of(module)
        tree = ast.parse(file.read_bytes()) if file else None
    # if the module can't be read, the reason is reported later, when the module is imported
    except (OSError, SyntaxError, ValueError, ImportError, RecursionError):
        tree = None
    if tree is None or file is None:
        return None
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    lines = [*tree.body, *(inner for line in tree.body if isinstance(line, ast.If) for inner in line.body)]
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return _Source(
        {line.name: line for line in lines if isinstance(line, ast.ClassDef)},
        {alias.asname or alias.name: place for line in imports for alias, place in _imports(line, package)},
    )


def _imports(line: ast.ImportFrom, package: Sequence[str]) -> Iterable[tuple[ast.alias, str]]:
    above = package[: len(package) - line.level + 1] if line.level else []
    place = ".".join([*above, *([line.module] if line.module else [])])
    return [(alias, f"{place}:{alias.name}") for alias in line.names]


def _file_of(module: str) -> Path | None:
    """Return the source file of a module without importing the module."""
    first, *rest = module.split(".")
    spec = find_spec(first) if first else None
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        within = folder.joinpath(*rest)
        for file in (within / "__init__.py", within.with_suffix(".py") if rest else within / "__init__.py"):
            if file.is_file():
                return file
    return Path(spec.origin) if spec and spec.origin and not rest and spec.origin.endswith(".py") else None
