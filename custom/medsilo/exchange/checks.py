"""Functions with which the server and every site check package versions and tensors."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.package import in_words, name_that_differs
from medsilo.core.tensors import Groups, is_finite
from medsilo.core.text import plain
from medsilo.runs.messages import same_names
from medsilo.schedule.phase import Group, Ranges


def check_packages(site: Any, server: Any) -> None:
    """Raise Refused unless the site and the server have the same versions of medsilo and of all other packages that the
    plan uses.
    """
    own, served = (told if isinstance(told, dict) else {} for told in (site, server))
    if own != served and (name := name_that_differs(own, served)) is not None:
        runs, serves = (plain(in_words(code.get(name)), 60) for code in (own, served))
        raise Refused(f"runs {plain(str(name), 60)} {runs}, the server runs {serves}; install the same package at both")


def same_layout(groups: Mapping[str, Mapping[str, Any]], expected: Groups) -> None:
    """Raise Refused unless the tensor groups contain exactly the expected tensor names and shapes."""
    same_names("groups", groups, expected)
    for group, layout in expected.items():
        same_names(f"group {group}", groups[group], layout)
        for name, like in layout.items():
            tensor = groups[group][name]
            if not isinstance(tensor, Tensor):
                raise Refused(f"{group}/{name} is a {type(tensor).__name__}, not a tensor")
            if tensor.shape != like.shape:
                raise Refused(f"{group}/{name} has shape {list(tensor.shape)}, expected {list(like.shape)}")


def check_ranges(group: str, tensors: Mapping[str, Tensor], ranges: Ranges) -> None:
    """Raise Refused if a tensor has a value outside the possible range of the tensor."""
    for name in tensors.keys() & ranges.keys():
        if not tensors[name].numel():
            continue
        (low, high), (least, greatest) = ranges[name], map(float, tensors[name].aminmax())
        if least < low or greatest > high:
            value = least if least < low else greatest
            raise Refused(f"{group}/{name} holds {value:g}; only {low:g} to {high:g} is possible there")


def check_forms(groups: Groups, expected: Groups) -> None:
    """Raise Refused unless the tensor groups contain exactly the expected tensors with the expected shapes and
    types.
    """
    same_layout(groups, expected)
    for group, layout in expected.items():
        for name, like in layout.items():
            tensor = groups[group][name]
            if tensor.dtype != like.dtype:
                raise Refused(f"{group}/{name} has dtype {tensor.dtype}, expected {like.dtype}")
            if tensor.layout != like.layout:
                raise Refused(f"{group}/{name} is not a dense tensor")


def check_numbers(
    groups: Groups, declared: Sequence[Group], ranges: Mapping[str, Ranges], finite: Mapping[str, Collection[str]]
) -> None:
    """Raise Refused if a tensor has a value that is not finite, or that is outside the tensor's possible range.

    Args:
        ranges: the ranges of tensors whose values are limited, by group
        finite: the names of tensors that are known to be finite, by group
    """
    for group, tensors in groups.items():
        for name in tensors.keys() - finite.get(group, ()):
            if not is_finite(tensors[name]):
                raise Refused(f"{group}/{name} holds NaN or infinity; training diverged at this site")
    for own in declared:
        if own.name in groups:
            check_ranges(own.name, groups[own.name], ranges.get(own.name, {}))
            own.check(groups[own.name])
