"""Compare FedSM with independent equations: three networks in one pass, SoftPull, the selector, and the threshold
gamma.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import DataError, ParticipationError, PlanError
from medsilo.deploy.supermodel import THRESHOLDS, SuperModel, tune
from medsilo.exchange.channel import Missing
from medsilo.learning.discriminant import FeatureSums, discriminant, tell_hospitals_apart
from medsilo.learning.layers import head_names
from medsilo.methods.fedsm_extra import best_of, mixed
from medsilo.models.architectures import Vgg11
from medsilo.plan import Plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases
from medsilo_lab.deploy.model_card import card_facts
from medsilo_lab.deploy.source import Source
from medsilo_lab.report import page
from medsilo_lab.report.read import read_all
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, SMALL, make_plan, slow_but
from tests.sites import CPU, site_of, with_settings
from tests.unit.medsilo_lab.test_report import Page
from tests.unit.medsilo_server.test_coordinator import Answers, Study
from tests.unit.methods.test_algorithms import batches_by_hand, listen

A, B, C = SITES
GO_ON = ["participation.when_missing=continue", "participation.minimum=1"]
Numbers = dict[str, np.ndarray]


def planned(*changes: str, method: str = "fedsm", sites: list[str] | None = None) -> Plan:
    return make_plan(method, *SMALL, *changes, sites=sites)


def wide(tensors: dict[str, Tensor]) -> Numbers:
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def close(one: dict[str, Tensor] | Numbers, other: Numbers, tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        mine = one[name].double().numpy() if isinstance(one[name], Tensor) else one[name]
        np.testing.assert_allclose(mine, value, rtol=tolerance, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------------------------------------------- by hand
class ByHand:
    """Compute Algorithm 1 of the paper with plain torch at the sites, and with numpy in float64 at the server."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.data = {site: plan.task.load(site, SITES, plan.seed, None).train.tensors for site in SITES}
        self.samples = {site: len(self.data[site][0]) for site in SITES}
        self.nets = {site: plan.build_networks() for site in SITES}
        self.task = {
            site: {
                name: torch.optim.SGD(nets[name].parameters(), lr=0.05, momentum=0.9) for name in ("model", "global")
            }
            for site, nets in self.nets.items()
        }
        parameters = dict(self.nets[A]["selector"].named_parameters())
        zeros = {name: np.zeros(parameter.shape) for name, parameter in parameters.items()}
        self.first = {site: dict(zeros) for site in SITES}
        self.second = {site: dict(zeros) for site in SITES}
        self.steps = dict.fromkeys(SITES, 0.0)

    def round(self, number: int, sites: list[str] = SITES) -> None:
        self.given = wide({name: t.clone() for name, t in self.nets[A]["selector"].state_dict().items()})
        for site in sites:
            self.train(site, number)
        self.merge(sites)

    def train(self, site: str, number: int) -> None:
        sums: Numbers = {}
        for inputs, targets in batches_by_hand(self.plan, site, self.data[site], number):
            for name, optimizer in self.task[site].items():
                model = self.nets[site][name].train()
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            selector = self.nets[site]["selector"].train()
            selector.zero_grad()
            label = torch.full((len(inputs),), SITES.index(site))
            functional.cross_entropy(selector(inputs), label).backward()
            gradients = {name: p.grad.double().numpy().copy() for name, p in selector.named_parameters()}
            if self.plan.algorithm.selector_sync == "server-adam":
                for name, parameter in selector.named_parameters():
                    step = (self.plan.algorithm.selector_learning_rate or 0.02) * gradients[name]
                    parameter.data.sub_(torch.from_numpy(step).float())
            elif self.plan.algorithm.selector_step == "batch":
                self.adam(site, gradients)
            else:
                sums = {name: sums.get(name, 0.0) + gradient for name, gradient in gradients.items()}
        if sums:
            self.adam(site, sums)

    def adam(self, site: str, gradients: Numbers) -> None:
        self.steps[site] += 1
        t, rate = self.steps[site], self.plan.algorithm.selector_learning_rate
        for name, parameter in self.nets[site]["selector"].named_parameters():
            g = gradients[name]
            self.first[site][name] = m = 0.9 * self.first[site][name] + 0.1 * g
            self.second[site][name] = v = 0.999 * self.second[site][name] + 0.001 * g**2
            step = rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            parameter.data.sub_(torch.from_numpy(step).float())

    def merge(self, sites: list[str]) -> None:
        n = np.array([self.samples[site] for site in sites], float)
        sent = {name: [wide(self.nets[site][name].state_dict()) for site in sites] for name in ("model", "global")}
        selectors = [wide(self.nets[site]["selector"].state_dict()) for site in sites]

        def mean(values: list[np.ndarray]) -> np.ndarray:
            return sum(w * v for w, v in zip(n / n.sum(), values, strict=True))

        pull, count = self.plan.algorithm.pull, len(sites)
        for place, site in enumerate(sites):  # line 16 of Algorithm 1: all updates use the models that sites sent
            own = self.nets[site]["model"].state_dict()
            for name, tensor in own.items():
                if tensor.is_floating_point() and count > 1:
                    others = sum(sent["model"][j][name] for j in range(count) if j != place)
                    value = pull * sent["model"][place][name] + (1 - pull) / (count - 1) * others
                    tensor.copy_(torch.from_numpy(np.asarray(value)))
        for site in SITES:  # line 15 of Algorithm 1
            for name, tensor in self.nets[site]["global"].state_dict().items():
                values = [state[name] for state in sent["global"]]
                tensor.copy_(torch.from_numpy(np.asarray(mean(values) if tensor.is_floating_point() else values[0])))
            for name, tensor in self.nets[site]["selector"].state_dict().items():
                tensor.copy_(
                    torch.from_numpy(np.asarray(self.selector(name, mean([s[name] for s in selectors]), site)))
                )
        if self.plan.algorithm.selector_sync == "adam-moments":
            for memory in (self.first, self.second):
                shared = {name: mean([memory[site][name] for site in sites]) for name in memory[A]}
                memory.update({site: dict(shared) for site in SITES})
            self.steps = dict.fromkeys(SITES, float(mean([np.array(self.steps[site]) for site in sites])))

    def selector(self, name: str, mean: np.ndarray, site: str) -> np.ndarray:
        """Compute the server's step; with server-adam, the server makes a step of Adam on the sites' mean change, with
        one optimizer state for all sites.
        """
        if self.plan.algorithm.selector_sync != "server-adam":
            return mean
        self.steps[site] += 1 / len(self.first[site])
        change, t = mean - self.given[name], math.ceil(self.steps[site] - 1e-9)
        self.first[site][name] = m = 0.9 * self.first[site][name] + 0.1 * change
        self.second[site][name] = v = 0.999 * self.second[site][name] + 0.001 * change**2
        rate = self.plan.algorithm.selector_server_lr
        return self.given[name] + rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


