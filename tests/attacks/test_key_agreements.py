"""False hospitals in a key agreement: fewer than the plan wants, the server, its lead."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from medsilo.core.errors import ParticipationError, Refused
from medsilo.federation.asking import Exchange
from medsilo.federation.sealed.identity import KitFiles, signer_of
from medsilo.federation.sealed.what import terms_of
from medsilo.runs.messages import Joined, Parcel
from medsilo.sealing.letters import Assembly
from medsilo.sealing.member import Member
from medsilo.sealing.relay import MaskedSums
from medsilo.sealing.signing import Certified
from medsilo.sealing.terms import Terms
from tests import sealed
from tests.attacks.test_secure_aggregation import GO_ON, HOSPITALS, RULES, Hospitals, Liar, lead
from tests.conftest import make_plan, over_all
from tests.unit.test_approvals import make_kit
from tests.unit.test_consortium import NORTH, TOP, put
from tests.unit.test_coordinator import Answers
from tests.unit.test_provision import kits_of

SIX = list("abcdef")


class Shrinking(Liar):
    """A server that goes on with three of the hospitals, whatever the plan wants."""

    def agree(self, joined: Mapping[str, Joined]) -> None:
        self.asker.check = self._anybody  # type: ignore[method-assign]
        super().agree({site: joined[site] for site in sorted(joined)[:3]})

    @staticmethod
    def _anybody(exchange: Exchange, what: str) -> None:
        if not exchange.replies:
            raise ParticipationError("nobody answers")


@pytest.mark.parametrize("changes", [[], ["participation.when_missing=continue", "participation.minimum=5"]])
def test_a_server_that_shrinks_six_hospitals_to_three(
    changes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two that help it would know the third's model."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *changes, sites=SIX)
    kind: Any = type("Small", (Shrinking,), {"opened": []})
    monkeypatch.setattr("medsilo.federation.around.SealedServer", kind)
    small = Terms("run", plan.hash, tuple(SIX[:3]), 2)
    monkeypatch.setattr("medsilo.federation.sealed.sealed_server.terms_of", lambda *given: small)
    hospitals = Hospitals(plan, tmp_path / "run")
    with pytest.raises(ParticipationError):
        lead(plan, tmp_path / "run", hospitals)
    assert not kind.opened
    wanted = f"it lets 3 hospitals agree on keys, and the plan requires {plan.participation.required}"
    assert sorted(hospitals.said) == SIX[:3] and all(wanted in said for said in hospitals.said.values())


def test_a_server_that_shrinks_a_round_or_its_sum() -> None:
    """The plan wants five of six: four open nothing, though four are a threshold."""
    study, models = sealed.Hospitals(sealed.terms(6, threshold=4, required=5)), sealed.numbers(6)
    block, groups = sealed.block(models, weights=(1,) * 6), sealed.as_groups(models)
    few = MaskedSums(sealed.terms(6, threshold=4), study.assembly, 1, [block])
    few.all = MaskedSums(study.terms, study.assembly, 1, [block]).all
    for site in sealed.names(6):
        few.offer(site, study.members[site].offer(1))
    deals = few.deals()
    small = deals["site-0"].model_copy(update={"offers": deals["site-0"].offers[:4]})
    with pytest.raises(Refused, match="it begins round 1 with 4 sites; it needs 5"):
        study.members["site-0"].seal(small, [block], groups["site-0"])
    for site, deal in list(deals.items())[:4]:
        few.add(site, study.members[site].seal(deal, [block], groups[site]))
    with pytest.raises(Refused, match="a sum of 4 sites in round 1; fewer than 5 are not opened"):
        study.members["site-0"].confirm(few.survivors(), [block])


def test_the_threshold_is_that_of_all_hospitals_of_the_plan() -> None:
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *GO_ON[:1], "participation.minimum=5", sites=SIX)
    assert plan.transport.threshold(5) < terms_of(plan, "s", SIX[:5]).threshold == plan.transport.threshold(6) == 5


# ------------------------------------------------------------------------------------------------ false hospitals
def signer_in(kit: Path, kind: str = "client") -> Certified:
    files = [kit / "startup" / name for name in (f"{kind}.crt", f"{kind}.key", "rootCA.pem")]
    signer = signer_of(KitFiles(*map(str, files)))
    assert isinstance(signer, Certified)
    return signer


def test_the_server_its_lead_and_relays_count_as_no_hospitals(tmp_path: Path) -> None:
    """All of them have certificates of the same root, and a plan may name them."""
    kits_of(tmp_path, put("relays", [NORTH, TOP]))
    kits = tmp_path / "kits"
    false = {"localhost": "server", "lead@clinic.org": "client", "relay-n": "client", "relay-top": "client"}
    said = {"lead@clinic.org": "no hospital's, it says lead"}
    for name, kind in false.items():
        study = sealed.terms(3, sites=tuple(sorted(("st-anna", "north", name))))
        signers = {site: signer_in(kits / site, kind if site == name else "client") for site in study.sites}
        members = {site: Member.begin(study, site, signers[site], sealed.SumMemory()) for site in study.sites}
        assembly = Assembly(introductions=tuple(members[site].introduction() for site in study.sites))
        with pytest.raises(Refused, match=f"^{name}: .*{said.get(name, 'the server or a relay')}"):
            members["north"].meet(assembly)


def test_certificates_that_nvflare_signs_on_request_are_hospitals_where_they_say_client() -> None:
    """There every certificate has a role: that of a hospital is `client`."""
    from tests.unit.test_sealed_identity import certified

    me = certified("site-1")
    for role in ("", "client"):
        own = certified("site-0", role=role)
        me.check("site-0", own.certificates, own.sign(b"this"), b"this")
    for role in ("server", "lead", "org_admin", "member", "project_admin"):
        own = certified("site-0", role=role)
        with pytest.raises(Refused, match=f"site-0: its certificate is no hospital's, it says {role}"):
            me.check("site-0", own.certificates, own.sign(b"this"), b"this")


# ------------------------------------------------------------------------------------------------ false signatures
def odd_signature(own: dict[str, Any]) -> None:
    own["signature"] = own["signature"][:-2] + ("00" if own["signature"][-2:] != "00" else "01")


def other_keys(own: dict[str, Any]) -> None:
    own["signing"] = own["channel"]


def nobodys(own: dict[str, Any]) -> None:
    own["certificates"], own["signature"] = [], ""


def garbage(own: dict[str, Any]) -> None:
    own["certificates"] = ["00" * 40]


def foreign(own: dict[str, Any]) -> None:
    """The name is right, and another root vouches for it."""
    from tests.unit import test_sealed_identity as identity

    key, own_key = identity.fresh(), identity.fresh()
    above = identity.certificate("root", key, "root", key, ca=True)
    signed = identity.certificate("d", own_key, "root", key)
    stranger = Certified.read(identity.pem(signed), identity.pem(own_key), identity.pem(above))
    own["certificates"], own["signature"] = [each.hex() for each in stranger.certificates], stranger.sign(b"x").hex()


@over_all("change", [odd_signature, other_keys, nobodys, garbage, foreign])
def test_keys_that_are_signed_falsely_cost_their_sender_its_place_and_nobody_else(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """The server has the consortium's root, too: it looks before it relays them, and the others agree without it."""
    folder = tmp_path / change.__name__
    kits = {site: make_kit(folder / "kits" / site, site) for site in (*HOSPITALS, "server")}
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *GO_ON, "training.rounds=1", sites=HOSPITALS)
    hospitals = Hospitals(plan, folder / "run", kits=kits)
    honest_script = hospitals.script

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        found = honest_script(site, asked, work)
        if site == "d" and "introduction" in (told := found[0][1].facts.get("sealing", {})):  # type: ignore[index, union-attr]
            change(told["introduction"])
        return found

    hospitals.script = script
    server = lead(plan, folder / "run", hospitals, kit=kits["server"])
    (line,) = server.rounds
    assert line.answered == HOSPITALS[:3] and not hospitals.said
