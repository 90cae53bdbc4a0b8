"""Each method equals an independent implementation in plain torch and numpy."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.site_stack import TrainingSite
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from medsilo.tasks.site_data import SiteData
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.sites import sites_of

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16", "training.weight_decay=0.01"]
State = dict[str, Tensor]
# a term of the loss, computed from a network's parameters and from the parameters that the site received
Penalty = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

# Names of layers in ActivityCnn are positions: 0.1 and 1.1 are batch norms, and 6 is the last layer.
NORM, HEAD = ("0.1.", "1.1."), ("6.",)


def everything(name: str) -> bool:
    return True


def nothing(name: str) -> bool:
    return False


def all_but_norm(name: str) -> bool:
    return not name.startswith(NORM)


def all_but_head(name: str) -> bool:
    return not name.startswith(HEAD)


def all_but_statistics(name: str) -> bool:
    return not (name.startswith(NORM) and name.split(".")[-1] in ("running_mean", "running_var", "num_batches_tracked"))


def load_data(plan: Plan) -> dict[str, SiteData]:
    return {site: plan.task.load(site, SITES, plan.seed, None) for site in SITES}


def initial(plan: Plan) -> State:
    return {name: tensor.clone() for name, tensor in plan.build_networks()["model"].state_dict().items()}


def with_state(plan: Plan, state: State) -> nn.Module:
    model = plan.build_networks()["model"]
    model.load_state_dict(state)
    return model


def batches_by_hand(
    plan: Plan, site: str, cases: tuple[Tensor, Tensor], number: int, epoch: int = 0
) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(cases[0]), generator=generator_for(plan.seed, site, "shuffle", number, epoch))
    parts = [part for part in order.split(plan.training.batch_size) if len(part) > 1]
    return [(cases[0][part], cases[1][part]) for part in parts]


def train_by_hand(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: SiteData,
    site: str,
    number: int,
    penalty: Penalty | None = None,
) -> None:
    """Train for one local round with the cross entropy and a penalty."""
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    model.train()
    for epoch in range(plan.training.local_epochs):
        for inputs, targets in batches_by_hand(plan, site, data.train.tensors, number, epoch):
            loss = functional.cross_entropy(model(inputs), targets)
            if penalty:
                loss = loss + penalty([*model.parameters()], anchor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def merge_by_hand(states: dict[str, State], weights: dict[str, float]) -> State:
    """Compute Σ n_k θ_k / Σ n_k in numpy, and take integer tensors from the first site in alphabetical order."""
    first = states[min(states)]
    merged = {}
    for name, tensor in first.items():
        if tensor.is_floating_point():
            mean = sum(weights[site] * states[site][name].double().numpy() for site in states) / sum(weights.values())
            merged[name] = torch.from_numpy(np.asarray(mean)).float()
        else:
            merged[name] = tensor.clone()
    return merged


def study_by_hand(
    plan: Plan, travels: Callable[[str], bool], penalty: Penalty | None = None, uniform: bool = False
) -> list[dict[str, State]]:
    data = load_data(plan)
    models = {site: with_state(plan, initial(plan)) for site in SITES}
    optimizers = {site: plan_sgd(plan, model) for site, model in models.items()}
    weights = {site: 1.0 if uniform else float(len(data[site].train)) for site in SITES}
    given = {name: tensor for name, tensor in initial(plan).items() if travels(name)}
    curve = []
    for number in range(1, plan.training.rounds + 2):
        for model in models.values():
            model.load_state_dict(given, strict=False)
        curve.append({site: {k: v.clone() for k, v in model.state_dict().items()} for site, model in models.items()})
        if number > plan.training.rounds:
            return curve
        for site, model in models.items():
            if plan.training.optimizer_state == "reset":
                optimizers[site] = plan_sgd(plan, model)
            train_by_hand(plan, model, optimizers[site], data[site], site, number, penalty)
        sent = {
            site: {k: v.clone() for k, v in model.state_dict().items() if travels(k)} for site, model in models.items()
        }
        given = merge_by_hand(sent, weights)
    raise AssertionError


def plan_sgd(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def accuracy_by_hand(plan: Plan, state: State, part: torch.utils.data.TensorDataset) -> float:
    inputs, targets = part.tensors
    with torch.no_grad():
        return float((with_state(plan, state).eval()(inputs).argmax(1) == targets).double().mean())


def assert_close(mine: State, expected: State) -> None:
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_run_is(plan: Plan, run: inprocess.StudyResult, curve: list[dict[str, State]], personal: bool) -> None:
    data = load_data(plan)
    for site in SITES:
        assert_close(run.models[site].state_dict(), curve[-1][site])
    scores = [{site: accuracy_by_hand(plan, states[site], data[site].validation) for site in SITES} for states in curve]
    sites = run.summary.sites
    for site in SITES:
        assert sites[site].validation == pytest.approx([score[site] for score in scores])
    if personal:
        chosen = {site: int(np.argmax([score[site] for score in scores])) for site in SITES}
    else:
        chosen = dict.fromkeys(SITES, int(np.argmax([np.mean(list(score.values())) for score in scores])))
    # argmax returns the first maximum, as the server does, because only a strictly higher score replaces the selected
    # model
    assert run.summary.selected.rounds == chosen
    tests = [accuracy_by_hand(plan, curve[chosen[site]][site], data[site].test) for site in SITES]
    cases = [len(data[site].test) for site in SITES]
    assert [sites[site].test["accuracy"] for site in SITES] == pytest.approx(tests)
    assert run.summary.mean_test == pytest.approx(np.mean(tests))
    assert run.summary.pooled_test == pytest.approx(np.average(tests, weights=cases))


# ---------------------------------------------------------------------------------------------------- the wire
class Listening(inprocess.Loop):
    def __init__(self, participants: dict[str, TrainingSite]) -> None:
        super().__init__(participants)
        self.sent: list[tuple[str, StudyMessage]] = []
        self.received: list[tuple[str, StudyMessage]] = []

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        def send(site: str) -> StudyMessage:
            message = outgoing(site)
            self.sent.append((site, message))
            return message

        def take(site: str, reply: StudyMessage) -> None:
            self.received.append((site, reply))
            receive(site, reply)

        return super().ask(sites, send, take, timeout)


def listen(
    plan: Plan, folder: Path, participants: dict[str, TrainingSite] | None = None
) -> tuple[Listening, Coordinator]:
    participants = participants or sites_of(plan, folder)
    transport = Listening(participants)
    coordinator = Coordinator(plan, SITES, transport, Record(folder), "in-process")
    coordinator.run()
    return transport, coordinator


def names_in(parcels: list[tuple[str, StudyMessage]]) -> set[str]:
    return {name for _, message in parcels for group in message.groups.values() for name in group}


def test_local_training_sends_no_tensor_either_way(tmp_path: Path) -> None:
    transport, coordinator = listen(make_plan("local", *SMALL), tmp_path / "run")
    assert len(transport.received) == len(transport.sent) == len(SITES) * (1 + 2 + 1 + 1)
    assert names_in(transport.sent) == names_in(transport.received) == set()
    assert coordinator.state.aggregators == {}
    for facts in Record(tmp_path / "run").summary().sites.values():
        assert facts.bytes_up == facts.bytes_down == 0
    assert not (tmp_path / "run" / "global").exists()


# ---------------------------------------------------------------------------------------------------- Central
def test_central_training_equals_one_loop_over_all_data() -> None:
    plan = make_plan("central", *SMALL, "training.rounds=3", "training.local_epochs=2")
    run = inprocess.run(plan)
    data = load_data(plan)
    pooled = SiteData(
        torch.utils.data.TensorDataset(
            torch.cat([data[site].train.inputs for site in SITES]),
            torch.cat([data[site].train.targets for site in SITES]),
        ),
        *(None, None),
    )
    model = with_state(plan, initial(plan))
    optimizer = plan_sgd(plan, model)
    states = [initial(plan)]
    for number in (1, 2, 3):
        train_by_hand(plan, model, optimizer, pooled, "pooled", number)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    curve = [dict.fromkeys(SITES, state) for state in states]
    assert_run_is(plan, run, curve, personal=False)
    assert run.summary.agreed.sites == SITES
    assert run.summary.plan_hash == plan.hash
    for site in SITES:
        assert run.summary.sites[site].cases["train"] == len(data[site].train)
