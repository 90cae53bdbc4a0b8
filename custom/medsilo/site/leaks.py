"""What leaves a site under a plan, before anything runs: every group of tensors, its bytes, and what it averages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from medsilo.algorithms.harmonised import AMPLITUDE
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings


@dataclass(frozen=True)
class Leak:
    """One group of tensors that a site sends in each of these rounds."""

    first: int
    last: int
    phase: str
    group: str
    tensors: tuple[str, ...]
    bytes: int

    @property
    def rounds(self) -> int:
        return self.last - self.first + 1


def leaks(plan: Plan) -> list[Leak]:
    """All groups that leave a site, in the order of the rounds."""
    with torch.device("meta"):
        modules = plan.build_networks()
    found, first = [], 1
    for phase in plan.method.phases(plan.training):
        last = first + phase.rounds - 1
        for group, tensors in plan.method.shared(modules, phase.name).items():
            size = sum(plan.transport.packed(tensor).nbytes for tensor in tensors.values())
            if phase.rounds:
                found.append(Leak(first, last, phase.name, group, tuple(tensors), size))
        first = last + 1
    return found


def describe(plan: Plan, images: Mapping[str, int | str], settings: SiteSettings) -> list[str]:
    """The report as lines. images: every site's number of training images, or why it is not known."""
    lines = [f"What leaves a site under {plan.algorithm.title}, task {plan.task.name} (plan {plan.hash[:12]})", ""]
    rows = [("rounds", "group", "tensors", "bytes a round", "bytes in all")]
    for leak in leaks(plan):
        rounds = str(leak.first) if leak.rounds == 1 else f"{leak.first} to {leak.last}"
        count = str(len(leak.tensors))
        rows.append((rounds, leak.group, count, f"{leak.bytes:,}", f"{leak.bytes * leak.rounds:,}"))
    if len(rows) == 1:
        lines.append("no tensor")
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    lines += [
        "",
        "With every answer: the numbers of training, validation and test cases, the training loss, validation and test "
        "scores, seconds, medsilo's version and hash. No image, no label, no file name.",
    ]
    with torch.device("meta"):
        told = plan.method.leaves(plan.build_networks())
    if told:
        lines += ["", *told]
    if plan.method.averages(1 << 20, plan.training) is not None:
        lines += ["", *_averages(plan, images, settings)]
    return lines


def _averages(plan: Plan, images: Mapping[str, int | str], settings: SiteSettings) -> list[str]:
    number = next(leak.first for leak in leaks(plan) if leak.group == AMPLITUDE)
    lines = [
        "amplitude: one average amplitude spectrum per channel over the whole training set of a site, in round "
        f"{number} only: no phase and no single image's spectrum. Late batches count for more in it; as an average "
        f"without favour it covers (smallest_average here: {settings.smallest_average}):",
    ]
    for site, count in images.items():
        if isinstance(count, str):
            lines.append(f"  {site}: not known: {count}")
            continue
        covers = plan.method.averages(count, plan.training) or 0
        verdict = "" if covers >= settings.smallest_average else "; REFUSED by this setting"
        lines.append(f"  {site}: {covers} of its {count} training images{verdict}")
    return lines
