"""The identity of a site in a sealed study: its kit's certificate shows whose keys these are."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from medsilo.core.errors import MedsiloError, Refused, reading
from medsilo.site.kit import KitFiles
from medsilo.site.signing import KeyPurpose, PrivateKey, UseKey, claim, read_pair, verify

MOST_CERTIFICATES, LONGEST_CERTIFICATE = 4, 8192  # of a chain, bytes each
LONGEST_SIGNATURE = 1024  # bytes
HOSPITAL = "client"  # NVFlare's word in a subject, or none; people and servers have others ("lead", "server")
PUBLIC, SIGNATURE = 32, 64  # bytes of Ed25519
SEALING: Final = "secure aggregation"
CONNECTION, RELAY = "fed_client.json", "../local/relay__resources.json"  # to whom a kit connects


class Unsigned:
    """No identity: for simulations, whose sites have no certificates. A server in the middle is not noticed."""

    # What the keys of a study rest on, for results.
    basis: ClassVar[str] = "no signature, so a server that swaps them is not noticed (simulation)"
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

    basis: ClassVar[str] = "certificates: each site signed its keys with that of its kit"

    chain: tuple[x509.Certificate, ...]
    key: PrivateKey = field(repr=False)
    root: x509.Certificate
    others: frozenset[str] = frozenset()  # names that are no hospital's: of the server, and of relays

    @classmethod
    def read(cls, certificate: bytes, key: bytes, root: bytes, others: Collection[str] = ()) -> Self:
        """Return the identity that these PEM texts hold; raises MedsiloError."""
        chain, private = read_pair(certificate, key)
        try:
            anchor = x509.load_pem_x509_certificate(root)
        except ValueError as error:
            raise MedsiloError(
                "secure aggregation: the kit's root certificate cannot be read; ask the lead for the kit again",
                private=str(error),
            ) from error
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
        raise Refused(f"{site}: its certificate is not a hospital's, but {', '.join(map(str, roles))}")


def signer_of(files: KitFiles | None) -> Signer:
    """Return what a site signs with; nothing in a simulation, whose sites have no kit."""
    if files is None:
        return Unsigned()
    certificate, key, root = files.read()
    return Certified.read(certificate, key, root, _others(Path(files.certificate).parent))


def _others(startup: Path) -> set[str]:
    """Return the names of the server and of the relays before it: NVFlare writes their certificates like hospitals'."""
    found: set[str] = set()
    with reading("what the kit says of its server and relay"):
        if (startup / CONNECTION).exists():
            told = json.loads((startup / CONNECTION).read_text("utf-8"))
            found |= {server["identity"] for server in told["servers"]}
        if (startup / RELAY).exists():
            found |= {*json.loads((startup / RELAY).read_text("utf-8"))["relay_config"]["fqcn"].split(".")}
    return found


def check_certified(certificate: x509.Certificate, use: KeyPurpose, public: object, certified: bytes) -> None:
    """Raise InvalidSignature unless the key of this certificate certified a public key for a use; ValueError where one
    of them is of no use."""
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise ValueError("no key for one use")
    verify(certificate.public_key(), certified, claim(use, public.public_bytes_raw()))
