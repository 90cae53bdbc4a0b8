"""A kit derives a separate signing key for each use from the kit's key, which also certifies the signing keys.

A signature is valid for only one use.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_public_key,
    load_pem_private_key,
)
from cryptography.x509 import Certificate, load_pem_x509_certificate

from medsilo.check.kit import check_certificates, check_seal, read_kit
from medsilo.core.errors import MedsiloError, Refused
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.approvals import ApprovalLimits, approvals_of
from medsilo.site.kit import KitFiles
from medsilo.site.ledger import ledger_of
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import PrivacyRequirements, SiteSettings
from medsilo.site.signed import digest_of, fingerprint, line_of, opened, read_signed, signed
from medsilo.site.signing import KeyPurpose, PrivateKey, UseKey, own_key, public_text, read_pair, sign_with
from medsilo_secagg.identity import SEALING, Certified, check_certified
from tests.unit.medsilo_secagg.test_sealed_identity import certificate, certified, fresh, pem, root
from tests.unit.site.test_approvals import WANTED, make_kit
from tests.unit.site.test_ledger import DATA, DEMANDS, ONE, ROUND, CountedStudy

KEYS = {
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "elliptic": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}
USES: tuple[KeyPurpose, ...] = ("approvals", "ledger", "settings", "events", "record", SEALING)


def test_people_compare_the_first_half_of_a_key_s_hash_in_fours() -> None:
    digits = hashlib.sha256(bytes.fromhex("00ff")).hexdigest()
    parts = fingerprint("00ff").split("-")
    assert "".join(parts) == digits[:32] and {len(part) for part in parts} == {4}


@pytest.mark.parametrize("kind", KEYS)
def test_equal_values_have_the_same_digest_and_the_same_signature(kind: str) -> None:
    """Values that differ only in the order of their keys have equal digests and equal signatures."""
    said = {"counts": "known", "train": "agreed"}
    values = {"epsilon": 1.0, "delta": 1e-5}
    one, other = (PrivacyRequirements(public=dict(order), **values) for order in (said.items(), reversed(said.items())))
    key = KEYS[kind]()
    assert one == other and digest_of(one) == digest_of(other) != digest_of(PrivacyRequirements(**values))
    assert line_of(signed(one, key)) == line_of(signed(other, key))
    assert opened(line_of(signed(one, key)), PrivacyRequirements, "x") == (one, public_text(key))


def test_what_is_no_signed_file_is_refused_and_its_place_stays_here(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b" " * ((8 << 20) + 1))
    for name, words in (("none", "there is no none"), ("folder", "folder is damaged"), ("large", "large is damaged")):
        with pytest.raises(MedsiloError, match=words) as error:
            read_signed(tmp_path / name, PrivacyRequirements)
        assert str(tmp_path) not in str(error.value) and error.value.private == str(tmp_path / name)


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
    """A signature by the key for connections is not valid for the keys of secure aggregation."""
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
    kit, book = make_kit(folder, "hospital-a"), QueryBudget(folder / "medsilo/_hospital/hospital-a")
    approvals = approvals_of(book, kit, WANTED)
    approvals.decide("a" * 64, "approved", "engineer", ApprovalLimits())
    AcceptedSettings(kit).accept(WANTED)
    ledger = ledger_of(book, DATA, kit)
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt", ROUND)
    found: dict[KeyPurpose, Path] = {"approvals": approvals.file, "settings": AcceptedSettings(kit).file}
    values: dict[KeyPurpose, dict[str, Any]] = {use: json.loads(path.read_text()) for use, path in found.items()}
    return kit, values | {"ledger": json.loads(ledger.file.read_text().splitlines()[-1])}


def test_who_holds_the_kits_certificate_alone_can_verify(tmp_path: Path) -> None:
    kit, lines = lines_of_a_kit(tmp_path)
    mine: Certificate = load_pem_x509_certificate(Path(kit.certificate).read_bytes())
    other = certified("hospital-a").chain[0]
    assert len({value["key"] for value in lines.values()}) == 3
    for use, value in lines.items():
        public, by = load_der_public_key(bytes.fromhex(value["key"])), bytes.fromhex(value["certified"])
        check_certified(mine, use, public, by)
        with pytest.raises(InvalidSignature):
            check_certified(other, use, public, by)
        with pytest.raises(InvalidSignature):
            check_certified(mine, "record", public, by)


def test_a_certification_that_was_changed_makes_a_file_void(tmp_path: Path) -> None:
    kit, lines = lines_of_a_kit(tmp_path)
    path = AcceptedSettings(kit).file
    path.write_text(path.read_text().replace(lines["settings"]["certified"], "00" * 64))
    with pytest.raises(MedsiloError, match="damaged or not signed by its key"):
        AcceptedSettings(kit).check()


def test_a_kits_key_is_that_of_its_first_certificate() -> None:
    """The kit's private key must belong to the first certificate in the kit's file of certificates."""
    key, (above, signs) = fresh(), root()
    chain = pem(certificate("hospital-a", key, "root", signs), above)
    certificates, private = read_pair(chain, pem(key))
    assert len(certificates) == 2 and public_text(private) == public_text(key)
    with pytest.raises(MedsiloError, match="does not belong to its certificate"):
        read_pair(chain, pem(signs))


def test_a_key_of_ones_own_is_made_once_and_no_other_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    first = public_text(own_key(path, "a ledger"))
    assert public_text(own_key(path, "a ledger")) == first and path.stat().st_mode & 0o077 == 0
    diffie_hellman = x25519.X25519PrivateKey.generate()
    other = diffie_hellman.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content, words in ((b"", "cannot be read"), (path.read_bytes()[:60], "cannot be read"), (other, "neither RSA")):
        path.write_bytes(content)
        with pytest.raises(MedsiloError, match=f"^the key of a ledger .*{words}") as error:
            own_key(path, "a ledger")
        assert error.value.private == str(path) and path.read_bytes() == content


def test_the_kits_own_key_signs_nothing_in_these_files(tmp_path: Path) -> None:
    kit, lines = lines_of_a_kit(tmp_path)
    own = load_pem_private_key(Path(kit.key).read_bytes(), None)
    assert isinstance(own, PrivateKey)
    assert public_text(own) not in {value["key"] for value in lines.values()}
    assert SiteSettings.read(kit.kit / "local").approval == "required"


def test_a_key_of_an_unknown_curve_is_one_line(tmp_path: Path) -> None:
    """prime239v3 of X9.62 is a valid elliptic curve that medsilo's cryptography library does not support."""
    known, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030106")

    def odd(text: bytes) -> bytes:
        label = re.findall(rb"-----BEGIN (.*)-----", text)[0]
        der = base64.b64decode(b"".join(text.split(b"\n")[1:-2])).replace(known, unknown)
        return b"-----BEGIN %b-----\n%b-----END %b-----\n" % (label, base64.encodebytes(der), label)

    key, (above, signs) = fresh(), root()
    own, certified_key = pem(key), pem(certificate("hospital-a", key, "root", signs))
    for chain, private in ((certified_key, odd(own)), (odd(certified_key), own)):
        with pytest.raises(MedsiloError, match="kit's certificate or key cannot be read"):
            read_pair(chain, private)
    mine = Certified.read(certified_key, own, odd(pem(above)))
    with pytest.raises(Refused, match="is not of the consortium's root"):
        mine.check("hospital-a", mine.certificates, mine.sign(b""), b"")
    (tmp_path / "key.pem").write_bytes(odd(own))
    with pytest.raises(MedsiloError, match="cannot be read"):
        own_key(tmp_path / "key.pem", "the ledger")
    kit = Path(make_kit(tmp_path / "kit", "hospital-a").certificate)
    for name in ("client.crt", "client.key", "rootCA.pem"):
        true = kit.with_name(name).read_bytes()
        kit.with_name(name).write_bytes(odd(true))
        found = [*check_certificates(read_kit(tmp_path / "kit")), *check_seal(read_kit(tmp_path / "kit"))]
        assert [(one.severity, "can't be read" in one.what) for one in found] == [("stops", True)], name
        kit.with_name(name).write_bytes(true)
