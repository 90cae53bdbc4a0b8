"""Validation after each n-th round does not change training, and only each n-th round has scores."""

from pathlib import Path

import pytest

from medsilo.check.disclosure import _numbers
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.federation.protection import planned_answers
from medsilo.plan import Plan
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess
from medsilo_lab.report.page import write
from tests.conftest import SITES, make_plan, slow_but

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16", "training.rounds=5"]
DUE = [0, 2, 4, 5]


def plan_of(method: str, every: int) -> Plan:
    return make_plan(method, *SMALL, f"model_selection.validate_every={every}")


def test_a_plan_validates_after_every_round_unless_it_says_more() -> None:
    plan = make_plan("fedavg", *SMALL)
    assert plan_of("fedavg", 1).hash == plan.hash
    sparse = plan_of("fedavg", 2)
    assert [rounds for rounds in range(6) if sparse.validates(rounds)] == DUE
    assert (
        sparse.validations == 4 and planned_answers(sparse)["validation"] == 4 and planned_answers(sparse)["train"] == 5
    )
    assert plan.validations == 6 == planned_answers(plan)["validation"]
    assert any(
        "after every 2 rounds and the last score" in line
        for line in _numbers(sparse, SiteSettings(min_patients_per_metric=1))
    )
    with pytest.raises(MedsiloError, match="model_selection.validate_every: 0 is too small"):
        plan_of("fedavg", 0)


# The methods differ: FedAvg has no special step, fine-tuning validates several models, FedBN selects at each site, and
# central training pools data.
@pytest.mark.parametrize("method", slow_but(["central"], ["fedavg", "fine-tuning", "fedbn", "central"]))
def test_rounds_without_a_score_train_alike(method: str, tmp_path: Path) -> None:
    sites = {}
    for every in (1, 2):
        folder = tmp_path / str(every)
        inprocess.run(plan_of(method, every), folder=folder)
        sites[every] = read_summary(folder).sites
        lasts = [load_tensors(path)[0] for path in sorted(folder.glob("sites/*/last.safetensors"))]
        kept = lasts if every == 1 else kept  # noqa: F821
    assert all((one[name] == other[name]).all() for one, other in zip(kept, lasts, strict=True) for name in one)
    summary = read_summary(tmp_path / "2")
    for site in SITES:
        own, all_scores = sites[2][site].validation, sites[1][site].validation
        assert own == [score if rounds in DUE else None for rounds, score in enumerate(all_scores)]
        assert summary.selected.rounds[site] in DUE
    if method == "fedavg":
        means = {n: sum(sites[1][site].validation[n] for site in SITES) for n in DUE}
        assert summary.selected.rounds[SITES[0]] == max(means, key=lambda n: means[n])


@pytest.mark.slow
def test_resumed_and_shown(tmp_path: Path) -> None:
    plan, whole, folder = plan_of("fedbn", 2), tmp_path / "whole", tmp_path / "stopped"
    inprocess.run(plan, folder=whole)

    def stop(line: Round) -> None:
        if line.round == 4:
            raise MedsiloError("enough")

    with pytest.raises(MedsiloError, match="enough"):
        inprocess.run(plan, folder=folder, on_round=stop)
    inprocess.run(plan, folder=folder, resume=True)
    assert all(read_summary(folder).sites[site].test == read_summary(whole).sites[site].test for site in SITES)
    scored = [[site.validation is not None for site in line.sites.values()] for line in read_rounds(folder)]
    assert scored == [[rounds in DUE] * 3 for rounds in range(5)]
    page = write([folder], tmp_path / "page.html", "run").read_text()
    lines = [part.partition("</svg>")[0] for part in page.split('aria-labelledby="curve-0-title"')[1:]]
    paths = [one.partition('d="')[2].partition('"')[0] for one in lines[0].split('class="line"')[1:]]
    assert len(paths) == 3 and all(path.count("M") == 1 and path.count("L") == 3 for path in paths), paths
