"""Filters of a question: comparisons of variables, joined by and, or, not. Nothing of a filter is ever run."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
LONGEST = 500  # characters
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
HOW = "write comparisons like age >= 50 and (sex == 'female' or stage in ['II', 'III']) and not missing(size)"


class Filter:
    """A checked filter. A patient whose value is missing meets no comparison of it.

    >>> Filter("age >= 50 and not missing(age)", {"age": ()}).meets({"age": np.array([60.0, np.nan])})
    array([ True, False])
    """

    def __init__(self, text: str, levels: Mapping[str, tuple[str, ...]]) -> None:
        """levels: of each variable; none where it is a number. Raises ValueError."""
        self.levels = levels
        try:
            self._tree = ast.parse(text[: LONGEST + 1].strip(), mode="eval").body
            self._check(self._tree)
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            why = f" ({error})" if type(error) is ValueError else ""
            raise ValueError(f"the filter can't be read{why}; {HOW}") from error

    def meets(self, values: Mapping[str, NDArray[np.float64]]) -> Mask:
        """Return who meets it. values: by variable, of categories the places of their levels, NaN where missing."""
        return self._mask(self._tree, values)

    def _check(self, node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self._check(part)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand)
        elif isinstance(node, ast.Call):
            if (
                not (isinstance(node.func, ast.Name) and node.func.id == "missing")
                or node.keywords
                or len(node.args) != 1
            ):
                raise ValueError("missing(variable) is all that may be called")
            self._name(node.args[0])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            name = self._name(node.left)
            self._places(name, node.ops[0], node.comparators[0])
        else:
            raise ValueError("a part of it is no comparison")

    def _name(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Name) or node.id not in self.levels:
            raise ValueError(f"{getattr(node, 'id', 'the left side')!r} is no variable of the question")
        return node.id

    def _places(self, name: str, op: ast.cmpop, node: ast.expr) -> list[float]:
        """Return what a variable is compared with, as numbers; of categories the places of their levels."""
        several = isinstance(op, ast.In | ast.NotIn)
        if several != isinstance(node, ast.List | ast.Tuple) or not (several or type(op) in COMPARE):
            raise ValueError("write 'in' before a list, and <, <=, >, >=, == or != before one value")
        found = [self._place(name, each) for each in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
        if self.levels[name] and not isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            raise ValueError(f"{name} has levels, which have no order")
        return found

    def _place(self, name: str, node: ast.expr) -> float:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._place(name, node.operand)
        value = node.value if isinstance(node, ast.Constant) else None
        levels = self.levels[name]
        if levels and isinstance(value, str | int) and str(value) in levels:
            return float(levels.index(str(value)))
        if not levels and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise ValueError(f"{name} is compared with what it can't be")

    def _mask(self, node: ast.expr, values: Mapping[str, NDArray[np.float64]]) -> Mask:
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return join.reduce([self._mask(part, values) for part in node.values])
        if isinstance(node, ast.UnaryOp):
            return ~self._mask(node.operand, values)
        if isinstance(node, ast.Call):
            return np.isnan(values[self._name(node.args[0])])
        assert isinstance(node, ast.Compare)
        name, op = self._name(node.left), node.ops[0]
        own, places = values[name], self._places(name, op, node.comparators[0])
        if isinstance(op, ast.In | ast.NotIn):
            found = np.isin(own, places) == isinstance(op, ast.In)
        else:
            found = COMPARE[type(op)](own, places[0])
        return np.asarray(found & ~np.isnan(own))
