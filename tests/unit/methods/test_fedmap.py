"""Rounds of FedMAP equal numpy with independently derived gradients; medsilo rejects false answers and too large
plans.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from medsilo.core.errors import PlanError, Refused
from medsilo.exchange.channel import Missing
from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.runs.messages import StudyMessage
from medsilo.site.settings import SiteSettings
from medsilo_lab.testing import Carried, Reference, State
from medsilo_server.record import Record
from tests.conftest import SITES, SMALL, make_plan
from tests.unit.methods.test_methods import OfReference

Array = np.ndarray
Layers = list[tuple[Array, Array]]
ALPHA, EPSILON, STEP, STEPS = 0.02, 3e-4, 0.01, 3


def prior_of(state: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Layers]:
    """Return W and b of each layer in each tensor's prior network, in double precision."""
    return {
        name: [
            tuple(
                state[f"of.{name.replace('.', '__')}.layers.{place}.{part}"].double().numpy().copy() for part in parts
            )
            for place in range(3)
        ]
        for name in names
        for parts in [("weight", "bias")]
    }


def by_hand(layers: Layers, theta: Array, mu: Array) -> tuple[float, Array, Layers]:
    """Return R of one tensor, and the gradients of R with respect to θ, W and b."""
    (w1, b1), (w2, b2), (w3, b3) = layers
    x = np.concatenate([theta, mu])
    z1 = w1 @ x + b1
    h1 = np.logaddexp(0, z1)
    z2 = w2 @ h1 + b2
    h2 = np.logaddexp(0, z2)
    value = float((w3 @ h2 + b3)[0])
    value += ALPHA / 2 * float((theta - mu) @ (theta - mu)) + EPSILON * float(theta @ theta + mu @ mu)
    d2 = w3[0] / (1 + np.exp(-z2))
    d1 = (w2.T @ d2) / (1 + np.exp(-z1))
    slope = (w1.T @ d1)[: len(theta)] + ALPHA * (theta - mu) + 2 * EPSILON * theta
    return value, slope, [(np.outer(d1, x), d1), (np.outer(d2, h1), d2), (h2[None], np.ones(1))]


