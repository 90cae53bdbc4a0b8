"""Questions to all hospitals by a job: what the job holds, and which inquiries a hospital answers."""

from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError, Refused
from medsilo.federation.inquiry import inquiry_of
from medsilo.flare.inquiry_job import read_answers, write_inquiry_job
from medsilo.flare.jobs import check_components
from medsilo_statistics.asked_question import Question


def test_a_job_without_cases_is_whole(tmp_path: Path) -> None:
    question = Question.from_values({"variables": {"age": {"range": [0, 100]}}, "table": ["age"]}, "a test")
    write_inquiry_job(tmp_path / "job", "statistics", question.in_yaml(), 2)
    check_components(tmp_path / "job")
    with pytest.raises(MedsiloError, match="left no answers"):
        read_answers(tmp_path, "statistics", tmp_path)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_hospital_that_allows_sealed_classes_answers_nothing_in_clear(sealed: bool) -> None:
    name = "statistics-sealed" if sealed else "statistics"
    assert inquiry_of(name, sealed, ()).sealed is inquiry_of(name, None, ()).sealed is sealed
    with pytest.raises(Refused, match="its classes say otherwise"):
        inquiry_of(name, not sealed, ())
    with pytest.raises(Refused, match="the inquiry '../x' is not known here"):
        inquiry_of("../x", sealed, ())
