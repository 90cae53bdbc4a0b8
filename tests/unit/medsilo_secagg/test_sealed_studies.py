"""Studies with secure aggregation give the same models as studies without secure aggregation.

medsilo rejects a plan whose messages cannot be masked, and gives the reason.
"""

from pathlib import Path

import pytest

from medsilo import cli, registry
from medsilo.check.disclosure import leaks
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.deploy.source import Source
from medsilo_secagg.sealed_rounds import Blocks, terms_of
from tests import inprocess
from tests.conftest import PERSONAL, PLAIN, SITES, SMALL, make_plan
from tests.inprocess import StudyResult

SETTINGS = SiteSettings(device="cpu", public_data=True)
# Training amplifies rounding differences, for example at a ReLU whose input is near zero. A small learning rate
# prevents the amplification of rounding differences, so that differences between two studies come from secure
# aggregation only.
STEADY = ["training.learning_rate=0.001", "training.momentum=0.0"]
IMAGES = ["task.name=synthetic-histology", "task.size=32", "task.patients=5", "task.patches=4", "training.batch_size=8"]
OWN: dict[str, list[str]] = {
    "harmofl": IMAGES,
    "moon": [],
    # A large τ reduces the effect of rounding in the first step, where masked sums are rounded to multiples of 0.01.
    "fedadam": ["algorithm.tau=0.1"],
    "fedyogi": ["algorithm.tau=0.1"],
    "fedadagrad": ["algorithm.tau=0.1"],
}
MEANS = [method for method in PLAIN if method != "local"]
READ_AT_SITES = [*MEANS, *PERSONAL, "moon", "harmofl"]


def plan_of(method: str, mode: str, *changes: str) -> Plan:
    own = [change for change in OWN.get(method, []) if mode != "none" or not change.startswith("secure_aggregation")]
    small = [] if IMAGES[0] in own else SMALL
    return make_plan(method, *small, *own, *STEADY, f"secure_aggregation.mode={mode}", *changes)


def run(method: str, mode: str, *changes: str, folder: Path | None = None) -> StudyResult:
    return inprocess.run(plan_of(method, mode, *changes), settings=SETTINGS, folder=folder)


def furthest(one: StudyResult, other: StudyResult) -> float:
    """Return the largest difference between the models of two studies; if a tensor's largest value exceeds one, the
    difference is divided by this value.
    """
    worst = 0.0
    for site, model in one.models.items():
        theirs = other.models[site].state_dict()
        for name, tensor in model.state_dict().items():
            if tensor.numel():
                size = max(1.0, float(tensor.double().abs().max()))
                worst = max(worst, float((tensor.double() - theirs[name].double()).abs().max()) / size)
    return worst


ALONE = SiteSettings(device="cpu", public_data=True, share_personal_model=False)


