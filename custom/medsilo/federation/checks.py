"""What both sides ask of a parcel before anything of it is used."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from medsilo.algorithms.base import Groups
from medsilo.errors import Refused


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