def flat(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy().ravel()


def fedmap_by_hand(study: Reference) -> Sequence[Mapping[str, State]]:
    """Train with FedMAP in numpy, except that the network and its optimizer come from torch."""
    plan, training = study.plan, study.plan.training
    models = {site: study.model() for site in study.sites}
    names = [name for name, _ in models[SITES[0]].named_parameters()]
    priors = prior_of(plan.build_networks()["prior"].state_dict(), names)
    optimizers = {site: training.make_optimizer(model.parameters()) for site, model in models.items()}
    shared = {name: own.clone() for name, own in study.model().state_dict().items()}
    curve = [dict.fromkeys(study.sites, shared)]
    for number in range(1, plan.rounds + 1):
        told = {}
        mu = {name: flat(shared[name]) for name in names}
        for site, model in models.items():
            model.load_state_dict(shared)
            model.train()
            for inputs, targets in study.batches(site, number):
                optimizers[site].zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                for name, own in model.named_parameters():
                    slope = by_hand(priors[name], flat(own), mu[name])[1]
                    own.grad += torch.from_numpy(slope).float().view_as(own)
                optimizers[site].step()
            inputs, targets = study.data[site].train[:]
            with torch.no_grad():
                loss = float(functional.cross_entropy(model.eval()(inputs), targets))
            value = sum(by_hand(priors[name], flat(own), mu[name])[0] for name, own in model.named_parameters())
            told[site] = np.exp(-loss - value / len(inputs))
        share = {site: own / sum(told.values()) for site, own in told.items()}
        states = {
            site: {name: own.clone() for name, own in model.state_dict().items()} for site, model in models.items()
        }
        shared = {
            name: sum(share[site] * states[site][name].double() for site in study.sites).float()  # type: ignore[union-attr]
            if first.is_floating_point()
            else first
            for name, first in states[SITES[0]].items()
        }
        curve.append(states)
        for _ in range(STEPS):
            found = {
                name: [
                    (share[site], *by_hand(priors[name], flat(states[site][name]), flat(shared[name])))
                    for site in study.sites
                ]
                for name in names
            }
            assert sum(weight * value for own in found.values() for weight, value, _, _ in own) > 0
            for name, own in found.items():
                for place, (w, b) in enumerate(priors[name]):
                    for weight, _, _, slopes in own:
                        w -= STEP * weight * slopes[place][0]
                        b -= STEP * weight * slopes[place][1]
                    if place:
                        np.maximum(w, 0, out=w)
    return curve


class TestByHand(OfReference):
    method = "fedmap"
    changes = (
        "algorithm.largest_share=1",
        f"algorithm.alpha={ALPHA}",
        f"algorithm.epsilon={EPSILON}",
        f"algorithm.prior_step={STEP}",
        f"algorithm.prior_steps={STEPS}",
        "algorithm.hidden=[8, 4]",
    )
    by_hand = staticmethod(fedmap_by_hand)


def carried(folder: Path, changed: dict[str, float], *changes: str) -> list[StudyMessage]:
    plan = make_plan("fedmap", *SMALL, "algorithm.hidden=[8, 4]", *changes)
    settings, asked = SiteSettings(device="cpu", public_data=True), list[StudyMessage]()

    def carry(site: str, message: StudyMessage, answer: partial) -> StudyMessage | Missing:
        reply = answer()
        if site == SITES[0] and message.facts["task"] == "round":
            asked.append(message)
        if "contribution" in reply.groups and site in changed:
            reply.groups["contribution"]["logarithm"].fill_(changed[site])
        return reply

    sites = {
        site: training_site(
            SiteContext(plan, site, SITES, settings, folder / "sites" / site), partial(participant_of, data=None)
        )
        for site in SITES
    }
    Carried(sites, plan, folder, carry).run()
    return asked


def test_who_lies_about_its_contribution_counts_for_the_largest_share_at_most(tmp_path: Path) -> None:
    plan = make_plan("fedmap", *SMALL)
    assert plan.algorithm.largest_share == 0.5
    carried(tmp_path / "run", {SITES[0]: 100.0})
    lines = Record(tmp_path / "run").rounds()
    assert [line.sites[SITES[0]].share for line in lines] == [pytest.approx(0.5)] * len(lines)
    carried(tmp_path / "whole", {SITES[0]: 100.0}, "algorithm.largest_share=1")
    assert Record(tmp_path / "whole").rounds()[0].sites[SITES[0]].share == pytest.approx(1)
    # the server rejects the answer before using any value of the answer
    with pytest.raises(Refused, match="only -100 to 100 is possible"):
        carried(tmp_path / "beyond", {SITES[1]: 1e6})


def test_the_prior_goes_down_in_every_round_and_never_up(tmp_path: Path) -> None:
    asked = carried(tmp_path / "run", {}, "training.rounds=3")
    priors = [message.groups["prior"] for message in asked]
    assert len(priors) == 3 and all(own.keys() == priors[0].keys() for own in priors)
    moved = [max(float((own[name] - priors[0][name]).abs().max()) for name in own) for own in priors]
    assert moved[0] == 0 < moved[1] < moved[2]
    for name, own in priors[2].items():
        assert "layers.0" in name or "bias" in name or float(own.min()) >= 0  # R is convex in θ
    summary = Record(tmp_path / "run").summary()
    assert summary and all(own.bytes_up < own.bytes_down / 3 for own in summary.sites.values())


def test_no_step_of_the_prior_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    asked = carried(tmp_path / "run", {}, "algorithm.prior_steps=0")
    for name, own in asked[0].groups["prior"].items():
        assert torch.equal(own, asked[-1].groups["prior"][name])


def test_a_prior_that_no_line_carries_is_refused_with_its_size() -> None:
    unet = "network={name: unet, features: [64, 128, 256, 512]}"
    with pytest.raises(PlanError, match=r"fedmap's prior has [\d,]+ numbers \(\d+\.\d GiB\).*choose a smaller network"):
        make_plan("fedmap", "task={name: synthetic-prostate}", unet)