@pytest.mark.parametrize(
    "method",
    [
        "fedsm",
        pytest.param("fedsm-extra", marks=pytest.mark.slow),
        pytest.param("fedsm-ensemble", marks=pytest.mark.slow),
    ],
)
def test_personal_models_never_leave_and_the_super_model_has_the_sites_own(method: str, tmp_path: Path) -> None:
    """With secure aggregation, personal models stay at the sites, as in a study without sharing of personal models."""
    rules = ["training.rounds=3"]
    clear, sealed = tmp_path / "clear", tmp_path / "sealed"
    one = inprocess.run(plan_of(method, "none", *rules), settings=ALONE, folder=clear)
    other = inprocess.run(plan_of(method, "pairwise", *rules), settings=SETTINGS, folder=sealed)
    assert furthest(one, other) <= 1e-5
    for site in SITES:
        own = sorted(path.name for path in (sealed / "sites" / site / "supermodel").rglob("*.safetensors"))
        assert own == sorted(path.name for path in (clear / "sites" / site / "supermodel").rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ refusals
REFUSED = [
    ("fedavg", ["participation.sites=[a,b]"], "each of two can calculate"),
    ("fedavg", ["participation.when_missing=continue", "participation.minimum=2"], "it needs 3"),
    ("fedavg", ["transport.precision=bfloat16"], "bfloat16 only costs digits"),
    ("fedavg", ["aggregation.max_weight=0.5"], "which sealing hides from the server"),
    ("fedavg", ['aggregation.robust={"name": "median"}'], "which sealing hides from the server"),
    ("fedavg", ["secure_aggregation.threshold=4"], "for 3 hospitals it must be from 2 to 3"),
    ("adafed", [], "adafed's statistics can't be sealed: .*; choose another method"),
    (
        "adafed",
        ["algorithm.weights=uniform"],
        "adafed's model can't be sealed: each hospital gets a mixture of its own",
    ),
    ("d-adafed", [], "d-adafed's statistics can't be sealed: .* or set secure_aggregation.mode=none"),
    ("f-adafed", ["training.rounds=2"], "f-adafed's model can't be sealed: each hospital gets a mixture of its own"),
    ("local", [], "nothing to seal"),
    ("central", [], "nothing to seal"),
    ("fedsm", ['algorithm.personal_method={"name": "ditto"}'], "takes each site's values as they are"),
]


@pytest.mark.parametrize("method, changes, reason", REFUSED)
def test_what_cannot_be_sealed_is_refused_with_the_reason(method: str, changes: list[str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        make_plan(method, "secure_aggregation.mode=pairwise", *changes)


def test_a_plan_is_refused_where_nothing_that_is_installed_seals(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the package medsilo_secagg, medsilo rejects a plan that requires secure aggregation, with an error of one
    line.
    """
    every = registry._entries
    without = {"medsilo.aggregations": {}}
    monkeypatch.setattr(registry, "_entries", lambda group, path: without.get(group, every(group, path)))
    told = ["disclosure", str(root / "jobs/fedavg"), "--set", "secure_aggregation.mode=pairwise"]
    assert cli.main(told) == 1
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1
    assert (
        "secure_aggregation.mode" in line
        and "install medsilo_secagg" in line
        and "secure_aggregation.mode=none" in line
    )
    assert make_plan("fedavg").secure_aggregation.implementation is None


def test_a_plan_that_says_nothing_of_sealing_is_not_sealed() -> None:
    plan = make_plan("fedavg")
    assert make_plan("fedavg", "secure_aggregation.mode=none").hash == plan.hash


@pytest.mark.parametrize("count", range(3, 13))
def test_by_default_two_hospitals_may_help_the_server(count: int) -> None:
    plan = make_plan("fedavg", "secure_aggregation.mode=pairwise", sites=[f"site-{place:02}" for place in range(count)])
    threshold = terms_of(plan, "study", plan.participation.sites).threshold
    # docs/trust/secure-aggregation.md states this bound
    assert threshold - 1 >= 2 and count - threshold == (count - 1) // 3


def test_numbers_beyond_the_bound_cost_the_site_its_round() -> None:
    with pytest.raises(MedsiloError, match=r"bound of 0\.01.*secure_aggregation.clip"):
        run("fedavg", "pairwise", "secure_aggregation.clip=0.01")


def test_sums_over_features_keep_their_digits() -> None:
    """The plan's bound on sums over features determines the scale of the sums, so that small features keep their
    digits.
    """
    plan = plan_of("fedsm", "pairwise", "secure_aggregation.clip=1000")
    blocks = Blocks(plan, terms_of(plan, "study", plan.participation.sites), 1)
    sums = [blocks.of(phase, plan.build_networks()).get("sums") for phase in plan.course.phases]
    assert [own.block.fixed.bound for own in sums if own] == [1000]


# ------------------------------------------------ record and stored files


def test_the_record_says_what_was_sealed_and_against_whom(tmp_path: Path) -> None:
    study = run("fedavg", "pairwise", folder=tmp_path / "study")
    sealing = study.summary.details.as_json()["secure_aggregation"]
    assert sealing["mode"] == "pairwise" and "learns sums" in sealing["protects"][0]
    assert Source.open(tmp_path / "study").facts["file"] == "global/best.safetensors"
    for site in SITES:
        own = tmp_path / "study" / "sites" / site
        assert (own / "best.safetensors").exists()
        assert (own / "secure-aggregation.json").stat().st_mode & 0o077 == 0


def test_the_disclosure_counts_sealed_bytes() -> None:
    clear, sealed = (leaks(plan_of("fedavg", how))[-1].bytes for how in ("none", "pairwise"))
    assert 1.8 * clear < sealed < 2.2 * clear
