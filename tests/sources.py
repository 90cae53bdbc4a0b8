"""Parse Python source into syntax trees, and find the medsilo modules that a file imports."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def modules() -> dict[str, Path]:
    custom = ROOT / "custom"
    parts = {path: path.relative_to(custom).with_suffix("").parts for path in sorted(custom.rglob("*.py"))}
    return {".".join(own[:-1] if own[-1] == "__init__" else own): path for path, own in parts.items()}


class Imports(ast.NodeVisitor):
    """Collect the medsilo modules that a file imports, including imports in functions, but not imports for type
    checkers.
    """

    def __init__(self, known: Mapping[str, Path]) -> None:
        self.known, self.found = known, set[str]()

    def visit_If(self, node: ast.If) -> None:
        types_only = "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))
        for inner in node.orelse if types_only else ast.iter_child_nodes(node):
            self.visit(inner)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= self.known.keys() & {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found |= self.known.keys() & {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def imported_by(name: str, known: Mapping[str, Path]) -> set[str]:
    reader = Imports(known)
    reader.visit(tree_of(known[name]))
    return reader.found


def makefile(root: Path) -> str:
    text = (root / "Makefile").read_text("utf-8")
    included = re.findall(r"(?m)^include (.*)$", text)[0].split()
    return "\n".join([text, *((root / name).read_text("utf-8") for name in included)])
