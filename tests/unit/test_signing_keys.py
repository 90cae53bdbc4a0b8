"""One key for each use, derived from the kit's and certified by it: what one signed proves nothing elsewhere."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_private_key
from cryptography.x509 import Certificate, load_pem_x509_certificate

from medsilo.core.errors import MedsiloError, Refused
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.approvals import ApprovalLimits, approvals_of
from medsilo.site.kit import KitFiles
from medsilo.site.ledger import ledger_of
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo.site.signed import fingerprint
from medsilo.site.signing import KeyPurpose, PrivateKey, UseKey, public_text, sign_with
from medsilo_secagg.identity import SEALING, check_certified
from tests.unit.test_approvals import WANTED, make_kit
from tests.unit.test_ledger import DATA, DEMANDS, ONE, ROUND, CountedStudy
from tests.unit.test_sealed_identity import certified

KEYS = {
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "elliptic": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}
USES: tuple[KeyPurpose, ...] = ("approvals", "ledger", "settings", "record", SEALING)


def test_people_compare_the_first_half_of_a_key_s_hash_in_fours() -> None:
    digits = hashlib.sha256(bytes.fromhex("00ff")).hexdigest()
    parts = fingerprint("00ff").split("-")
    assert "".join(parts) == digits[:32] and {len(part) for part in parts} == {4}


@pytest.mark.parametrize("kind", KEYS)
def test_each_use_has_a_key_of_its_own_and_always_the_same(kind: str) -> None:
    kit: PrivateKey = KEYS[kind]()
    keys = [UseKey.of(kit, use) for use in USES]
    publics = {public_text(key) for key in (*keys, kit)}
    assert len(publics) == len(USES) + 1
    assert [public_text(UseKey.of(kit, use)) for use in USES] == [public_text(key) for key in keys]
    assert not publics & {public_text(UseKey.of(KEYS[kind](), use)) for use in USES}
    assert "key=" not in repr(keys[0])


def test_what_the_kits_own_key_or_one_of_another_use_signed_is_refused() -> None:
    """Whoever gets a signature of the key that identifies a hospital's connections can't use it for masks."""
    own, other = certified("site-0"), certified("site-1")
    ledger = UseKey.of(own.key, "ledger")
    of_ledger = ledger.key.public_key().public_bytes_raw() + ledger.key.sign(b"this") + ledger.certified
    own_public = UseKey.of(own.key, SEALING)
    borrowed = ledger.key.public_key().public_bytes_raw() + ledger.key.sign(b"this") + own_public.certified
    for forged in (sign_with(own.key, b"this"), of_ledger, borrowed, b"", b"\0" * 96):
        with pytest.raises(Refused, match="site-0: "):
            other.check("site-0", own.certificates, forged, b"this")
    other.check("site-0", own.certificates, own.sign(b"this"), b"this")


def lines_of_a_kit(folder: Path) -> tuple[KitFiles, dict[KeyPurpose, dict[str, Any]]]:
    """A hospital that approves, remembers its settings and charges its ledger: a signed value of each use."""
    kit, book = make_kit(folder, "hospital-a"), QueryBudget(folder / "medsilo/_hospital/hospital-a")
    approvals = approvals_of(book, kit, WANTED)
    approvals.decide("a" * 64, "approved", "engineer", ApprovalLimits())
    AcceptedSettings(kit).accept(WANTED)
    ledger = ledger_of(book, DATA, kit)
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt", ROUND)
    found: dict[KeyPurpose, Path] = {"approvals": approvals.file, "settings": AcceptedSettings(kit).file}
    signed: dict[KeyPurpose, dict[str, Any]] = {use: json.loads(path.read_text()) for use, path in found.items()}
    return kit, signed | {"ledger": json.loads(ledger.file.read_text().splitlines()[-1])}


def test_who_holds_the_kits_certificate_alone_can_verify(tmp_path: Path) -> None:
    kit, signed = lines_of_a_kit(tmp_path)
    mine: Certificate = load_pem_x509_certificate(Path(kit.certificate).read_bytes())
    other = certified("hospital-a").chain[0]
    assert len({value["key"] for value in signed.values()}) == 3
    for use, value in signed.items():
        public, by = load_der_public_key(bytes.fromhex(value["key"])), bytes.fromhex(value["certified"])
        check_certified(mine, use, public, by)
        with pytest.raises(InvalidSignature):
            check_certified(other, use, public, by)
        with pytest.raises(InvalidSignature):
            check_certified(mine, "record", public, by)


def test_a_certification_that_was_changed_makes_a_file_void(tmp_path: Path) -> None:
    kit, signed = lines_of_a_kit(tmp_path)
    path = AcceptedSettings(kit).file
    path.write_text(path.read_text().replace(signed["settings"]["certified"], "00" * 64))
    with pytest.raises(MedsiloError, match="damaged or not signed by its key"):
        AcceptedSettings(kit).check()


def test_the_kits_own_key_signs_nothing_in_these_files(tmp_path: Path) -> None:
    kit, signed = lines_of_a_kit(tmp_path)
    own = load_pem_private_key(Path(kit.key).read_bytes(), None)
    assert isinstance(own, PrivateKey)
    assert public_text(own) not in {value["key"] for value in signed.values()}
    assert SiteSettings.read(kit.kit / "local").approval == "required"
