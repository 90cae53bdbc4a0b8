"""What both sides ask of a parcel before anything of it is used."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.methods.base import Groups


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


def check_package(site: Any, server: Any) -> None:
    """A site runs the server's own code, or does nothing, and nothing of it counts."""
    _same_version("medsilo", _facts(site), _facts(server))


def check_packages(site: Any, server: Any) -> None:
    """Raise Refused unless a site runs the server's versions of the other packages that the plan uses."""
    own, served = (_facts(_facts(code).get("packages", {})) for code in (site, server))
    for name in sorted({*own, *served}):
        _same_version(str(name)[:60], _facts(own.get(name)), _facts(served.get(name)))


def _facts(told: Any) -> Mapping[str, Any]:
    return told if isinstance(told, dict) else {}


def _same_version(name: str, site: Mapping[str, Any], server: Mapping[str, Any]) -> None:
    runs, serves = ({key: facts.get(key) for key in ("version", "hash")} for facts in (site, server))
    if runs != serves:
        own, served = (f"{facts['version']} ({str(facts['hash'])[:12]})" for facts in (runs, serves))
        raise Refused(f"runs {name} {own}, the server {served}; install the same package at both")


def check_metrics(metrics: Any, names: frozenset[str]) -> None:
    """A metric is a finite number, or None where there is none."""
    if not isinstance(metrics, dict):
        raise Refused(f"its metrics are a {type(metrics).__name__}")
    same_names("metrics", metrics, names)
    for name, value in metrics.items():
        if value is not None and not is_number(value):
            raise Refused(f"metric {name} is {value!r}, not a finite number")


def check_counts(counts: Any, layout: Mapping[str, int]) -> None:
    """Raises Refused unless these are counts of this layout: as many numbers as it says; what is withheld is absent."""
    if not isinstance(counts, dict):
        raise Refused(f"its counts are a {type(counts).__name__}")
    for name, values in counts.items():
        if name not in layout:
            raise Refused(f"its counts have the surplus {str(name)[:40]}")
        if not isinstance(values, list) or len(values) != layout[name]:
            raise Refused(f"its counts of {name} are not {layout[name]} numbers")
        if not all(map(is_number, values)):
            raise Refused(f"its counts of {name} are no finite numbers")


def check_classes(told: Any, cases: Mapping[str, int], classes: int) -> None:
    """Raises Refused unless every part has None, or a number of cases for each class that add up to the part's."""
    if not isinstance(told, dict):
        raise Refused(f"its counts of classes are a {type(told).__name__}")
    same_names("classes", told, cases)
    for part, counts in told.items():
        if counts is None:
            continue
        if not isinstance(counts, list) or len(counts) != classes or not all(type(n) is int and n >= 0 for n in counts):
            raise Refused(f"its counts of the {part} part's classes are not {classes} whole numbers")
        if sum(counts) != cases[part]:
            raise Refused(f"its counts of the {part} part's classes make {sum(counts)}, not its {cases[part]} cases")


def check_warnings(told: Any) -> None:
    """What a site wants the lead to know: a few lines."""
    if (
        not isinstance(told, list)
        or len(told) > 9
        or not all(isinstance(line, str) and len(line) < 400 for line in told)
    ):
        raise Refused("its warnings are no list of a few lines")


def is_number(value: Any) -> bool:
    """Whether this is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
