"""Over mutual TLS, a hospital's query budget limits a lead's requests, and no plan can lower the hospital's minimum
numbers of patients.
"""

from pathlib import Path

import pytest
import yaml

from medsilo.plan import parse_plan
from medsilo.runs.reading import read_summary
from medsilo.site.query_budget import QueryBudget
from medsilo_lab.jobs import write_job
from tests.conftest import SITES
from tests.hospital import NAMES, write_photos
from tests.secure.consortium import LEAD, SERVER, Consortium
from tests.unit.federation.test_protection import STUDY
from tests.unit.privacy.test_private_numbers import LOUD, PRIVATE, parts_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
HOSPITAL = SITES[0]


def test_answers_are_counted_for_the_authenticated_lead(pair: Consortium, tmp_path: Path) -> None:
    local = pair.kit(HOSPITAL) / "local/medsilo.yaml"
    before = local.read_text()
    photos = write_photos(tmp_path / "photos", NAMES)
    own = {"device": "cpu", "memory_limit": 0, "approval": "none", "data": str(photos), "answers": 5}
    local.write_text(yaml.safe_dump(own))
    try:
        for study, rounds in (("within", 2), ("over", 2)):
            plan = parse_plan(STUDY, [f"training.rounds={rounds}", f"participation.sites=[{HOSPITAL}]"])
            write_job(tmp_path / study, plan, study=study)
            status = pair.run(tmp_path / study)
            summary = read_summary(pair.kit(SERVER) / "medsilo" / study)
            assert (status == "FINISHED:COMPLETED") == (study == "within"), summary
        assert "needs 4 answers with scores over validation cases" in summary.reason
        book = QueryBudget(pair.kit(HOSPITAL) / "medsilo/_hospital" / HOSPITAL)
        ((asker, count),) = book.counts().items()
        assert asker.lead == LEAD and asker.study == "within"
        assert count.answered == {"train": 2, "validation": 3, "test": 1}
        audit = "\n".join(path.read_text() for path in pair.kit(HOSPITAL).rglob("audit.log"))
        assert "medsilo refused: the study needs 4 answers" in audit
    finally:
        local.write_text(before)


@pytest.mark.long
def test_a_plan_that_offers_noise_lowers_no_floor_of_a_hospital(pair: Consortium, tmp_path: Path) -> None:
    """A hospital that does not demand privacy discloses no score of three patients, and rounds its counts."""
    local = pair.kit(HOSPITAL) / "local/medsilo.yaml"
    before = local.read_text()
    photos = write_photos(tmp_path / "photos", NAMES, parts_of(3, 16))
    local.write_text(yaml.safe_dump({"device": "cpu", "approval": "none", "data": str(photos)}))
    try:
        told = []
        for study, validated in (("few", 16), ("near", 17)):
            write_photos(photos, NAMES, parts_of(3, validated))
            plan = parse_plan({**PRIVATE, "privacy": LOUD}, [f"participation.sites=[{HOSPITAL}]"])
            write_job(tmp_path / study, plan, study=study)
            assert pair.run(tmp_path / study) == "FINISHED:COMPLETED"
            told.append(read_summary(pair.kit(SERVER) / "medsilo" / study).sites[HOSPITAL])
    finally:
        local.write_text(before)
    few, near = told
    assert few.test and few.test["accuracy"] is None and few.test["loss"] is None
    assert all(count % 5 == 0 for count in few.cases.values())
    scores = [score for score in few.validation if score is not None]
    assert scores and all(score == pytest.approx(round(score / 0.2) * 0.2) for score in scores)
    assert set(near.validation) == {None}
