"""Each site signs its keys for secure aggregation with the key of its certificate.

A wrong certificate or an exchanged key gives an error that names the site.
"""

from datetime import UTC, datetime, timedelta
from functools import cache

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

from medsilo.core.errors import MedsiloError, Refused
from medsilo.site.signing import PrivateKey
from medsilo_secagg.identity import Certified, Signer, Unsigned
from medsilo_secagg.letters import Roster
from medsilo_secagg.member import Member
from tests.sealed import Hospitals, as_groups, block, close, mean_of, names, numbers, terms

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def name(text: str, role: str = "") -> x509.Name:
    own = [x509.NameAttribute(NameOID.COMMON_NAME, text)]
    return x509.Name(own + [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] * bool(role))


def certificate(
    subject: str,
    key: PrivateKey,
    issuer: str,
    signs: PrivateKey,
    ca: bool = False,
    dates: tuple[datetime, datetime] = (NOW - DAY, NOW + DAY),
    role: str = "",
) -> x509.Certificate:
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(name(issuer), name(subject, role), key.public_key(), number, *dates)
    builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
    return builder.sign(signs, None if isinstance(signs, ed25519.Ed25519PrivateKey) else SHA256())


def pem(*things: x509.Certificate | PrivateKey) -> bytes:
    return b"".join(
        each.public_bytes(Encoding.PEM)
        if isinstance(each, x509.Certificate)
        else each.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        for each in things
    )


@cache
def root() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    return certificate("root", key, "root", key, ca=True), key


def fresh() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def certified(site: str, key: PrivateKey | None = None, **kind: object) -> Certified:
    above, signs = root()
    own = key or fresh()
    return Certified.read(pem(certificate(site, own, "root", signs, **kind)), pem(own), pem(above))  # type: ignore[arg-type]


def test_a_study_with_the_certificates_of_a_kit() -> None:
    """RSA certificates from NVFlare's own provisioning also work for secure aggregation."""
    root_key, root_public = generate_keys()
    authority = Identity("consortium", "org")
    above = generate_cert(authority, authority, root_key, root_public, ca=True)
    signers: dict[str, Signer] = {}
    for site in names(3):
        key, public = generate_keys()
        own = generate_cert(Identity(site, "hospital", "client"), authority, root_key, public)
        signers[site] = Certified.read(serialize_cert(own), serialize_pri_key(key), serialize_cert(above))
    study, models = Hospitals(terms(3), signers), numbers(3)
    own_block = block(models)
    server = study.begin(1, [own_block])
    study.seal(server, as_groups(models))
    assert close(own_block.read(study.open(server)["model"], 3), mean_of(models, names(3)))


@pytest.mark.parametrize("kind", ["rsa", "p384", "ed25519"])
def test_keys_of_every_kind(kind: str) -> None:
    key: PrivateKey = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }[kind]()
    own, other = certified("site-0", key), certified("site-1")
    signature = own.sign(b"this")
    other.check("site-0", own.certificates, signature, b"this")
    with pytest.raises(Refused, match="site-0: the signature on its keys"):
        other.check("site-0", own.certificates, signature, b"that")
    with pytest.raises(Refused, match="site-0: "):
        other.check("site-0", own.certificates, signature[:-1], b"this")
    assert "key" not in repr(own)


def test_certificates_that_are_not_believed() -> None:
    me = certified("site-1")
    for site, own, said in (
        ("site-2", certified("site-0"), "belongs to site-0"),
        ("site-0", certified("site-0", dates=(NOW - 2 * DAY, NOW - DAY)), "not today"),
        ("site-0", certified("site-0", dates=(NOW + DAY, NOW + 2 * DAY)), "not today"),
        ("site-0", certified("site-0", rsa.generate_private_key(65537, 1024)), "not of the consortium's root"),
    ):
        with pytest.raises(Refused, match=f"{site}: .*{said}"):
            me.check(site, own.certificates, own.sign(b"this"), b"this")
    with pytest.raises(Refused, match="site-0: its keys are not signed"):
        me.check("site-0", (), b"", b"this")
    with pytest.raises(Refused, match="site-0: its certificate is not of"):
        me.check("site-0", (b"no certificate",), b"", b"this")
    with pytest.raises(Refused, match="site-0: its keys are signed"):
        Unsigned().check("site-0", me.certificates, b"", b"this")


