"""Plans of papers have the papers' values, name the papers' data, and run with fewer cases and rounds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan, load_plan
from medsilo.registry import TASKS
from medsilo.site.settings import SiteSettings
from results import convert as convert_sets
from tests import inprocess, layouts
from tests.conftest import slow_but

JOBS = Path(__file__).resolve().parents[3] / "jobs"
SETS = ["monusac2020-lung", "monusac2020-breast", "monuseg2018", "tnbc"]
UNET, BASIC = "network.features=[2, 4]", "network.features=[2, 2, 4, 4, 4]"
POOL = ["task.partition.minimum=12", "task.partition.alpha=5", "participation.sites=[a, b]"]
SELECTOR = ["algorithm.selector=compact", "protocol=default"]


def nuclei(folder: Path) -> Path:
    for name, make in (("monusac2020", layouts.monusac), ("monuseg2018", layouts.monuseg), ("tnbc", layouts.tnbc)):
        make(folder / name)
    return folder


def prostates(*sites: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for site in sites:
            layouts.prostate(folder, site=site)
        return folder

    return make


def converted(make: Callable[[Path], Path], convert: Callable[[Path], None]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        convert(make(folder))
        return folder / "organcmnist" if convert is convert_sets.organmnist else folder

    return made


MRI = [prostates("ISBI", "ISBI_1.5"), "task.size=32", "participation.sites=[isbi, isbi-15]", BASIC]
CASES = [prostates("I2CVB", "promise12"), "task.size=32", "participation.sites=[i2cvb, promise12]", UNET, *SELECTOR]
EYES = [
    converted(layouts.riga, convert_sets.fundus),
    "task.size=32",
    "participation.sites=[binrushed, magrabia]",
    UNET,
    *SELECTOR,
]
SMALL = {
    "harmofl/camelyon17": [
        converted(layouts.camelyon17, convert_sets.camelyon17),
        "task.size=[32, 32]",
        "training.rounds=1",
        "participation.sites=[center-0, center-4]",
    ],
    "harmofl/nuclei": [nuclei, "task.size=32", f"participation.sites=[{', '.join(SETS)}]", BASIC],
    "harmofl/prostate": MRI,
    "fedsm/prostate": CASES,
    "fedsm/retinal": EYES,
    "fedsm-extra/prostate": [*CASES, "algorithm.selector_rounds=1"],
    "fedsm-extra/retinal": [*EYES, "algorithm.selector_rounds=1"],
    "adafed/covid19": [
        converted(layouts.covid_xray, convert_sets.covid_xray),
        *("task.size=[63, 63]", "network.size=63", "network.width=4", *POOL),
    ],
    "adafed/organmnist": [converted(layouts.organ_mnist, convert_sets.organmnist), *POOL],
    "adafed/pamap2": [
        converted(layouts.pamap2, convert_sets.pamap2),
        *("network.hidden=4", "participation.sites=[client-01, client-02]"),
    ],
}
PLANS = {name: JOBS / name.replace("/", "/plans/") for name in SMALL}


def loaded(method: str, *changes: str) -> dict[str, Plan]:
    return {
        name: load_plan(path.with_suffix(".yaml"), changes) for name, path in PLANS.items() if name.startswith(method)
    }


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 8, "STRIDE": 4, "CLIENTS": 3, "ALPHA": 5.0, "FEWEST": 12}.items():
        monkeypatch.setattr(convert_sets, name, value)


def test_every_plan_of_a_paper_names_real_data_and_is_run_here() -> None:
    plans = {f"{path.parents[1].name}/{path.stem}": load_yaml(path.read_text()) for path in JOBS.glob("*/plans/*.yaml")}
    papers = {name: plan["task"]["name"] for name, plan in plans.items() if plan["protocol"] == "paper"}
    assert papers.keys() == SMALL.keys()
    assert not any(TASKS[task].synthetic for task in papers.values())


def test_harmofl_s_numbers() -> None:
    plans = list(loaded("harmofl").values())
    assert all(plan.algorithm.perturbation.alpha == 0.05 for plan in plans)
    assert [plan.task.shape for plan in plans] == [(3, 96, 96), (3, 256, 256), (3, 384, 384)]
    assert [plan.task.split for plan in plans[1:]] == ["paper"] * 2
    assert plans[0].task.shares == (0.64, 0.16, 0.2)
    assert [len(plan.participation.sites) for plan in plans] == [5, 6, 6]
    assert [plan.rounds for plan in plans] == [100, 500, 500]
    assert [plan.training.batch_size for plan in plans] == [128, 8, 16]
    assert [plan.training.learning_rate for plan in plans] == [1e-3, 1e-4, 1e-4]
    assert [plan.training.optimizer for plan in plans] == ["sgd", "sgd", "adam"]
    assert [plan.training.truncate for plan in plans] == [True, False, True]
    assert plans[2].training.betas == (0.9, 0.99)


@pytest.mark.slow
def test_fedsm_s_numbers() -> None:
    for name, plan in loaded("fedsm", *SELECTOR).items():  # building the network of the paper's selector takes seconds
        retinal = name.endswith("retinal")
        assert plan.algorithm.pull == (0.7 if retinal else 0.3)
        assert (plan.rounds, plan.task.shape, len(plan.participation.sites)) == (150, (1 + 2 * retinal, 256, 256), 6)
        assert plan.task.shares == (0.5, 0.25, 0.25) and plan.training.betas == (0.9, 0.999)


def test_adafed_s_numbers() -> None:
    plans = loaded("adafed")
    assert [plan.task.shape for plan in plans.values()] == [(1, 224, 224), (1, 28, 28), None]
    assert [(plan.task.channels, plan.task.goal.classes) for plan in plans.values()] == [(1, 4), (1, 11), (27, 10)]
    for plan in plans.values():
        assert len(plan.participation.sites) == 20
        assert (plan.algorithm.self_weight, plan.training.learning_rate) == (0.5, 0.01)
        if plan.task.name == "image-folder":
            dealt = plan.task.partition
            assert (dealt.alpha, dealt.minimum, plan.task.shares) == (0.1, 40, (0.45, 0.05, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["fedsm-extra/retinal"], SMALL, ()))
def test_they_run(name: str, tmp_path: Path) -> None:
    make, *changes = SMALL[name]
    small = ["training.rounds=2", "training.batch_size=8", *changes]
    if name.startswith("adafed"):
        small.append("algorithm.pretraining.epochs=1")
    plan = load_plan(PLANS[name].with_suffix(".yaml"), small)
    settings = SiteSettings(device="cpu", data=make(tmp_path / "data"), public_data=True, min_patients_per_metric=1)
    assert inprocess.run(plan, settings=settings).summary.status == "finished"
