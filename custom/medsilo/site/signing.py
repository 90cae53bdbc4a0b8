"""Signatures by the certificate that a site's kit holds, which show whose keys these are."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import write_bytes

MOST_CERTIFICATES, LONGEST_CERTIFICATE = 4, 8192  # of a chain, bytes each
LONGEST_SIGNATURE = 1024  # bytes
SHORTEST_RSA = 2048  # bits
HOSPITAL = "client"  # NVFlare's word in a subject, or none; people and servers have others ("lead", "server")
PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)
UNSALTED = padding.PSS(padding.MGF1(SHA256()), 0)
ECDSA = ec.ECDSA(SHA256())

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
PUBLIC, SIGNATURE = 32, 64  # bytes of Ed25519
SEALING: Final = "secure aggregation"
Use = Literal["approvals", "ledger", "settings", "record", "secure aggregation"]


@dataclass(frozen=True)
class UseKey:
    """A signing key for one use alone, derived from the key of a kit, whose owner certified its public half.

    The kit's key itself signs connections (TLS) and these certifications, and nothing else: what is signed for one use
    is never a signature for another, and one derived key that leaks gives no other away.
    """

    key: ed25519.Ed25519PrivateKey = field(repr=False)
    certified: bytes  # the kit key's signature on the use and the public half

    @classmethod
    def of(cls, kit: PrivateKey, use: Use) -> Self:
        """Derive the key of a use: the same kit's key gives the same one (HKDF with SHA-256)."""
        secret = kit.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        derived = HKDF(SHA256(), 32, salt=None, info=f"medsilo signing key 1: {use}".encode()).derive(secret)
        key = ed25519.Ed25519PrivateKey.from_private_bytes(derived)
        return cls(key, sign_with(kit, _claim(use, key.public_key().public_bytes_raw()), salted=False))


def _claim(use: Use, public: bytes) -> bytes:
    return f"medsilo signing key 1: {use}\n".encode() + public


def check_certified(certificate: x509.Certificate, use: Use, public: object, certified: bytes) -> None:
    """Raise InvalidSignature unless the key of this certificate certified a public key for a use; ValueError where one
    of them is of no use."""
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise ValueError("no key for one use")
    verify(certificate.public_key(), certified, _claim(use, public.public_bytes_raw()), salted=False)


class Unsigned:
    """No identity: for simulations, whose sites have no certificates. A server in the middle is not noticed."""

    # What the keys of a study rest on, for results.
    said: ClassVar[str] = "no signature, so a server that swaps them is not noticed (simulation)"
    certificates: tuple[bytes, ...] = ()

    def sign(self, content: bytes) -> bytes:
        """Return no signature."""
        return b""

    def check(self, site: str, certificates: Sequence[bytes], signature: bytes, content: bytes) -> None:
        """Raise Refused where a site signs: it is not in the same simulation."""
        if certificates or signature:
            raise Refused(f"{site}: its keys are signed, and this site has no root certificate to check them with")


