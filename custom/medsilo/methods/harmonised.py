"""A method behind HarmoFL's input layer: what travels besides, and when (Jiang et al. 2022, Alg. 1)."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from medsilo.core.errors import PlanError, Refused
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.harmony import Amplitude
from medsilo.learning.training import Training
from medsilo.methods.base import Algorithm, Blueprint, Groups, Modules, Phase, Workbench
from medsilo.mixing.mixers import Mixer, UniformMean

HARMONISE, AMPLITUDE = "harmonise", "amplitude"


@dataclass(frozen=True)
class Harmonised:
    """Any method whose images have one amplitude.

    Phase "harmonise" is the first round in which the method trains: every site normalises with its own amplitude,
    which then leaves it. Their mean comes down once and is fixed from then on. All else is as the method has it.
    """

    method: Algorithm
    amplitude: Amplitude
    training: Training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def phases(self, training: Training) -> Sequence[Phase]:
        before, first, after = self._split()
        return [*before, Phase(HARMONISE, 1), Phase(first.name, first.rounds - 1), *after]

    def _split(self) -> tuple[Sequence[Phase], Phase, Sequence[Phase]]:
        """The method's phases before the first in which it trains, that one, and those after it."""
        phases = self.method.phases(self.training)
        place = next(place for place, phase in enumerate(phases) if phase.trains and phase.rounds)
        return phases[:place], phases[place], phases[place + 1 :]

    def _own(self, phase: str) -> str:
        """What the method calls the phase."""
        return self._split()[1].name if phase == HARMONISE else phase

    def _is_before(self, phase: str) -> bool:
        return any(phase == earlier.name for earlier in self._split()[0])

    def networks(self, build: Blueprint) -> Modules:
        modules = self.method.networks(build)
        if build.shape is None:
            raise PlanError("algorithm.amplitude: needs images of one size; set task.size or algorithm.amplitude=null")
        return modules | {AMPLITUDE: self.amplitude.layer(build.shape)}

    def check(self, modules: Modules) -> None:
        self.method.check(modules)
        if self.method.choice(modules):
            raise PlanError(f"algorithm.amplitude: {self.name}'s super model has no input layer; set it to null")

    def input_layer(self, modules: Modules) -> nn.Module:
        return modules[AMPLITUDE]

    def whole(self, modules: Modules) -> nn.Module:
        return nn.Sequential(OrderedDict(input=self.input_layer(modules), model=self.method.whole(modules)))

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        return self.method.shared(modules, self._own(phase)) | (_used(modules) if phase == HARMONISE else {})

    def given(self, modules: Modules, phase: str) -> Groups:
        return self.method.given(modules, self._own(phase)) | ({} if self._is_before(phase) else _used(modules))

    def received(self, modules: Modules, groups: Collection[str], phase: str) -> None:
        self.method.received(modules, groups, self._own(phase))
        if phase == HARMONISE or self._is_before(phase):
            return
        norm = _norm(modules)
        if AMPLITUDE in groups:
            norm.forget_unused()
            norm.freeze(norm.amplitude)
        elif not norm.frozen:
            raise Refused("this site has lost the amplitude that all sites share; it is sent with the next request")

    def averages(self, images: int, training: Training) -> int:
        return self.amplitude.averages(images, training)

    def examine(self, groups: Groups, phase: str) -> None:
        self.method.examine(groups, self._own(phase))

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        return UniformMean() if group == AMPLITUDE else self.method.mixer(group, earlier, sites)  # line 17

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        return self.method.train(bench, self._own(phase))

    def personal(self, modules: Modules, phase: str) -> bool:
        return self.method.personal(modules, self._own(phase))


def _norm(modules: Modules) -> AmplitudeNorm:
    return cast(AmplitudeNorm, modules[AMPLITUDE])


def _used(modules: Modules) -> Groups:
    """What of the amplitude is used, so that nothing else leaves a site."""
    return {AMPLITUDE: {AMPLITUDE: _norm(modules).used}}
