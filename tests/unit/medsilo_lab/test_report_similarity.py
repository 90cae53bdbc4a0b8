"""On a run's page, AdaFed's similarity matrix has a row and a column for each site."""

from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.runs.schema import Details, Similarity
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess
from medsilo_lab.report import page
from medsilo_lab.report.read import read_all
from tests.conftest import make_plan
from tests.unit.medsilo_lab.test_report import save, spoil, summary_of

SCORES = {"hospital-a": 0.5, "hospital-b": 0.75, "hospital-c": None}
WEIGHTS = [[0.5, 0.3, 0.2], [0.1, 0.5, 0.4], [0.25, 0.25, 0.5]]


def details(**changes: object) -> dict:
    return {"details": Details(similarity=Similarity(sites=list(SCORES), weights=WEIGHTS, noise=0.0), **changes)}


def test_the_page_shows_matrix_and_source(tmp_path: Path) -> None:
    share = {"source": "share", "data": "20% of every site's training cases", "start": True}
    runs = [
        save(tmp_path, summary_of("fedavg", "FedAvg", SCORES)),
        save(tmp_path, summary_of("adafed", "AdaFed", SCORES, **details(pretraining=share))),
        save(tmp_path, summary_of("f-adafed", "f-AdaFed", SCORES, **details())),
    ]
    text = page.render(read_all(runs), "Title")
    assert text.count('class="number heat"') == 12 + 9 and text.count('class="number kept"') == 6
    assert "trained on: 20% of every site" in text
    assert "No data were shared" in text
    assert "Weights between sites" not in page.render(read_all(runs[:1]), "Title")


@pytest.mark.parametrize("weights", [[[1.0]], [[1, 0], [0, 1], [0, 0]], "none"])
def test_a_damaged_matrix_is_named(weights: object, tmp_path: Path) -> None:
    run = save(tmp_path, summary_of("adafed", "AdaFed", SCORES, **details()))
    spoil(run, "details", "similarity", "weights", value=weights)
    with pytest.raises(MedsiloError, match=r"details\.similarity"):
        read_all([run])


@pytest.mark.slow
def test_weights_are_recorded_when_they_change(tmp_path: Path) -> None:
    small = ["task.persons=6", "task.windows=12", "task.steps=32", "training.batch_size=8", "training.rounds=4"]
    matrices = {}
    for name, method in (("once", "adafed"), ("again", "f-adafed")):
        plan = make_plan(method, *small)
        inprocess.run(plan, folder=tmp_path / name, settings=SiteSettings(device="cpu"))
        [run] = read_all([tmp_path / name])
        matrices[name] = [line.weights for line in run.rounds if line.weights]
        last = run.summary.details.similarity.weights
        assert matrices[name][-1] == [pytest.approx(row, abs=1e-4) for row in last]
    assert [len(own) for own in matrices.values()] == [1, 2]
    assert matrices["again"][0] != matrices["again"][1]
