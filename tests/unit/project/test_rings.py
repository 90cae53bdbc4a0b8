"""Test the groups of tests, their time limits, the choice of tests for a change, and the date of `make test-long`."""

import pytest

from tests import changed, conftest


# ------------------------------------------------------------------------------------------------------- a default test
@pytest.mark.parametrize(
    ("used", "mark", "slower", "fails"),
    [(2.5, None, 1.0, False), (18.5, None, 1.0, True), (18.5, None, 1.2, False), (20.0, "slow", 1.0, False)],
)
def test_a_default_test_takes_two_seconds_of_the_processor(
    used: float, mark: str | None, slower: float, fails: bool, request: pytest.FixtureRequest
) -> None:
    ends = pytest.raises(pytest.fail.Exception, match=r"took 18\.5 s .*slow") if fails else pytest.raises(StopIteration)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "processor_seconds", iter([1.0, 1.0 + used]).__next__)
        patch.setattr(conftest, "pace", lambda: slower)
        patch.setattr(request.node, "get_closest_marker", lambda name: name if name == mark else None)
        watched = conftest.pytest_runtest_call(request.node)
        next(watched)
        with ends:
            watched.send(None)


# -------------------------------------------------------------------------------------------------------- changed files
def asked_for(*files: str) -> tuple[set[str], set[str], list[str]]:
    engine, beside, others = changed.tests_for(files)
    return {path.name for path in engine}, {path.name for path in beside}, others


def test_a_change_of_dicom_asks_for_dicoms_tests_alone() -> None:
    engine, beside, others = asked_for("custom/medsilo_dicom/predicting.py")
    assert engine == set() and others == [] and "test_dicom.py" in beside and "test_coordinator.py" not in beside


def test_a_change_of_the_engine_asks_for_its_folder_and_for_what_imports_it() -> None:
    engine, beside, _ = asked_for("custom/medsilo/mixing/defence.py")
    assert (
        {"test_robust.py", "test_aggregation_properties.py"} <= engine
        and beside == set()
        and "test_dicom.py" not in engine
    )
