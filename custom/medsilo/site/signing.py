"""Sign and verify content with keys that are derived from a kit's key; the kit's key certifies one derived key for each
purpose.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
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

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_bytes

SHORTEST_RSA = 2048  # bits
UNSALTED = padding.PSS(padding.MGF1(SHA256()), 0)

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
KeyPurpose = Literal["approvals", "ledger", "settings", "data set", "events", "record", "secure aggregation"]


@dataclass(frozen=True)
class UseKey:
    """A signing key for one purpose, which is derived from a kit's key and which the kit's key certifies.

    The kit's key itself signs only TLS connections and certifications of derived keys. A signature for one purpose is
    invalid for every other purpose, and a leaked derived key does not reveal the kit's key.
    """

    key: ed25519.Ed25519PrivateKey = field(repr=False)
    certified: bytes  # the kit's signature of the purpose together with the derived public key

    @classmethod
    def of(cls, kit: PrivateKey, use: KeyPurpose) -> Self:
        """Derive the key for one purpose from a kit's key by HKDF with SHA-256; equal inputs always give equal keys."""
        secret = kit.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        derived = HKDF(SHA256(), 32, salt=None, info=f"medsilo signing key 1: {use}".encode()).derive(secret)
        key = ed25519.Ed25519PrivateKey.from_private_bytes(derived)
        return cls(key, sign_with(kit, claim(use, key.public_key().public_bytes_raw())))


def claim(use: KeyPurpose, public: bytes) -> bytes:
    """Return the bytes that a kit's key signs to certify a key for one purpose."""
    return f"medsilo signing key 1: {use}\n".encode() + public


def read_pair(certificate: bytes, key: bytes) -> tuple[tuple[x509.Certificate, ...], PrivateKey]:
    """Parse PEM texts of a kit's certificates and key, or raise MedsiloError if the key does not fit the
    certificate.
    """
    try:
        chain, private = x509.load_pem_x509_certificates(certificate), private_key(key)
        same = chain[0].public_key() == private.public_key()
    # cryptography raises UnsupportedAlgorithm for an unknown elliptic curve
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise MedsiloError(
            f"the kit's certificate or key cannot be read ({type(error).__name__}); ask the lead for the kit again",
            private=str(error),
        ) from error
    if not isinstance(private, PrivateKey):
        raise MedsiloError("the kit's key is neither RSA, nor of an elliptic curve, nor Ed25519; ask for a kit again")
    if not same:
        raise MedsiloError("the kit's key does not belong to its certificate; ask the lead for the kit again")
    return tuple(chain), private


def check_succession(certificate: bytes, earlier: bytes, root: bytes) -> None:
    """Raise MedsiloError unless a kit's root issued both certificates, the earlier and the present one, for the same
    name.
    """
    try:
        own, before, above = (x509.load_pem_x509_certificates(text)[0] for text in (certificate, earlier, root))
        before.verify_directly_issued_by(above)
        same = own.subject == before.subject
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise MedsiloError(
            f"the certificate in startup-before/ was not issued by the kit's root ({type(error).__name__}); remove "
            "that folder",
            private=str(error),
        ) from error
    if not same:
        raise MedsiloError(
            "the certificate in startup-before/ belongs to another party than the kit; remove that folder"
        )


@lru_cache(maxsize=8)
def private_key(text: bytes) -> Any:
    """Parse a PEM private key; the result is cached, because checking the primes of an RSA key takes 0.1 s."""
    return load_pem_private_key(text, None)


def own_key(path: Path, of: str) -> PrivateKey:
    """Read the signing key of a hospital without a kit; if there is no such key, create one."""
    if not path.exists():
        made = ed25519.Ed25519PrivateKey.generate()
        write_bytes(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise MedsiloError(
            f"the key of {of} cannot be read ({type(error).__name__}); put it back from a copy", private=str(path)
        ) from error
    if not isinstance(key, PrivateKey):
        raise MedsiloError(f"the key of {of} is neither RSA, nor of an elliptic curve, nor Ed25519", private=str(path))
    return key


def public_text(key: PrivateKey | UseKey) -> str:
    own = key.key if isinstance(key, UseKey) else key
    return own.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo).hex()


def sign_with(key: PrivateKey | UseKey, content: bytes) -> bytes:
    """Sign content by RSA-PSS without salt, deterministic ECDSA or Ed25519, so that equal content and keys give equal
    signatures.
    """
    if isinstance(key, UseKey):
        return key.key.sign(content)
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, UNSALTED, SHA256())
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(content, ec.ECDSA(SHA256(), deterministic_signing=True))
    return key.sign(content)


def verify(key: object, signature: bytes, content: bytes) -> None:
    """Raise InvalidSignature unless this public key signed the content, or ValueError for an unsuitable key."""
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= SHORTEST_RSA:
        key.verify(signature, content, UNSALTED, SHA256())
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, content, ec.ECDSA(SHA256()))
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, content)
    else:
        raise ValueError("the certificate's key is too short or of no known kind")
