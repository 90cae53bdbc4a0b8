"""Sign and verify the keys of secure aggregation with the certificates of the startup kits."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from medsilo.core.errors import MedsiloError, Refused, reading
from medsilo.site.kit import KitFiles
from medsilo.site.signing import KeyPurpose, PrivateKey, UseKey, claim, read_pair, verify
from nvflare_reliability.revocation import LIST, list_in

# maximum number of certificates in a chain, and maximum bytes of one certificate
MOST_CERTIFICATES, LONGEST_CERTIFICATE = 4, 8192
LONGEST_SIGNATURE = 1024
# NVFlare's name for the role of a hospital in a certificate. A hospital's certificate may have no role; users and
# servers have other roles ("lead", "server").
HOSPITAL = "client"
PUBLIC, SIGNATURE = 32, 64  # bytes of an Ed25519 key and signature
SEALING: Final = "secure aggregation"
# files in a startup kit that name the server and the relays
CONNECTION, RELAY = "fed_client.json", "../local/relay__resources.json"


class Unsigned:
    """A signer for simulations, which creates no signatures because simulated sites have no certificates. Without
    signatures, nobody notices if the server replaces keys.
    """

    # the reason why the keys of a study can be trusted, as a text for summary.json
    basis: ClassVar[str] = "no signature, so a server that swaps them is not noticed (simulation)"
    certificates: tuple[bytes, ...] = ()

    def sign(self, content: bytes) -> bytes:
        return b""

    def check(self, site: str, certificates: Sequence[bytes], signature: bytes, content: bytes) -> None:
        """Raise Refused if a site signs its keys, because a simulation has no sites with certificates."""
        if certificates or signature:
            raise Refused(f"{site}: its keys are signed, and this site has no root certificate to check them with")


@dataclass(frozen=True)
class Certified:
    """Signs keys with the certificate and private key of a site's startup kit, and verifies other sites' signatures.

    The startup kit's key (RSA, elliptic curve or Ed25519) certifies an Ed25519 signing key that is only used for secure
    aggregation. A signature contains the public signing key, the signature itself, and the startup kit's certification
    of the signing key.
    """

    basis: ClassVar[str] = "certificates: each site signed its keys with that of its kit"

    chain: tuple[x509.Certificate, ...]
    key: PrivateKey = field(repr=False)
    root: x509.Certificate
    others: frozenset[str] = frozenset()  # names of the server and of relays, which are not hospitals
    kit: Path | None = None  # folder of the startup kit, which may contain a list of revoked certificates

    @classmethod
    def read(
        cls, certificate: bytes, key: bytes, root: bytes, others: Collection[str] = (), kit: Path | None = None
    ) -> Self:
        """Parse the PEM texts of a site's identity; raise MedsiloError if the texts are invalid.

        Args:
            others: The names of the server and of the relays.
        """
        chain, private = read_pair(certificate, key)
        try:
            anchor = x509.load_pem_x509_certificate(root)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise MedsiloError(
                "secure aggregation: the kit's root certificate cannot be read; ask the lead for the kit again",
                private=str(error),
            ) from error
        return cls(tuple(each for each in chain if each != anchor), private, anchor, frozenset(others), kit)

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """The chain of certificates in DER form, from the site's certificate up to the root certificate, which is left
        out.
        """
        return tuple(certificate.public_bytes(Encoding.DER) for certificate in self.chain)

    def sign(self, content: bytes) -> bytes:
        own = UseKey.of(self.key, SEALING)
        return own.key.public_key().public_bytes_raw() + own.key.sign(content) + own.certified

    def check(self, site: str, certificates: Sequence[bytes], signature: bytes, content: bytes) -> None:
        """Raise Refused unless the site signed the content, and the root certifies the site's name and key."""
        if site in self.others:
            raise Refused(f"{site}: it is the server or a relay, and not a hospital")
        if not certificates:
            raise Refused(f"{site}: its keys are not signed, and this study's sites have certificates")
        try:
            chain = [x509.load_der_x509_certificate(each) for each in certificates]
            _check_chain(site, chain, self.root, datetime.now(UTC))
            self._check_revoked(site, chain[0])
            public = ed25519.Ed25519PublicKey.from_public_bytes(signature[:PUBLIC])
            check_certified(chain[0], SEALING, public, signature[PUBLIC + SIGNATURE :])
            public.verify(signature[PUBLIC : PUBLIC + SIGNATURE], content)
        except InvalidSignature as error:
            raise Refused(
                f"{site}: the signature on its keys is not its certificate's: somebody may have swapped the keys"
            ) from error
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
            raise Refused(
                f"{site}: its certificate is not of the consortium's root ({type(error).__name__})", private=str(error)
            ) from error

    def _check_revoked(self, site: str, certificate: x509.Certificate) -> None:
        try:
            revoked = list_in(self.kit) if self.kit else None
        except (OSError, ValueError) as error:
            raise Refused(f"this site's {LIST} cannot be read; copy the lead's list into the kit") from error
        if revoked and revoked.get_revoked_certificate_by_serial_number(certificate.serial_number):
            raise Refused(f"{site}: the consortium revoked its certificate")


Signer = Unsigned | Certified


def _check_chain(site: str, chain: Sequence[x509.Certificate], root: x509.Certificate, now: datetime) -> None:
    """Raise an error unless the certificates form a valid chain up to the root, and the first certificate names the
    site.
    """
    issuers = [*chain[1:], root]
    for own, issuer in zip(chain, issuers, strict=True):
        own.verify_directly_issued_by(issuer)
        if not issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise Refused(f"{site}: its certificate is signed with a certificate that may not sign others")
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
        raise Refused(f"{site}: its certificate belongs to {', '.join(map(str, names)) or 'nobody'}")
    if roles not in ([], [HOSPITAL]):
        raise Refused(f"{site}: its certificate is not a hospital's, but {', '.join(map(str, roles))}")


def signer_of(files: KitFiles | None) -> Signer:
    if files is None:
        return Unsigned()
    certificate, key, root = files.read()
    startup = Path(files.certificate).parent
    return Certified.read(certificate, key, root, _others(startup), startup.parent)


def _others(startup: Path) -> set[str]:
    """Return the names of the server and the relays in a startup kit. NVFlare gives the server and the relays the same
    kind of certificate as a hospital.
    """
    found: set[str] = set()
    with reading("what the kit says of its server and relay"):
        if (startup / CONNECTION).exists():
            told = json.loads((startup / CONNECTION).read_text("utf-8"))
            found |= {server["identity"] for server in told["servers"]}
        if (startup / RELAY).exists():
            found |= {*json.loads((startup / RELAY).read_text("utf-8"))["relay_config"]["fqcn"].split(".")}
    return found


def check_certified(certificate: x509.Certificate, use: KeyPurpose, public: object, certified: bytes) -> None:
    """Raise InvalidSignature unless the certificate's key certified the public key for the given use; raise ValueError
    if the certificate's key is unsuitable.
    """
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise ValueError("the signing key has a wrong type")
    verify(certificate.public_key(), certified, claim(use, public.public_bytes_raw()))
