"""Signatures by keys for one use each, which the key of a kit certifies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from cryptography import x509
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
KeyPurpose = Literal["approvals", "ledger", "settings", "record", "secure aggregation"]


@dataclass(frozen=True)
class UseKey:
    """A signing key for one use alone, derived from the key of a kit, whose owner certified its public half.

    The kit's key itself signs connections (TLS) and these certifications, and nothing else: what is signed for one use
    is never a signature for another, and one derived key that leaks gives no other away.
    """

    key: ed25519.Ed25519PrivateKey = field(repr=False)
    certified: bytes  # the kit key's signature on the use and the public half

    @classmethod
    def of(cls, kit: PrivateKey, use: KeyPurpose) -> Self:
        """Derive the key of a use: the same kit's key gives the same one (HKDF with SHA-256)."""
        secret = kit.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        derived = HKDF(SHA256(), 32, salt=None, info=f"medsilo signing key 1: {use}".encode()).derive(secret)
        key = ed25519.Ed25519PrivateKey.from_private_bytes(derived)
        return cls(key, sign_with(kit, claim(use, key.public_key().public_bytes_raw())))


def claim(use: KeyPurpose, public: bytes) -> bytes:
    """Return what a certificate's key signs of a key for one use."""
    return f"medsilo signing key 1: {use}\n".encode() + public


def read_pair(certificate: bytes, key: bytes) -> tuple[tuple[x509.Certificate, ...], PrivateKey]:
    """Return a kit's certificates and its key, from these PEM texts; raises MedsiloError where they are no pair."""
    try:
        chain, private = x509.load_pem_x509_certificates(certificate), load_pem_private_key(key, None)
        same = chain[0].public_key() == private.public_key()
    except (ValueError, TypeError) as error:
        raise MedsiloError(
            f"the kit's certificate or key cannot be read ({type(error).__name__}); ask the lead for the kit again",
            private=str(error),
        ) from error
    if not isinstance(private, PrivateKey):
        raise MedsiloError("the kit's key is neither RSA, nor of an elliptic curve, nor Ed25519; ask for a kit again")
    if not same:
        raise MedsiloError("the kit's key does not belong to its certificate; ask the lead for the kit again")
    return tuple(chain), private


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


def sign_with(key: PrivateKey | UseKey, content: bytes) -> bytes:
    """Return this key's signature: RSA-PSS without salt, deterministic ECDSA or Ed25519. The same content has the same
    one."""
    if isinstance(key, UseKey):
        return key.key.sign(content)
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, UNSALTED, SHA256())
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(content, ec.ECDSA(SHA256(), deterministic_signing=True))
    return key.sign(content)


def verify(key: object, signature: bytes, content: bytes) -> None:
    """Raise InvalidSignature unless this public key signed the content, ValueError where it is of no use."""
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= SHORTEST_RSA:
        key.verify(signature, content, UNSALTED, SHA256())
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, content, ec.ECDSA(SHA256()))
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, content)
    else:
        raise ValueError("the certificate's key is too short or of no known kind")