def test_a_certificate_of_another_root() -> None:
    key, own_key = fresh(), fresh()
    foreign = certificate("root", key, "root", key, ca=True)
    stranger = Certified.read(pem(certificate("site-0", own_key, "root", key)), pem(own_key), pem(foreign))
    with pytest.raises(Refused, match="site-0: (the signature|its certificate)"):
        certified("site-1").check("site-0", stranger.certificates, stranger.sign(b"this"), b"this")


@pytest.mark.parametrize("ca", [True, False])
def test_a_chain_holds_if_those_between_may_sign(ca: bool) -> None:
    """A chain of certificates is valid only if each certificate between root and site may sign certificates."""
    (above, signs), between_key, own_key = root(), fresh(), fresh()
    between = certificate("between", between_key, "root", signs, ca=ca)
    own = certificate("site-0", own_key, "between", between_key)
    signer = Certified.read(pem(own, between, above), pem(own_key), pem(above))
    assert len(signer.certificates) == 2
    check = (certified("site-1").check, "site-0", signer.certificates, signer.sign(b"this"), b"this")
    if ca:
        check[0](*check[1:])
    else:
        with pytest.raises(Refused, match="site-0:.*that may not"):
            check[0](*check[1:])


def test_a_kit_that_does_not_fit_together() -> None:
    (above, signs), key = root(), fresh()
    own = certificate("site-0", key, "root", signs)
    with pytest.raises(MedsiloError, match="cannot be read"):
        Certified.read(b"", pem(key), pem(above))
    with pytest.raises(MedsiloError, match="does not belong to its certificate"):
        Certified.read(pem(own), pem(fresh()), pem(above))


def test_a_server_that_swaps_keys_is_noticed() -> None:
    """A site rejects keys with which the server replaced another site's keys, whatever certificate the server sends
    with the keys.
    """
    study = Hospitals(terms(3), {site: certified(site) for site in names(3)})
    fresh_members = {site: Member.begin(study.terms, site, study.signer(site)) for site in names(3)}
    honest = [member.introduction() for member in fresh_members.values()]
    attacker = Member.begin(study.terms, "site-2", Unsigned()).introduction()
    swapped = {
        "the signature on its keys": honest[2].model_copy(update={"channel": attacker.channel}),
        "its keys are not signed": attacker,
        "belongs to site-1": Member.begin(study.terms, "site-2", certified("site-1")).introduction(),
        # the site itself signed these keys in another study
        "signature": Member.begin(terms(3, study="other"), "site-2", study.signer("site-2")).introduction(),
    }
    for said, false in swapped.items():
        with pytest.raises(Refused, match=f"site-2: .*{said}"):
            fresh_members["site-0"].meet(Roster(introductions=(*honest[:2], false)))
    with pytest.raises(Refused, match="the server:.*of this site"):
        fresh_members["site-0"].meet(Roster(introductions=(study.assembly.introductions[0], *honest[1:])))
    with pytest.raises(Refused, match="the server:.*keys it relays"):
        fresh_members["site-0"].meet(Roster(introductions=(honest[0], honest[2], honest[1])))
    fresh_members["site-0"].meet(Roster(introductions=tuple(honest)))


def test_sites_that_were_told_different_keys_can_read_nothing_of_each_other() -> None:
    """Without certificates, a server can send different keys to two sites, but the two sites cannot decrypt each
    other's key shares.
    """
    study, models = Hospitals(terms(3)), numbers(3)
    honest = study.assembly.introductions
    other = Member.begin(study.terms, "site-2", Unsigned()).introduction()
    study.members["site-1"].meet(Roster(introductions=(*honest[:2], other)))
    own_block = block(models)
    deals = study.begin(1, [own_block]).deals()
    with pytest.raises(Refused, match="site-2: its shares cannot be decrypted"):
        study.members["site-1"].seal(deals["site-1"], [own_block], as_groups(models)["site-1"])
