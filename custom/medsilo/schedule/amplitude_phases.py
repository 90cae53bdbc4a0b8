"""Add the exchange of image amplitudes to the phases of a method."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.amplitude import AmplitudeNorm, images_averaged
from medsilo.learning.training import Training
from medsilo.schedule.additions import INPUT, Amplitude
from medsilo.schedule.phase import Average, Group, Phase, Ranges, site_mean
from medsilo.tasks.task import Task

if TYPE_CHECKING:
    from medsilo.schedule.train_context import TrainContext

HARMONISE, AMPLITUDE = "harmonise", "amplitude"
# maximum factor by which augmented pixel values may exceed the task's largest pixel value
BRIGHTER = 10


def behind(addition: Amplitude, phases: Sequence[Phase]) -> Sequence[Phase]:
    """Extend a method's phases: in one round, the sites send their amplitudes, and afterwards the server sends the mean
    amplitude to them.
    """
    own, shared = _groups(addition)
    if addition.released_alone:
        place, after = 0, phases
        first = Phase(HARMONISE, 1, (own,), _measure, trains=False, releases=1)
    else:
        place = next(place for place, phase in enumerate(phases) if phase.trains and phase.rounds)
        begun = phases[place]
        first = replace(begun, name=HARMONISE, rounds=1, groups=(*begun.groups, own))
        after = [replace(begun, rounds=begun.rounds - 1, before=None), *phases[place + 1 :]]
    return [*phases[:place], first, *(replace(phase, groups=(*phase.groups, shared)) for phase in after)]


def _groups(addition: Amplitude) -> tuple[Group, Group]:
    own = Group(
        AMPLITUDE,
        used,
        site_mean,  # line 17 of HarmoFL's Algorithm 1: A ← 1/N Σ A_i
        "up",
        average=Average(
            "one average amplitude spectrum per channel over the whole training set of a site: no phase and no "
            "single image's spectrum. Late batches count for more in it",
            partial(_covers, addition),
        ),
        unclipped=True,
        title="amplitude (in one round only)",
        ranges=amplitude_range,
    )
    return own, Group(AMPLITUDE, used, own.mix, "down", arrived=fix)


def _measure(context: "TrainContext") -> float:
    """Set a site's amplitude to the mean over the site's images, with noise under differential privacy."""
    norm = cast(AmplitudeNorm, context.modules[INPUT])
    found = (norm.amplitudes(inputs) for inputs, _ in context.cases.in_order())
    if context.private:
        norm.take(context.private.noisy_mean(found))
    else:
        norm.take(torch.cat(list(found)).double().mean(0))
    return math.nan


def _covers(addition: Amplitude, images: int, training: Training) -> int:
    if addition.released_alone:
        return images
    return images_averaged(images, training.batch_size, training.local_epochs, addition.decay, addition.start)


def used(modules: Modules) -> Tensors:
    """Return the amplitude at the frequencies that the input layer uses, because sites send no other frequencies."""
    return {AMPLITUDE: cast(AmplitudeNorm, modules[INPUT]).used}


def amplitude_range(modules: Modules, task: Task) -> Ranges:
    """Return the range of valid amplitudes: from 0 to the largest possible sum over an image's pixels."""
    norm = cast(AmplitudeNorm, modules[INPUT])
    return {AMPLITUDE: (0.0, BRIGHTER * task.largest_input * math.prod(norm.size))}


def fix(modules: Modules, came: bool) -> None:
    """Freeze the input layer's amplitude when the mean amplitude arrives.

    Args:
        came: Whether this message contains the mean amplitude; the function raises Refused if no message contained it.
    """
    norm = cast(AmplitudeNorm, modules[INPUT])
    if came:
        norm.forget_unused()
        norm.freeze(norm.amplitude)
    elif not norm.frozen:
        raise Refused("this site has lost the amplitude that all sites share; the server sends it once more")
