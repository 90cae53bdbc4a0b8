"""A plan follows its declared protocol, or is rejected."""

import pytest

from medsilo.core.errors import PlanError
from medsilo.registry import METHODS
from tests.conftest import make_plan

NONE = ["algorithm.amplitude=null", "algorithm.perturbation=null"]


def test_every_method_says_what_its_paper_says() -> None:
    assert all("paper" in METHODS[name].protocols for name in METHODS.ours)


@pytest.mark.parametrize("halves", [NONE, NONE[:1], NONE[1:]])
def test_harmofl_without_a_half_is_not_the_paper_s(halves: list[str]) -> None:
    image = ["task.name=synthetic-histology", "algorithm.amplitude.start=zero"]
    assert make_plan("harmofl", *image, "protocol=paper").protocol == "paper"
    with pytest.raises(PlanError, match=r"none, but protocol 'paper' of harmofl has"):
        make_plan("harmofl", *image, *halves, "protocol=paper")
    assert make_plan("harmofl", *image, *halves).protocol == "default"


@pytest.mark.parametrize("change", ["weights=uniform", "bn_share=mean", "pretraining.share=0.5"])
def test_adafed_s_paper_pins_its_equations(change: str) -> None:
    plain = ["protocol=paper", "training.momentum=0"]
    assert make_plan("adafed", *plain).protocol == "paper"
    with pytest.raises(PlanError, match="but protocol 'paper' of adafed has"):
        make_plan("adafed", *plain, f"algorithm.{change}")


@pytest.mark.parametrize("method", ["fedavg", "adafed", "local", "fedsm-extra"])
def test_a_word_of_which_a_method_says_nothing_is_refused(method: str) -> None:
    with pytest.raises(
        PlanError, match=f"protocol: 'released-code' says nothing of {method}; declare default or paper"
    ):
        make_plan(method, "training.rounds=3", "protocol=released-code")


def test_a_half_of_harmofl_is_in_no_other_paper() -> None:
    image = ["task.name=synthetic-histology", "protocol=paper"]
    with pytest.raises(PlanError, match=r"algorithm\.amplitude: .* 'paper' of fedavg has None"):
        make_plan("fedavg", *image, "algorithm.amplitude={}")
