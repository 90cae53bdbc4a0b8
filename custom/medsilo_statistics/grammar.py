"""Filters of a question: comparisons of variables, joined by and, or, not. Nothing of a filter is ever run."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Values = Mapping[str, NDArray[np.float64]]
LONGEST = 500  # characters
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
JOIN: Mapping[type[ast.boolop], np.ufunc] = {ast.And: np.logical_and, ast.Or: np.logical_or}
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
            self._meets = self._read(ast.parse(text[: LONGEST + 1].strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            why = f" ({error})" if type(error) is ValueError else ""
            raise ValueError(f"the filter can't be read{why}; {HOW}") from error

    def meets(self, values: Values) -> Mask:
        """Return who meets it. values: by variable, of categories the places of their levels, NaN where missing."""
        return self._meets(values)

    def _read(self, node: ast.expr) -> Callable[[Values], Mask]:
        """Return what says who meets a part of the filter; raises ValueError where it is none that is known."""
        if isinstance(node, ast.BoolOp):
            parts, join = [self._read(part) for part in node.values], JOIN[type(node.op)]
            return lambda values: join.reduce([part(values) for part in parts])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._read(node.operand)
            return lambda values: ~inner(values)
        if isinstance(node, ast.Call):
            if getattr(node.func, "id", "") != "missing" or node.keywords or len(node.args) != 1:
                raise ValueError("missing(variable) is all that may be called")
            asked = self._name(node.args[0])
            return lambda values: np.isnan(values[asked])
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(self._name(node.left), node.ops[0], node.comparators[0])
        raise ValueError("a part of it is no comparison")

    def _name(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Name) or node.id not in self.levels:
            raise ValueError(f"{getattr(node, 'id', 'the left side')!r} is no variable of the question")
        return node.id

    def _compared(self, name: str, op: ast.cmpop, node: ast.expr) -> Callable[[Values], Mask]:
        """Return what compares a variable with numbers; of categories with the places of their levels."""
        several = isinstance(op, ast.In | ast.NotIn)
        if several != isinstance(node, ast.List | ast.Tuple) or not (several or type(op) in COMPARE):
            raise ValueError("write 'in' before a list, and <, <=, >, >=, == or != before one value")
        places = [self._place(name, each) for each in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
        if self.levels[name] and not isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            raise ValueError(f"{name} has levels, which have no order")
        if several:
            within = isinstance(op, ast.In)
            return lambda values: (np.isin(values[name], places) == within) & ~np.isnan(values[name])
        compare = COMPARE[type(op)]
        return lambda values: compare(values[name], places[0]) & ~np.isnan(values[name])

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