MOMENTS = "algorithm.selector_sync=adam-moments"
RULES = [
    [MOMENTS],
    [MOMENTS, "algorithm.selector_step=full-batch"],
    ["algorithm.selector_sync=none"],
    ["algorithm.selector_sync=server-adam", "algorithm.selector_server_lr=0.02"],
]


def assert_server_holds(study: Study, hand: ByHand) -> None:
    mixers = study.coordinator.state.aggregators
    for site in SITES:
        close(mixers["personal"].current(site), wide(hand.nets[site]["model"].state_dict()), 1e-5)
    close(mixers["global"].current(A), wide(hand.nets[A]["global"].state_dict()), 1e-5)
    close(mixers["selector"].current(A), wide(hand.nets[A]["selector"].state_dict()), 1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_two_rounds_are_the_paper_s(rule: list[str], tmp_path: Path) -> None:
    plan = planned("algorithm.pull=0.6", "algorithm.selector_learning_rate=0.01", *rule)
    study, hand = Study(plan, tmp_path / "run"), ByHand(plan)
    study.run()
    for number in (1, 2):
        hand.round(number)
    assert_server_holds(study, hand)
    if "moments" in study.coordinator.state.aggregators:
        moments = study.coordinator.state.aggregators["moments"].current(A)
        names = [name for name, _ in hand.nets[A]["selector"].named_parameters()]
        close({f"first_{i}": hand.first[A][name] for i, name in enumerate(names)}, _only(moments, "first"), 1e-5)
        close({f"second_{i}": hand.second[A][name] for i, name in enumerate(names)}, _only(moments, "second"), 1e-5)
        assert float(moments["steps"]) == pytest.approx(hand.steps[A])


def _only(tensors: dict[str, Tensor], prefix: str) -> Numbers:
    return wide({name: tensor for name, tensor in tensors.items() if name.startswith(prefix)})


def lost_in(missing: dict[int, list[str]]) -> Callable[..., Answers]:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        gone = asked.facts["task"] == "round" and site in missing.get(asked.facts["round"], [])
        return Missing("lost", "no answer") if gone else [(site, work())]

    return script


@pytest.mark.parametrize("contributors", [[A, C], [B]], ids=str)
def test_who_is_missing_keeps_its_model_and_does_not_count(contributors: list[str], tmp_path: Path) -> None:
    """If only one site contributes, its personal model is the sent model and is not multiplied by 0.7."""
    plan = planned("algorithm.pull=0.7", "algorithm.selector_sync=server-adam", *GO_ON)
    script = lost_in({2: [site for site in SITES if site not in contributors]})
    study, hand = Study(plan, tmp_path / "run", script), ByHand(plan)
    study.run()
    hand.round(1)
    hand.round(2, contributors)
    assert_server_holds(study, hand)


def test_lambda_has_its_bounds_and_a_caution_below_1_over_k(tmp_path: Path) -> None:
    for pull in ("0", "1.01", "-0.5"):
        with pytest.raises(PlanError, match=r"algorithm\.pull"):
            planned(f"algorithm.pull={pull}")
    study = Study(planned("algorithm.pull=0.3", "training.rounds=1"), tmp_path / "run")
    caution, *_ = study.run().details.warnings
    assert caution.startswith("algorithm.pull 0.3 is below 1/3") and "\n" not in caution
    assert planned("algorithm.pull=0.34").algorithm.warnings(SITES) == []


def test_what_a_selector_cannot_tell_apart_is_refused() -> None:
    with pytest.raises(PlanError, match="'global' is fedsm's model"):
        planned("participation.sites=[a, global]")
    with pytest.raises(PlanError, match="algorithm.selector: the selector vgg11 cannot read"):
        planned("algorithm.selector=vgg11")


def test_the_paper_s_selector_has_its_size() -> None:
    """VGG-11 with one channel and 6 hospitals has 128.8 million weights, as Section 3.1.2 of the paper says."""
    with torch.device("meta"):
        selector = Vgg11().build(1, 6)
    convolutions = sum(
        9 * a * b + b for a, b in [(1, 64), (64, 128), (128, 256), (256, 256), (256, 512), *[(512, 512)] * 3]
    )
    linear = (25088 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 6
    assert sum(parameter.numel() for parameter in selector.parameters()) == convolutions + linear == 128_789_766
    plan = make_plan("fedsm", "task.name=synthetic-prostate", "participation.sites=[a,b,c,d,e,f]")
    assert sum(p.numel() for p in plan.build_networks()["selector"].parameters()) < 500_000


# ---------------------------------------------------------------------------------------------------- in closed form
def features_of(plan: Plan, site: str) -> np.ndarray:
    selector = plan.build_networks()["selector"].eval()
    with torch.no_grad():
        return selector[:-1](plan.task.load(site, SITES, plan.seed, None).train.inputs).double().numpy()


def by_fisher(cases: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return the log-likelihood of each hospital for each case [cases, sites], up to a constant; features that are
    constant over all cases are ignored.
    """
    varies = np.concatenate(list(cases.values())).std(0) > 0
    cases, x = {site: own[:, varies] for site, own in cases.items()}, x[:, varies]
    within = np.mean([np.cov(own.T, bias=True) for own in cases.values()], axis=0)
    within = 0.9 * within + 0.1 * np.diag(np.diag(within))
    ways = [x - own.mean(0) for own in cases.values()]
    return np.stack([-0.5 * (way * np.linalg.solve(within, way.T).T).sum(1) for way in ways], 1)


def test_the_closed_form_is_the_discriminant_of_all_cases_in_one_place(tmp_path: Path) -> None:
    plan = planned()
    study = Study(plan, tmp_path / "run")
    study.run()
    model = SuperModel.load(study.folder / "supermodel")
    cases = {site: features_of(plan, site) for site in SITES}
    for site in SITES:
        with torch.no_grad():
            mine = model.selector(plan.task.load(site, SITES, plan.seed, None).train.inputs)
        expected = by_fisher(cases, cases[site])
        np.testing.assert_allclose(probabilities_of(mine), probabilities_of(torch.from_numpy(expected)), atol=2e-3)
    before = plan.build_networks()["selector"].state_dict()
    for name, tensor in model.selector.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith(tuple(head_names(model.selector)))


PATTERNS = ["".join(rounds) for size in (1, 2, 3) for rounds in combinations("1234", size)]


@pytest.mark.parametrize("silent", slow_but(["3", "123", "234"], PATTERNS))
def test_a_silent_hospital_is_named_as_if_it_had_answered_in_every_round(silent: str, tmp_path: Path) -> None:
    """The features of a hospital never change, so the server uses the hospital's last message while the hospital is
    absent.
    """
    plan = planned("training.rounds=4", *GO_ON)
    study = Study(plan, tmp_path / "run", lost_in({int(number): [B] for number in silent}))
    study.run()
    assert "".join(map(str, study.summary.sites[B].missed)) == silent
    cases = {site: features_of(plan, site) for site in SITES}
    for folder in (study.folder, *(study.folder / "sites" / site for site in SITES)):
        model = SuperModel.load(folder / "supermodel")
        for site in SITES:
            with torch.no_grad():
                mine = model.selector(plan.task.load(site, SITES, plan.seed, None).train.inputs)
            expected = by_fisher(cases, cases[site])
            np.testing.assert_allclose(probabilities_of(mine), probabilities_of(torch.from_numpy(expected)), atol=2e-3)


def test_a_hospital_that_gave_no_sums_is_never_named() -> None:
    random = np.random.default_rng(31)
    cases = {site: random.normal(place, 1, (9, 4)) for place, site in enumerate(SITES)}
    rows = [cases[A], None, cases[C]]
    present = torch.tensor([0.5, 0, 0.5]).double()
    means = torch.tensor(np.stack([np.zeros(4) if own is None else own.mean(0) / 2 for own in rows]))
    products = torch.tensor(np.mean([own.T @ own / len(own) for own in rows if own is not None], axis=0))
    weight, bias = (one.numpy() for one in discriminant(present, means, products))
    found = cases[B] @ weight.T + bias
    expected = by_fisher({site: cases[site] for site in (A, C)}, cases[B])
    np.testing.assert_allclose(found[:, 2] - found[:, 0], expected[:, 1] - expected[:, 0], rtol=1e-9)
    assert (found.argmax(1) != 1).all()


def test_where_nobody_gave_sums_the_last_layer_stays() -> None:
    selector = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    before = selector[1].weight.clone()
    tell_hospitals_apart(selector, FeatureSums(3, 4).state_dict())
    assert torch.equal(selector[1].weight, before)


FALSE_SUMS = {
    "nobody's": (lambda own: own["present"].zero_(), "does not name exactly one hospital"),
    "two hospitals'": (lambda own: own["present"].fill_(1), "does not name exactly one hospital"),
    "of others": (lambda own: own["means"].fill_(1), "holds features of other hospitals"),
    "no squares": (lambda own: own["products"].fill_(-1), "a mean square below zero"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "reason"), FALSE_SUMS.values(), ids=FALSE_SUMS)
def test_false_sums_are_refused(spoil: Callable[[dict[str, Tensor]], Tensor], reason: str, tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        if site == C and asked.facts["task"] == "round":
            reply.groups["sums"] = {name: tensor.clone() for name, tensor in reply.groups["sums"].items()}
            spoil(reply.groups["sums"])
        return [(site, reply)]

    study = Study(planned(*GO_ON), tmp_path / "run", script)
    assert reason in study.run().sites[C].missed[1]


def test_numbers_of_steps_are_refused_where_none_are_made() -> None:
    with pytest.raises(PlanError, match=r"algorithm\.selector_learning_rate:.*takes no steps"):
        planned("algorithm.selector_learning_rate=0.1")


# ---------------------------------------------------------------------------------------------------- the super model
def probabilities_of(scores: Tensor) -> np.ndarray:
    scores = scores.detach().double().numpy()
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def right(model: nn.Module, inputs: Tensor, targets: Tensor) -> np.ndarray:
    with torch.no_grad():
        return (model.eval()(inputs).argmax(1) == targets).numpy()


@pytest.mark.slow
def test_gamma_comes_from_all_hospitals_validation_cases_and_the_test_score_is_the_super_model_s(
    tmp_path: Path,
) -> None:
    plan = planned("training.rounds=12", "task.persons=12", MOMENTS, "algorithm.selector_learning_rate=0.01")
    plan = plan.with_changes(["algorithm.selector_least=0"])
    folder = tmp_path / "run"
    summary = inprocess.run(plan, folder=folder).summary
    found = summary.details.super_model
    whole = SuperModel.load(folder / "supermodel")
    experts = [whole.expert(site) for site in SITES]

    def answers(inputs: Tensor, targets: Tensor, gamma: float) -> tuple[np.ndarray, list[str]]:
        """Compute Algorithm 2 of the paper for each case separately."""
        with torch.no_grad():
            y = probabilities_of(whole.selector.eval()(inputs))
        table = [right(expert, inputs, targets) for expert in experts]
        common = right(whole.expert("global"), inputs, targets)
        picks = [(int(row.argmax()), bool(row.max() > gamma)) for row in y]
        hits = [table[k][i] if sure else common[i] for i, (k, sure) in enumerate(picks)]
        return np.array(hits), [SITES[k] if sure else "global" for k, sure in picks]

    data = {site: plan.task.load(site, SITES, plan.seed, None) for site in SITES}
    curve = []
    for gamma in THRESHOLDS:
        hits = np.concatenate([answers(*data[site].validation.tensors, gamma)[0] for site in SITES])
        curve.append([gamma, len(hits), hits.mean()])
    np.testing.assert_allclose(np.array(found.curve), np.array(curve), rtol=1e-9)
    gamma = tune({value: (cases, cases * mean) for value, cases, mean in curve}).threshold
    assert found.threshold == whole.threshold == pytest.approx(gamma)
    for site in SITES:
        hits, names = answers(*data[site].test.tensors, gamma)
        assert summary.sites[site].test["accuracy"] == pytest.approx(hits.mean())
        assert found.tested[site] == {name: names.count(name) for name in set(names)}
        own = SuperModel.load(folder / "sites" / site / "supermodel")
        assert own.threshold == whole.threshold and own.agreed == whole.agreed
        assert all(torch.equal(own.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    chosen = set().union(*found.tested.values())
    assert len(chosen) > 2 and len({mean for _, _, mean in curve}) > 3, (
        chosen,
        curve,
    )  # gamma must change the chosen models and the scores, or the test would prove little


def refusing(study: Study, *sites: str) -> Study:
    for site in sites:
        study.participants[site].participant.disclosure.settings = SiteSettings(
            device="cpu", share_personal_model=False
        )
    return study


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm", "fedsm-extra", "fedsm-ensemble"])
def test_personal_models_go_only_to_hospitals_that_agreed_and_only_of_those(method: str, tmp_path: Path) -> None:
    plan = planned(method=method)
    study = refusing(Study(plan, tmp_path / "run"), C)
    found = study.run().details.super_model
    assert found.agreed == [A, B]
    personal = {site: study.coordinator.state.aggregators["personal"].current(site) for site in SITES}
    common = study.coordinator.state.aggregators["global"].current(A)
    shown = {site: {} for site in SITES}
    for site, message in study.transport.sent:
        shown[site] |= message.groups.get("experts", {})
    for site, theirs in shown.items():
        for place, owner in enumerate(SITES):
            expected = personal[owner] if owner == site or (owner != C and site != C) else common
            assert all(torch.equal(theirs[f"{place}.{name}"], tensor) for name, tensor in expected.items())
    for folder, agreed in (
        (study.folder, (A, B)),
        (study.folder / "sites" / A, (A, B)),
        (study.folder / "sites" / C, (C,)),
    ):
        assert SuperModel.load(folder / "supermodel").agreed == agreed


def test_a_site_that_never_trained_is_nobody_s_expert(tmp_path: Path) -> None:
    study = Study(planned(*GO_ON), tmp_path / "run", lost_in({1: [B], 2: [B]}))
    assert study.run().details.super_model.agreed == [A, C]
    assert SuperModel.load(study.folder / "sites" / A / "supermodel").labels == (A, "global", C)


def test_only_synthetic_data_are_shared_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    study = Study(plan, tmp_path / "run")
    joined = Request(task="join", round=0, study="run", plan=plan.hash, sites=tuple(SITES)).message({})
    answers = [study.participants[A].answer(joined).facts["shares"]]
    monkeypatch.setattr(type(plan.task), "synthetic", False)
    answers.append(study.participants[A].answer(joined).facts["shares"])
    with_settings(study.participants[A], share_personal_model=True)
    answers.append(study.participants[A].answer(joined).facts["shares"])
    assert answers == [True, False, True]


def test_where_no_hospital_tells_of_its_validation_cases_gamma_is_not_tuned(tmp_path: Path) -> None:
    study = Study(planned("training.rounds=1"), tmp_path / "run")
    for participant in study.participants.values():
        with_settings(participant, min_patients_per_metric=999)
    found = study.run().details.super_model
    assert (found.threshold, found.curve) == (0, [])
    assert "gamma = 0" in card_facts(Source.open(study.folder / "sites" / A / "supermodel"))["super_model"][0]


def test_sums_over_fewer_cases_than_the_hospital_demands_do_not_leave(tmp_path: Path) -> None:
    plan = planned("training.rounds=1")
    cases = site_of(plan, A, SITES, CPU, tmp_path / "a").participant.disclosure.cases["train"]
    few = SiteSettings(device="cpu", min_patients_per_metric=cases + 1)
    with pytest.raises(DataError, match="averages too few images or patients, this hospital demands"):
        site_of(plan, A, SITES, few, tmp_path / "b")


def test_a_hospital_with_too_few_validation_cases_is_left_out_of_gamma_s_curve(tmp_path: Path) -> None:
    study = Study(planned("training.rounds=1"), tmp_path / "run")
    with_settings(study.participants[C], min_patients_per_metric=999)
    found = study.run().details.super_model
    cases = sum(len(study.participants[site].participant.data.validation) for site in (A, B))
    assert {point[1] for point in found.curve} == {cases} and found.validated[C] == {}


# ---------------------------------------------------------------------------------------------------- evaluation sites
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm", "fedsm-extra", "fedavg", "harmofl"])
def test_an_unseen_hospital_is_tested_and_gives_nothing(method: str, tmp_path: Path) -> None:
    changes = ["task.name=synthetic-histology", "task.patients=4"] if method == "harmofl" else SMALL
    plan = make_plan(method, *changes, f"participation.evaluation_sites=[{C}]", sites=[A, B])
    study = Study(plan, tmp_path / "run")
    if method == "harmofl":
        for participant in study.participants.values():
            with_settings(participant, public_data=True)
    summary = study.run()
    asked = {message.facts["task"] for site, message in study.transport.sent if site == C}
    assert asked == {"join", "deliver", "test"}
    assert list(summary.sites) == [A, B] and list(summary.evaluation_sites) == [C]
    test = summary.evaluation_sites[C].test
    assert test["cases"] == study.participants[C].participant.disclosure.cases["test"]
    scores = [summary.sites[site].test[summary.metric] for site in (A, B)]
    assert summary.mean_test == pytest.approx(sum(scores) / 2)
    part = study.participants[C].participant.data.test.tensors
    if method == "fedavg":
        model = plan.build_networks()["model"]
        model.load_state_dict(study.model("global/best"))
        assert right(model, *part).mean() == pytest.approx(test["accuracy"])
    if method == "fedsm":
        found = summary.details.super_model
        assert found.sites == [A, B]
        assert found.curve[0][1] == sum(
            study.participants[site].participant.disclosure.cases["validation"] for site in (A, B)
        )
        assert sum(found.tested[C].values()) == test["cases"]
        assert right(SuperModel.load(study.folder / "supermodel"), *part).mean() == pytest.approx(test["accuracy"])
        for name, tensor in study.coordinator.state.aggregators["global"].current(A).items():
            assert torch.equal(study.model(f"sites/{C}/last")[name], tensor)


def test_a_missing_unseen_hospital_ends_a_run_that_stops_for_anyone_and_no_other(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        return Missing("lost", "no answer") if site == C else [(site, work())]

    plan = planned("training.rounds=1", f"participation.evaluation_sites=[{C}]", sites=[A, B])
    with pytest.raises(ParticipationError, match="join: 2 of 3 sites answered, the plan needs 3"):
        Study(plan, tmp_path / "stop", script).run()
    going_on = plan.with_changes(["participation.when_missing=continue", "participation.minimum=1"])
    summary = Study(going_on, tmp_path / "continue", script).run()
    assert summary.status == "finished"
    assert summary.evaluation_sites[C].test is None


def test_a_hospital_without_validation_cases_has_a_model_of_its_own_too(tmp_path: Path) -> None:
    plan = planned(
        "algorithm.personal_method.name=fine-tuning",
        "training.rounds=1",
        f"participation.evaluation_sites=[{C}]",
        sites=[A, B],
    )
    data = plan.task.load(C, SITES, plan.seed, None)
    empty = Cases(data.validation.inputs[:0], data.validation.targets[:0], ())
    study = Study(plan, tmp_path / "run", data={C: replace(data, validation=empty)})
    study.run()
    assert study.participants[C].participant.disclosure.cases["validation"] == 0
    own, shared = (study.participants[C].participant.state.modules[name].parameters() for name in ("model", "global"))
    # Training changes each weight, but the gradient of a bias before a normalisation layer is only rounding error.
    assert not any(torch.equal(one, other) for one, other in zip(own, shared, strict=True) if one.dim() > 1)


def test_what_an_unseen_hospital_may_not_be() -> None:
    with pytest.raises(PlanError, match="fedbn gives no.*did not train"):
        make_plan("fedbn", "participation.evaluation_sites=[z]")
    with pytest.raises(PlanError, match="hospital-a is under.*evaluation_sites"):
        make_plan("fedsm", f"participation.evaluation_sites=[{A}]")
    with pytest.raises(PlanError, match="evaluation_sites need named sites"):
        make_plan("fedavg", "participation.sites=[]", "participation.minimum=2", "participation.evaluation_sites=[z]")


# ---------------------------------------------------------------------------------------------------- afterwards
def test_the_best_model_is_the_one_with_the_least_loss_and_of_equals_the_first() -> None:
    random = np.random.default_rng(3)
    outputs = random.normal(size=(4, 9, 5)).astype(np.float32)
    outputs[3] = outputs[1]
    targets = random.integers(0, 5, 9)
    logits = outputs.astype(float)
    losses = np.log(np.exp(logits).sum(2)) - logits[:, np.arange(9), targets]
    found = best_of(list(torch.from_numpy(outputs)), torch.from_numpy(targets), functional.cross_entropy)
    expected = [min(range(4), key=lambda k: (losses[k, case], k)) for case in range(9)]
    expected = [1 if k == 3 else k for k in expected]
    assert found.tolist() == expected and len(set(expected)) > 1


def test_the_ensemble_mixes_probabilities() -> None:
    random = np.random.default_rng(4)
    scores, outputs = random.normal(size=(6, 3)), random.normal(size=(3, 6, 2, 4, 4))
    y = probabilities_of(torch.from_numpy(scores))
    h = np.exp(outputs) / np.exp(outputs).sum(2, keepdims=True)
    expected = np.einsum("bk,kbcxy->bcxy", y, h)
    found = mixed(torch.from_numpy(scores), list(torch.from_numpy(outputs)))
    np.testing.assert_allclose(found.exp().numpy(), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm-extra", "fedsm-ensemble"])
def test_afterwards_only_the_selector_learns(method: str, tmp_path: Path) -> None:
    plan = planned("training.rounds=3", "algorithm.selector_rounds=2", method=method)
    assert [(phase.name, phase.rounds) for phase in plan.algorithm.phases(plan.training.rounds)] == [
        ("train", 1),
        ("select", 2),
    ]
    study = Study(plan, tmp_path / "run")
    summary = study.run()
    groups = [set(message.groups) for site, message in study.transport.sent if site == B]
    everything = {"global", "personal", "experts", "selector"}
    assert groups[1:5] == [{"global", "personal"}, everything, {"selector"}, {"selector"}]
    selector = study.coordinator.state.aggregators["selector"].current(A)
    assert not torch.equal(
        next(iter(selector.values())), next(iter(plan.build_networks()["selector"].state_dict().values()))
    )
    model = SuperModel.load(study.folder / "supermodel")
    assert model.labels == ("global", *SITES) and model.threshold is None
    assert summary.details.super_model.curve == []
    with pytest.raises(PlanError, match=r"training\.rounds: .* trains models before 3 rounds"):
        planned("training.rounds=3", "algorithm.selector_rounds=3", method=method)


# ---------------------------------------------------------------------------------------------------- protocols


def test_the_report_shows_whose_model_answered(tmp_path: Path) -> None:
    plan = planned("algorithm.pull=0.2", "training.rounds=1", f"participation.evaluation_sites=[{C}]", sites=[A, B])
    study = refusing(Study(plan, tmp_path / "run"), B)
    study.coordinator.run()
    found = study.summary.details.super_model
    text = page.render(read_all([study.folder]), "Title")
    parsed = Page(text)
    for title, told in (("Validation cases with γ = 0", found.validated), ("Test cases", found.tested)):
        start = next(place for place, row in enumerate(parsed.rows) if row[:1] == [title])
        assert parsed.rows[start][1:] == ["global", A]
        for line, site in zip(parsed.rows[start + 1 :], SITES, strict=False):
            shares = [told[site].get(name, 0) / sum(told[site].values()) for name in ("global", A)]
            assert line == [site + (" did not train" if site == C else ""), *(f"{share:.0%}" for share in shares)]
    assert f"Threshold γ: {found.threshold:g}. " in text
    assert f"use the global model: {B}." in text and "is below 1/2" in text
    unseen = study.summary.evaluation_sites[C].test["accuracy"]
    assert parsed.rows[parsed.rows.index(["Method", C]) + 1] == ["FedSM", f"{unseen:.2f}"]


# ---------------------------------------------------------------------------------------------------- unequal sizes

# The hospitals have two kinds of sensors, so that a selector can distinguish two hospitals.
FEDERATIONS = {
    "synthetic-histology": (SITES, ["task.size=32", "task.patients=24"]),
    "synthetic-prostate": (SITES, ["task.patients=16", "task.size=32", "task.slices=6", "task.similarity=low"]),
    "synthetic-activity": ([A, B], ["task.persons=60", "task.windows=10", "task.steps=32", "task.shift=feature"]),
}


def unequal(task: str, large: str, folder: Path, *changes: str, sites: list[str] | None = None) -> Plan:
    sites, sizes = sites or FEDERATIONS[task][0], FEDERATIONS[task][1]
    # a small hospital has only five training images in synthetic-prostate
    few = SiteSettings(device="cpu", public_data=True)
    same = ["training.rounds=10", "training.batch_size=8", f"task.name={task}", *sizes]
    plan = make_plan("fedsm", *same, *changes, sites=sites)
    participants = {}
    for site in sites:
        data = plan.task.load(site, sites, plan.seed, None)
        if site != large:
            kept = torch.linspace(0, len(data.train) - 1, max(2, len(data.train) // 10)).long()
            train = Cases(data.train.inputs[kept], data.train.targets[kept], [data.train.patients[i] for i in kept])
            data = replace(data, train=train)
        participants[site] = site_of(plan, site, sites, few, folder / "sites" / site, data)
    listen(plan, folder, participants)
    return plan


def named_right(plan: Plan, folder: Path) -> list[float]:
    selector, sites = SuperModel.load(folder / "supermodel").selector.eval(), list(plan.participation.sites)
    with torch.no_grad():
        named = [selector(plan.task.load(site, sites, plan.seed, None).test.inputs).argmax(1) for site in sites]
    return [float((one == place).float().mean()) for place, one in enumerate(named)]


# The slow tests run one task with one large hospital; all pairs of a task and a large hospital run before a release.
@pytest.mark.parametrize(
    ("task", "large"),
    [
        pytest.param("synthetic-activity", A, marks=pytest.mark.slow),
        pytest.param("synthetic-activity", B, marks=pytest.mark.long),
        pytest.param("synthetic-histology", A, marks=pytest.mark.long),
        pytest.param("synthetic-histology", B, marks=pytest.mark.long),
        pytest.param("synthetic-prostate", A, marks=pytest.mark.long),
        pytest.param("synthetic-prostate", B, marks=pytest.mark.long),
    ],
)
def test_the_selector_tells_hospitals_of_unequal_size_apart(task: str, large: str, tmp_path: Path) -> None:
    """In earlier versions, a selector that was trained by gradient steps chose the largest hospital for each image
    (`docs/research/methods.md`).
    """
    plan = unequal(task, large, tmp_path / "run")
    assert np.mean(named_right(plan, tmp_path / "run")) > 0.9
    summary = Record(tmp_path / "run").summary()
    assert not any("the selector names" in line for line in summary.details.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "changes"),
    slow_but(
        [("synthetic-activity", ())],
        [
            ("synthetic-activity", ()),  # the hospitals a and c have the same sensors
            ("synthetic-histology", ("algorithm.selector_sync=server-adam",)),
            ("synthetic-histology", ("algorithm.selector_sync=none",)),
        ],
        (),
    ),
    ids=str,
)
def test_a_selector_that_does_not_tell_hospitals_apart_answers_for_nobody(
    task: str, changes: tuple[str, ...], tmp_path: Path
) -> None:
    plan = unequal(task, A, tmp_path / "run", *changes, sites=SITES)
    assert np.mean(named_right(plan, tmp_path / "run")) < 0.9
    summary = Record(tmp_path / "run").summary()
    found = summary.details.super_model
    assert found is not None and found.threshold == 1.0
    assert all(models.keys() == {"global"} for models in found.tested.values())
    (told,) = (line for line in summary.details.warnings if line.startswith("the selector names the own hospital of"))
    assert "the global model answers for every image" in told