@dataclass(frozen=True)
class Certified:
    """The certificate and key of a site's kit, and the root that it trusts.

    The key, of RSA, an elliptic curve or Ed25519, certifies the one that signs, which is of this use alone. A signature
    holds that one's public half, what it signed, and the certification.
    """

    said: ClassVar[str] = "certificates: each site signed its keys with that of its kit"

    chain: tuple[x509.Certificate, ...]
    key: PrivateKey = field(repr=False)
    root: x509.Certificate
    others: frozenset[str] = frozenset()  # names that are no hospital's: of the server, and of relays

    @classmethod
    def read(cls, certificate: bytes, key: bytes, root: bytes, others: Collection[str] = ()) -> Self:
        """Return the identity that these PEM texts hold; raises MedsiloError."""
        try:
            chain, anchor = x509.load_pem_x509_certificates(certificate), x509.load_pem_x509_certificate(root)
            private = load_pem_private_key(key, None)
            same = chain[0].public_key() == private.public_key()
        except (ValueError, TypeError) as error:
            raise MedsiloError(
                f"sealing: the kit's certificate, key or root cannot be read ({type(error).__name__}); ask the lead "
                "for the kit again",
                private=str(error),
            ) from error
        if not isinstance(private, PrivateKey):
            raise MedsiloError("sealing: the kit's key is neither RSA, nor of an elliptic curve, nor Ed25519")
        if not same:
            raise MedsiloError("sealing: the kit's key is not its certificate's")
        return cls(tuple(each for each in chain if each != anchor), private, anchor, frozenset(others))

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """The site's certificate and those between it and the root, in DER."""
        return tuple(certificate.public_bytes(Encoding.DER) for certificate in self.chain)

    def sign(self, content: bytes) -> bytes:
        """Return a signature of this site."""
        own = UseKey.of(self.key, SEALING)
        return own.key.public_key().public_bytes_raw() + own.key.sign(content) + own.certified

    def check(self, site: str, certificates: Sequence[bytes], signature: bytes, content: bytes) -> None:
        """Raise Refused, naming the site, unless it signed this and the root vouches for its certificate and name."""
        if site in self.others:
            raise Refused(f"{site}: it is the server or a relay, which counts as no hospital")
        if not certificates:
            raise Refused(f"{site}: its keys are not signed, and this study's sites have certificates")
        try:
            chain = [x509.load_der_x509_certificate(each) for each in certificates]
            _check_chain(site, chain, self.root, datetime.now(UTC))
            public = ed25519.Ed25519PublicKey.from_public_bytes(signature[:PUBLIC])
            check_certified(chain[0], SEALING, public, signature[PUBLIC + SIGNATURE :])
            public.verify(signature[PUBLIC : PUBLIC + SIGNATURE], content)
        except InvalidSignature as error:
            raise Refused(
                f"{site}: the signature on its keys is not its certificate's: somebody may have swapped the keys"
            ) from error
        except (ValueError, TypeError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
            raise Refused(
                f"{site}: its certificate is not of the consortium's root ({type(error).__name__})", private=str(error)
            ) from error


Signer = Unsigned | Certified  # a site's own identity, and how it tells whether others are who they say


def own_key(path: Path, of: str) -> PrivateKey:
    """Return the key of a hospital without a kit, made when it is first needed. of: what it signs, for people."""
    if not path.exists():
        made = ed25519.Ed25519PrivateKey.generate()
        write_bytes(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise MedsiloError(
            f"the key of {of} cannot be read ({type(error).__name__}); put it back from a copy", private=str(path)
        ) from error
    if not isinstance(key, PrivateKey):
        raise MedsiloError(f"the key of {of} is neither RSA, nor of an elliptic curve, nor Ed25519", private=str(path))
    return key


def public_text(key: PrivateKey | UseKey) -> str:
    """Return a key's public part in hexadecimal digits."""
    own = key.key if isinstance(key, UseKey) else key
    return own.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo).hex()


def sign_with(key: PrivateKey | UseKey, content: bytes, salted: bool = True) -> bytes:
    """Return this key's signature: RSA-PSS, ECDSA or Ed25519. Not salted, the same content has the same one."""
    if isinstance(key, UseKey):
        return key.key.sign(content)
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, PSS if salted else UNSALTED, SHA256())
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(content, ECDSA if salted else ec.ECDSA(SHA256(), deterministic_signing=True))
    return key.sign(content)


def _check_chain(site: str, chain: Sequence[x509.Certificate], root: x509.Certificate, now: datetime) -> None:
    """Raise unless each certificate is issued by the next, the last by the root, all are valid, and the first names
    the site."""
    issuers = [*chain[1:], root]
    for own, issuer in zip(chain, issuers, strict=True):
        own.verify_directly_issued_by(issuer)
        if not issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise Refused(f"{site}: its certificate is signed by one that may not sign certificates")
    for certificate in (*chain, root):
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise Refused(
                f"{site}: its certificate, or one above it, is valid from {certificate.not_valid_before_utc:%Y-%m-%d} "
                f"to {certificate.not_valid_after_utc:%Y-%m-%d}, not today"
            )
    names, roles = (
        [attribute.value for attribute in chain[0].subject.get_attributes_for_oid(kind)]
        for kind in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME)
    )
    if names != [site]:
        raise Refused(f"{site}: its certificate is that of {', '.join(map(str, names)) or 'nobody'}")
    if roles not in ([], [HOSPITAL]):
        raise Refused(f"{site}: its certificate is no hospital's, it says {', '.join(map(str, roles))}")


def verify(key: object, signature: bytes, content: bytes, salted: bool = True) -> None:
    """Raise InvalidSignature unless this public key signed the content, ValueError where it is of no use."""
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= SHORTEST_RSA:
        key.verify(signature, content, PSS if salted else UNSALTED, SHA256())
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, content, ECDSA)
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, content)
    else:
        raise ValueError("the certificate's key is too short or of no known kind")
