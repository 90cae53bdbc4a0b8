"""Each method gives the tensors that tests/digests.py has recorded.

In the slow tests, sites remove their networks from memory between their answers, as in a study with many sites.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from medsilo_lab.engines import inprocess
from tests.conftest import METHODS, slow_but
from tests.digests import CASES, FILE, left_by, this_processor

KNOWN: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
IN_EVERY_RUN = [
    *(f"{method}, synthetic-histology" for method in ("fedavg", "scaffold", "ditto", "harmofl", "adafed", "fedsm")),
    "fedsm, ditto",
    "fedbn, both halves",
    "fedavg, bfloat16",
    "harmofl, unseen",
]
# Methods whose steps depend on the network's layers or on images, so that the slow tests run these methods with images,
# too. All other methods use only a network's loss and scores.
BY_LAYERS = [
    *("local", "fedbn", "silobn", "fedper", "moon", "fedlws", "fedrdn", "fedala", "fedce", "fedmap", "condistfl"),
    *("d-adafed", "f-adafed", "fedsm-extra", "central"),
]
# one method of each kind, for the tests that run after each change of the code
SEALED = ["fedavg", "fedbn", "scaffold", "fednova", "harmofl", "ditto", "fedsm"]


def cases() -> Iterator[Any]:
    """Methods that work with any loss run with classes after each change of the code, and with masks every night."""
    several = [case.split(", ")[0] for case in IN_EVERY_RUN]
    rarely = [method for method in [*METHODS, "central"] if method not in several]
    late = {f"{method}, synthetic-prostate" for method in rarely}
    late |= {f"{method}, synthetic-histology" for method in rarely if method not in BY_LAYERS}
    late |= {case for case in CASES if case.endswith(", sealed")} - {f"{method}, sealed" for method in SEALED}
    for case in slow_but(IN_EVERY_RUN, CASES):
        is_late = not isinstance(case, str) and case.values[0] in late
        yield pytest.param(*case.values, marks=pytest.mark.long) if is_late else case


@pytest.mark.parametrize("case", list(cases()))
def test_the_same_numbers_as_before(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case not in IN_EVERY_RUN:
        monkeypatch.setattr(inprocess, "AWAKE", 0)
    same = case.replace("condistfl", "fedavg")  # condistfl equals fedavg if all structures are annotated
    assert same in KNOWN["cases"], f"run: python -m tests.digests {CASES[case][1]}"
    found, known = left_by(case), KNOWN["cases"][same]
    assert found["sizes"] == pytest.approx(known["sizes"], rel=0.02)
    here = this_processor()
    for scores in known["tests"].values():
        assert found["tests"][here] == pytest.approx(scores, rel=0.2, abs=0.05)
    if here in known["bits"]:
        assert found["bits"][here] == known["bits"][here]
        assert found["tests"][here] == known["tests"][here]
