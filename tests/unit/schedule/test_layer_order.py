"""Run pairs of layers whose order matters for a guarantee, in the right and in the reverse order."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.core.errors import Refused
from medsilo.federation.account import Accounting, PrivacyAccount
from medsilo.federation.file_supply import SuppliedSite
from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite, answering, training_site
from medsilo.plan import parse_plan
from medsilo.runs.messages import FILES
from medsilo.runs.paths import site_folder
from tests.hospital import NAMES, write_photos
from tests.unit.federation.test_participant import Server
from tests.unit.schedule.test_outside_layers import NOISE, installed
from tests.unit.site.test_account import PRIVATE, ask, same, settings_of, standing, weights
from tests.unit.site.test_approvals import Home

__all__ = ["installed"]
NOBODY: Any = None


@pytest.mark.slow
def test_the_ledger_stands_outside_of_noise(tmp_path: Path) -> None:
    """The server asks a hospital several times for the same answer.

    If noise were added after the ledger, each repeated answer would have new noise, but only one answer would be
    charged. The mean of many answers with new noise would contain almost no noise.
    """
    photos = write_photos(tmp_path / "photos", NAMES)
    plan = parse_plan(PRIVATE, [NOISE % (60.0, 1.0)])

    def place(name: str) -> SiteContext:
        return SiteContext(plan, "a", ["a"], settings_of(photos), site_folder(tmp_path / name / "study", "a"))

    right = training_site(place("right"))
    request = ask(plan, weights(right), 1)
    first, spent = right.answer(request), standing(tmp_path / "right").epsilon(1e-3)
    assert same(first, right.answer(request)) and standing(tmp_path / "right").epsilon(1e-3) == spent

    inner = TrainingSite(participant_of(place("wrong")))
    account = PrivacyAccount.of(place("wrong"))
    assert account
    [layer] = plan.layers
    wrong = layer.site(Accounting(inner.site, account, inner.participant), NOBODY)
    first, spent = wrong.answer(request, lambda: None), standing(tmp_path / "wrong").epsilon(1e-3)
    again = wrong.answer(request, lambda: None)
    assert not same(first, again) and standing(tmp_path / "wrong").epsilon(1e-3) == spent


def test_a_file_comes_only_to_a_hospital_that_has_approved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reverse order of layers, a server could fill the disk of a hospital that has not approved the plan."""
    home, content = Home(tmp_path / "kit"), bytes(1000)
    name, kept = hashlib.sha256(content).hexdigest(), home.folder / "medsilo/_models"
    monkeypatch.setattr(type(home.plan.network), "files", {name: len(content)})
    order = Server(home.plan).ask("join", 0)
    order.groups[FILES] = {f"{name}.0": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
    permission = home.permission()
    right = answering(permission.context, permission)
    with pytest.raises(Refused, match="has not approved"):
        right.answer(order, lambda: None)
    assert not kept.exists()
    wrong = SuppliedSite(permission.context, home.permission)
    with pytest.raises(Refused, match="has not approved"):
        wrong.answer(order, lambda: None)
    assert (kept / name).read_bytes() == content
