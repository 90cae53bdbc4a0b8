"""Another party poses as a hospital in a key agreement: a site with false signatures, the server, the lead or a
relay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medsilo.core.errors import Refused
from medsilo.runs.messages import StudyMessage
from medsilo.site.kit import KitFiles
from medsilo_secagg.identity import Certified, signer_of
from medsilo_secagg.letters import Roster
from medsilo_secagg.member import Member
from medsilo_secagg.sealed_rounds import terms_of, threshold_of
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests import sealed
from tests.conftest import make_plan, over_all
from tests.sites import site_of
from tests.unit.medsilo_lab.test_consortium import NORTH, TOP, put
from tests.unit.medsilo_lab.test_provision import kits_of
from tests.unit.medsilo_secagg.test_sealed_engine import CPU, GO_ON, HOSPITALS, RULES
from tests.unit.medsilo_server.test_coordinator import Answers, Scripted
from tests.unit.site.test_approvals import make_kit

SIX = list("abcdef")


def test_a_site_agrees_with_no_other_hospitals_and_no_fewer_than_the_plan_says() -> None:
    """The threshold of secure aggregation counts all hospitals in the plan, so a site agrees on keys with exactly these
    hospitals.
    """
    plan = make_plan(
        "fedavg", *RULES, "secure_aggregation.mode=pairwise", *GO_ON[:1], "participation.minimum=5", sites=SIX
    )
    assert (
        threshold_of(plan.secure_aggregation, 5)
        < terms_of(plan, "s", SIX[:5]).threshold
        == threshold_of(plan.secure_aggregation, 6)
        == 5
    )
    for sites, said in (
        (SIX[:3], "it lets 3 hospitals agree on keys, and the plan requires 5"),
        ([*SIX, "x"], "other"),
    ):
        with pytest.raises(Refused, match=said):
            terms_of(plan, "s", sites)


# ------------------------------------------------------------------------------------------------ false hospitals
def signer_in(kit: Path, kind: str = "client") -> Certified:
    files = [kit / "startup" / name for name in (f"{kind}.crt", f"{kind}.key", "rootCA.pem")]
    signer = signer_of(KitFiles(*map(str, files)))
    assert isinstance(signer, Certified)
    return signer


@pytest.mark.slow
def test_the_server_its_lead_and_relays_count_as_no_hospitals(tmp_path: Path) -> None:
    """The consortium's root also signs the certificates of the server, the lead and the relays, and a plan may name
    these parties as sites.
    """
    kits_of(tmp_path, put("relays", [NORTH, TOP]))
    kits = tmp_path / "kits"
    false = {"localhost": "server", "lead@clinic.org": "client", "relay-n": "client", "relay-top": "client"}
    said = {"lead@clinic.org": "hospital's, but lead"}
    for name, kind in false.items():
        study = sealed.terms(3, sites=tuple(sorted(("st-anna", "north", name))))
        signers = {site: signer_in(kits / site, kind if site == name else "client") for site in study.sites}
        members = {site: Member.begin(study, site, signers[site]) for site in study.sites}
        assembly = Roster(introductions=tuple(members[site].introduction() for site in study.sites))
        with pytest.raises(Refused, match=f"^{name}: .*{said.get(name, 'the server or a relay')}"):
            members["north"].meet(assembly)


def test_certificates_that_nvflare_signs_on_request_are_hospitals_where_they_say_client() -> None:
    from tests.unit.medsilo_secagg.test_sealed_identity import certified

    me = certified("site-1")
    for role in ("", "client"):
        own = certified("site-0", role=role)
        me.check("site-0", own.certificates, own.sign(b"this"), b"this")
    for role in ("server", "lead", "org_admin", "member", "project_admin"):
        own = certified("site-0", role=role)
        with pytest.raises(Refused, match=f"site-0: its certificate is not a hospital's, but {role}"):
            me.check("site-0", own.certificates, own.sign(b"this"), b"this")


# ------------------------------------------------------------------------------------------------ false signatures
def odd_signature(own: dict[str, Any]) -> None:
    own["signature"] = own["signature"][:-2] + ("00" if own["signature"][-2:] != "00" else "01")


def other_keys(own: dict[str, Any]) -> None:
    own["channel"] = "11" * 32


def nobodys(own: dict[str, Any]) -> None:
    own["certificates"], own["signature"] = [], ""


def garbage(own: dict[str, Any]) -> None:
    own["certificates"] = ["00" * 40]


def foreign(own: dict[str, Any]) -> None:
    from tests.unit.medsilo_secagg import test_sealed_identity as identity

    key, own_key = identity.fresh(), identity.fresh()
    above = identity.certificate("root", key, "root", key, ca=True)
    signed = identity.certificate("d", own_key, "root", key)
    stranger = Certified.read(identity.pem(signed), identity.pem(own_key), identity.pem(above))
    own["certificates"], own["signature"] = [each.hex() for each in stranger.certificates], stranger.sign(b"x").hex()


@pytest.mark.slow
@over_all("change", [odd_signature, other_keys, nobodys, garbage, foreign])
def test_keys_that_are_signed_falsely_cost_their_sender_its_place_and_nobody_else(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """The server checks hospitals' keys before sending the keys to other hospitals. All sites except the sender of the
    false signature agree on keys.
    """
    folder = tmp_path / change.__name__
    kits = {site: make_kit(folder / "kits" / site, site) for site in (*HOSPITALS, "server")}
    plan = make_plan("fedavg", *RULES, "secure_aggregation.mode=pairwise", *GO_ON, "training.rounds=1", sites=HOSPITALS)

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        answer = work()
        if site == "d" and "introduction" in (told := answer.facts.get("secagg", {})):
            change(told["introduction"])
        return [(site, answer)]

    members = {s: site_of(plan, s, HOSPITALS, CPU, folder / "run/sites" / s, kit=kits[s]) for s in HOSPITALS}
    line, record = Scripted(members, script), Record(folder / "run")
    server = Coordinator(plan, HOSPITALS, line, record, "scripted", settings=CPU, kit=kits["server"])
    server.run()
    assert [own.answered for own in server.rounds] == [HOSPITALS[:3]]
