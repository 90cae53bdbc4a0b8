"""Find a source file's uses of NVFlare: the imports from NVFlare, and the attributes that the file reads from imported
names.

A use is a chain of names that starts with an imported name. For example,
`nvflare.apis.fl_context.FLContext.get_engine.get_clients` is a call of `get_clients` on the result of a context's
`get_engine`.

The parser infers a variable's type from annotations, assignments and loops. For an attribute of `self`, the parser also
searches the class's base class in NVFlare.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

PLATFORM = "nvflare"
HANDED_ON = {"sorted", "list", "set", "tuple", "reversed"}
# Attributes that return plain data, whose methods belong to Python and not to NVFlare.
PLAIN = {"data", "meta", "headers", "get_headers", "get_identity_name", "get_job_meta"}
PLAIN |= {"HEADER_STRUCT", "__name__"}
Known = dict[str, str]


class Uses(ast.NodeVisitor):
    def __init__(self, path: Path) -> None:
        self.found: set[str] = set()
        self.set: set[str] = set()
        self.known: Known = {}
        self.bases: list[str] = []
        self.own: set[str] = set()
        tree = ast.parse(path.read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.visit(node)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                inner = node.returns.slice if isinstance(node.returns, ast.Subscript) else node.returns
                self.learn(ast.Name(node.name), self.chain(inner))
        self.visit(tree)

    # --------------------------------------------------------------------- meanings of names
    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == PLATFORM:
                self.known[alias.asname or alias.name] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.split(".")[0] == PLATFORM:
            for alias in node.names:
                name = self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if not is_module(name):
                    self.found.add(name)

    def chain(self, node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Constant):
            return self.known.get(node.value) if isinstance(node.value, str) else None
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in HANDED_ON and node.args:
                return self.chain(node.args[0])
            return returned(self.chain(node.func))
        if isinstance(node, ast.Subscript | ast.Await | ast.Starred):
            return self.chain(node.value)
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.chain, node.values)), None)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.chain(node.left) or self.chain(node.right)
        return None

    def _of_self(self, name: str) -> str | None:
        if (known := self.known.get(f"self.{name}")) or name in self.own:
            return known
        return next((f"{base}.{name}" for base in self.bases if has(base, name)), None)

    def _attribute(self, node: ast.Attribute) -> str | None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self._of_self(node.attr)
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super":
            return next((f"{base}.{node.attr}" for base in self.bases if has(base, node.attr)), None)
        before = self.chain(node.value)
        if before and before.rpartition(".")[2] in PLAIN:
            return before
        return f"{before}.{node.attr}" if before else None

    def learn(self, target: ast.AST, chain: str | None) -> None:
        if chain and isinstance(target, ast.Name):
            self.known[target.id] = chain
        if chain and isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.known[f"{target.value.id}.{target.attr}"] = chain

    # ------------------------------------------------------------------------------ uses
    def visit_Assign(self, node: ast.Assign) -> None:
        self._learn_assigned(node)
        self.generic_visit(node)

    def _learn_assigned(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for own, value in zip(target.elts, node.value.elts, strict=False):
                    self.learn(own, self.chain(value))
            else:
                self.learn(target, self.chain(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.learn(node.target, self.chain(node.annotation))
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.learn(node.target, self.chain(node.value))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars:
                self.learn(item.optional_vars, self.chain(item.context_expr))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.learn(node.target, self.chain(node.iter))
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for loop in node.generators:
            self.learn(loop.target, self.chain(loop.iter))
        self.generic_visit(node)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside = self.known, self.bases, self.own
        self.bases = [chain for base in node.bases if (chain := self.chain(base))]
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        self.own = methods | {target.attr for target in ast.walk(node) if _is_set_on_self(target)}
        for name in sorted(methods):
            self.found |= {f"{base}.{name}" for base in self.bases if name != "__init__" and has(base, name)}
        self.known = dict(self.known)
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                self.own.add(part.target.id)
                self.learn(ast.Attribute(ast.Name("self"), part.target.id), self.chain(part.annotation))
        # Methods may use an attribute that a later method of the class sets.
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                self._learn_arguments(part)
            if isinstance(part, ast.Assign):
                self._learn_assigned(part)
        self.generic_visit(node)
        self.known, self.bases, self.own = outside

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside, self.known = self.known, dict(self.known)
        self._learn_arguments(node)
        self.generic_visit(node)
        self.known = outside

    def _learn_arguments(self, node: ast.FunctionDef) -> None:
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self.learn(ast.Name(argument.arg), self.chain(argument.annotation))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if chain := self.chain(node):
            self.found.add(chain)
            if isinstance(node.ctx, ast.Store) and not _is_set_on_self(node):
                self.set.add(chain)
        self.generic_visit(node)


def _is_set_on_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def is_module(name: str) -> bool:
    """Return True if a dotted name is a module; raise an error if the module exists but cannot be imported because of a
    missing name.
    """
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def has(chain: str, name: str) -> bool:
    module, _, cls = chain.rpartition(".")
    found = getattr(import_module(module), cls, None) if is_module(module) else None
    if not inspect.isclass(found):
        return False
    return hasattr(found, name) or name in _of_instances(found)


@cache
def _of_instances(cls: type) -> frozenset[str]:
    names: set[str] = set()
    for own in cls.__mro__:
        names |= set(getattr(own, "__annotations__", ()))
        if own.__module__.split(".")[0] == PLATFORM:
            names |= set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(own)))
            names |= set(getattr(own, "model_fields", ()))
    return frozenset(names)


def returned(chain: str | None) -> str | None:
    if not chain:
        return None
    module, _, name = chain.rpartition(".")
    called = getattr(import_module(module), name, None) if is_module(module) else None
    gives = getattr(called, "__annotations__", {}).get("return")
    if isinstance(gives, type) and gives.__module__.split(".")[0] == PLATFORM:
        return f"{gives.__module__}.{gives.__qualname__}"
    return chain


def uses_of(path: Path) -> Iterator[str]:
    found = Uses(path).found
    yield from (chain for chain in found if not any(other.startswith(f"{chain}.") for other in found))
