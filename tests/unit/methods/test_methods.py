"""Each method passes all tests of MethodTester, and equals its reference in plain torch if there is a reference.

After each change of the code, the tests run one method of each kind; all other methods run at night.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from medsilo_lab.testing import MethodTester, Reference
from tests.conftest import FEDSM, METHODS, SITES
from tests.unit.methods import test_baselines as baselines
from tests.unit.methods.test_algorithms import (
    Penalty,
    State,
    all_but_head,
    all_but_norm,
    all_but_statistics,
    everything,
    nothing,
    study_by_hand,
)

ByHand = Callable[[Reference], Sequence[Mapping[str, State]]]
NEVER_SUMMED = "how much each hospital counts follows from what all of them send"
STATISTICS = ["privacy.statistics.epsilon=0.5", "privacy.statistics.clip=1e-5"]
NORM = ["model/0.1.", "model/1.1."]
PRIVACY = "test_one_case_moves_what_leaves_by_its_bound_under_privacy"
SAYS: dict[str, dict[str, Any]] = {
    "local": {"keeps": ["model/"], "unsealed": "local sends no tensors"},
    "fedbn": {"keeps": NORM},
    "silobn": {"keeps": [f"{layer}running_{name}" for layer in NORM for name in ("mean", "var")]},
    "fedper": {"keeps": ["model/6."]},
    "fedrep": {"keeps": ["model/6."]},
    "fedrdn": {"keeps": ["input/"], "private": STATISTICS},
    "feddg-ga": {"keeps": ["gap/own_loss"], "unsealed": "the server takes each site's values as they are"},
    **{method: {"unsealed": NEVER_SUMMED} for method in ("fedlws", "fedawa")},
    "fedce": {"keeps": ["contribution/"], "unsealed": NEVER_SUMMED, "more_looks": 1},
    "fedmap": {"unsealed": "the server takes each site's values as they are"},
    # A masked sum is rounded to multiples of 0.01, which matters less in the first step if τ is larger.
    **{method: {"changes": ["algorithm.tau=0.1"]} for method in ("fedadam", "fedyogi", "fedadagrad")},
    "scaffold": {"keeps": ["own-control/"]},
    "feddyn": {"keeps": ["gradient/"]},
    "cyclic": {"unsealed": "one hospital's model is handed on at a time"},
    "fedala": {"keeps": ["aggregation/"]},
    **{method: {"keeps": ["model/"]} for method in ("ditto", "per-fedavg", "pfedme", "fine-tuning")},
    "apfl": {"keeps": ["local/", "model/"]},
    "fedrod": {"keeps": ["model/6.", "own-head/"]},
    "fedbabu": {"keeps": ["model/"]},
    "harmofl": {"private": ["algorithm.amplitude=null"]},
    **{
        method: {"keeps": NORM, "unsealed": "statistics can't be sealed", PRIVACY: None}
        for method in ("adafed", "d-adafed")
    },
    "f-adafed": {"keeps": NORM, "unsealed": "each hospital gets a mixture of its own"},
    **{method: {"private": ["algorithm.selector_sync=server-adam"], "more_looks": 1} for method in FEDSM},
}
AT_EVERY_CHANGE = {
    "test_what_stays_at_a_site_is_what_it_keeps": ["fedavg", "apfl", "scaffold", "harmofl", "adafed", "fedsm"],
    "test_the_order_of_answers_does_not_matter": ["fedavg", "fedbn"],
    "test_half_precision_on_the_wire_and_at_sites": ["fedavg", "fedbn"],
    "test_a_site_that_misses_a_round_does_not_count_in_it": ["fedavg", "scaffold", "fedsm"],
    "test_a_study_that_stopped_goes_on_as_if_it_had_not": ["fedavg", "apfl", "scaffold", "harmofl", "adafed", "fedsm"],
    "test_a_site_s_state_is_in_its_folder": ["fedavg", "apfl", "scaffold"],
    "test_test_cases_are_looked_at_once_and_at_the_end": ["fedavg", "ditto", "scaffold", "harmofl", "adafed", "fedsm"],
    PRIVACY: ["fedavg", "ditto"],
    "test_sums_of_masked_updates_give_the_same_models": ["fedavg", "fedbn"],
    "test_it_can_be_rehearsed": ["fedavg", "scaffold", "per-fedavg", "harmofl", "f-adafed", "fedsm-extra"],
    "test_its_plan_is_the_same_when_it_was_written": METHODS,
}
REFERENCE = "test_three_rounds_are_those_of_the_reference"


def at_night(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def again(*given: Any, **named: Any) -> None:
        test(*given, **named)

    return pytest.mark.long(again)


def class_of(method: str, *changes: str) -> type[MethodTester]:
    own: dict[str, Any] = {"method": method, **SAYS.get(method, {}), REFERENCE: None}
    own["changes"] = [*own.get("changes", ()), *changes]
    for name, methods in AT_EVERY_CHANGE.items():
        if name not in own and (changes or method not in methods):
            own[name] = at_night(getattr(MethodTester, name))
    return type(f"Test {' '.join([method, *changes])}", (MethodTester,), own)


VARIANTS = [
    ("apfl", "algorithm.adaptive=true"),
    ("fine-tuning", "training.truncate=true"),
    ("fedbn", "training.optimizer=adam", "training.momentum=0", "training.learning_rate=0.01"),
    ("fedper", "training.optimizer_state=reset", "training.local_epochs=2"),
    ("fedprox", "algorithm.mu=0.5"),
]
for given in [*((method,) for method in METHODS), *VARIANTS]:
    made = class_of(*given)
    globals()[made.__name__] = made


# ---------------------------------------------------------------------------------------------------- in plain torch
class OfReference(MethodTester):
    """This class runs only the comparison with the reference; different test classes run the remaining tests of
    MethodTester.
    """

    by_hand: ByHand

    def reference(self, study: Reference) -> Sequence[Mapping[str, State]]:
        return type(self).by_hand(study)


for contract in AT_EVERY_CHANGE:
    setattr(OfReference, contract, None)


def shared(local: baselines.Local, server: baselines.Server, uniform: bool = False) -> ByHand:
    def by_hand(study: Reference) -> Sequence[Mapping[str, State]]:
        curve = baselines.study(study.plan, local, server, uniform)
        return [dict.fromkeys(SITES, state) for state in curve]

    return by_hand


def travelling(travels: Callable[[str], bool], **how: Any) -> ByHand:
    return lambda study: study_by_hand(study.plan, travels, **how)


def proximal(mu: float) -> Penalty:
    def penalty(weights: Sequence[Tensor], received: Sequence[Tensor]) -> Tensor:
        pairs = zip(weights, received, strict=True)
        return mu / 2 * torch.stack([((weight - anchor) ** 2).sum() for weight, anchor in pairs]).sum()

    return penalty


def average(w: dict, sent: dict, weights: dict, said: dict) -> dict:
    """Return an empty dictionary, so that the trained weights are averaged like all other tensors."""
    return {}


def scaffold(study: Reference) -> Sequence[Mapping[str, State]]:
    return shared(*baselines.scaffold(0.05), uniform=True)(study)


UNIFORM = "algorithm.weighting=uniform"
PLAIN_SGD = ("training.momentum=0",)
BY_HAND: list[tuple[ByHand, str, *tuple[str, ...]]] = [
    (travelling(everything), "fedavg"),
    (travelling(everything, uniform=True), "fedavg", UNIFORM),
    (travelling(everything), "fedavg", "training.optimizer_state=reset"),
    (travelling(everything, penalty=proximal(0.3)), "fedprox", "algorithm.mu=0.3"),
    (travelling(all_but_norm), "fedbn"),
    (travelling(all_but_norm, uniform=True), "fedbn", UNIFORM),
    (travelling(all_but_statistics), "silobn"),
    (travelling(all_but_head), "fedper"),
    (travelling(nothing), "local"),
    (travelling(nothing), "local", "training.optimizer_state=reset"),
    (shared(baselines.fresh, baselines.nova(0.0)), "fednova", *PLAIN_SGD),
    (shared(baselines.fresh, baselines.nova(0.9)), "fednova", "training.optimizer_state=keep"),
    (shared(baselines.fresh, baselines.nova(0.0), uniform=True), "fednova", *PLAIN_SGD, UNIFORM),
    (scaffold, "scaffold", *PLAIN_SGD),
    (shared(baselines.moon(2.0), average), "moon", "algorithm.mu=2"),
]
for by_hand, *given in BY_HAND:
    name = f"Test reference of {' '.join(given)}"
    own = {"method": given[0], "changes": given[1:], "by_hand": staticmethod(by_hand)}
    globals()[name] = type(name, (OfReference,), own)
