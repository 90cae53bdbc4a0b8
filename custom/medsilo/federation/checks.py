"""What both sides ask of a parcel before anything of it is used."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from medsilo.algorithms.base import Groups
from medsilo.errors import Refused
from medsilo.package import package_facts


def same_names(what: str, given: Collection[str], expected: Collection[str]) -> None:
    """Raises Refused, naming the first few, when names are missing or surplus."""
    for problem, names in (
        ("lacks", set(expected) - set(given)),
        ("has the surplus", set(given) - set(expected)),
    ):
        if names:
            shown = ", ".join(sorted(map(str, names))[:3]) + (", ..." if len(names) > 3 else "")
            raise Refused(f"{what}: {problem} {shown}")


def same_layout(groups: Mapping[str, Mapping[str, Any]], expected: Groups) -> None:
    """Raises Refused unless these groups hold tensors of just these names and shapes."""
    same_names("groups", groups, expected)
    for group, layout in expected.items():
        same_names(f"group {group}", groups[group], layout)
        for name, like in layout.items():
            tensor = groups[group][name]
            if not isinstance(tensor, Tensor):
                raise Refused(f"{group}/{name} is a {type(tensor).__name__}, not a tensor")
            if tensor.shape != like.shape:
                raise Refused(f"{group}/{name} has shape {list(tensor.shape)}, expected {list(like.shape)}")


def check_package(theirs: Any) -> None:
    """Sites run the server's own code, or nothing of theirs counts."""
    ours = package_facts()
    if theirs != ours:
        known = theirs if isinstance(theirs, dict) else {}
        raise Refused(
            f"runs medsilo {known.get('version')} ({str(known.get('hash'))[:12]}), the server {ours['version']} "
            f"({ours['hash'][:12]}); install the same package at both"
        )


def check_metrics(metrics: Any, names: frozenset[str]) -> None:
    """A metric is a finite number, or None where there is none."""
    if not isinstance(metrics, dict):
        raise Refused(f"its metrics are a {type(metrics).__name__}")
    same_names("metrics", metrics, names)
    for name, value in metrics.items():
        if value is not None and not is_number(value):
            raise Refused(f"metric {name} is {value!r}, not a finite number")


def is_number(value: Any) -> bool:
    """Whether this is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
