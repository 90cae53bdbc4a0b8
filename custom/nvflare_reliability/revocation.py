"""Read and sign the list of revoked certificates (RFC 5280). The consortium's root signs it, and each startup kit has a
copy.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

LOG = logging.getLogger(__name__)
LIST = "revoked.pem"  # name of the file in a startup kit
LARGEST = 1 << 20  # maximum bytes of a list, enough for some 10,000 certificates


def read_list(text: bytes, root: x509.Certificate) -> x509.CertificateRevocationList:
    """Parse a list of revoked certificates in PEM form; raise ValueError unless this root signed it."""
    if len(text) > LARGEST:
        raise ValueError(f"the list of revoked certificates has more than {LARGEST >> 20} MiB")
    found = x509.load_pem_x509_crl(text)
    if found.issuer != root.subject or not found.is_signature_valid(root.public_key()):  # type: ignore[arg-type]
        raise ValueError("the consortium's root did not sign it")
    return found


def number_of(revoked: x509.CertificateRevocationList) -> int:
    """Return the serial number of a list. A later list has a greater number."""
    return revoked.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def list_in(kit: Path) -> x509.CertificateRevocationList | None:
    """Return the list of revoked certificates in a startup kit, or None. Raises OSError or ValueError if it is
    unreadable.
    """
    try:
        text = (kit / LIST).read_bytes()
    except FileNotFoundError:
        return None
    return read_list(text, x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes()))


def is_newer(text: bytes, kit: Path) -> bool:
    """True if a list is signed by the kit's root and newer than the kit's list. Raises OSError or ValueError."""
    told = read_list(text, x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes()))
    try:
        before = list_in(kit)
    except ValueError:  # The kit's file is damaged.
        before = None
    return before is None or number_of(told) > number_of(before)


def signed_list(
    before: x509.CertificateRevocationList | None,
    certificates: list[x509.Certificate],
    root: x509.Certificate,
    sign: Callable[[x509.CertificateRevocationListBuilder], x509.CertificateRevocationList],
) -> x509.CertificateRevocationList:
    """Return a new list that adds certificates to the previous list.

    Args:
        before: The previous list, if there is one.
        certificates: The certificates to revoke.
        root: The consortium's root certificate.
        sign: A function that signs the list with the root's key.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    builder = x509.CertificateRevocationListBuilder(root.subject, now, root.not_valid_after_utc)
    builder = builder.add_extension(x509.CRLNumber(number_of(before) + 1 if before else 1), critical=False)
    known = {one.serial_number: one for one in before or []}
    for own in certificates:
        made = x509.RevokedCertificateBuilder(own.serial_number, now).build()
        known.setdefault(own.serial_number, made)
    for _, one in sorted(known.items()):
        builder = builder.add_revoked_certificate(one)
    return sign(builder)


class Revocations:
    """The revoked certificates of a startup kit, read again when the file changes. A list without the root's signature
    is ignored.
    """

    def __init__(self, root: str | None) -> None:
        self.root = Path(root) if root else None  # path of the kit's startup/rootCA.pem
        self.seen: tuple[int, int] | None = None
        self.serials: frozenset[int] = frozenset()

    def look(self) -> bool:
        """Read the list again; return True if more certificates are revoked than at the last call."""
        if not self.root:
            return False
        kit = self.root.parent.parent
        try:
            state = (kit / LIST).stat()
            if (seen := (state.st_mtime_ns, state.st_ino)) == self.seen:
                return False
            self.seen = seen
            serials = frozenset(one.serial_number for one in list_in(kit) or [])
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            LOG.error("%s counts for nothing, put the lead's list in its place: %s", kit / LIST, error)
            return False
        more, self.serials = serials - self.serials, self.serials | serials
        return bool(more)

    def holds(self, certificate: bytes | None) -> bool:
        """True if a certificate in DER form is revoked."""
        if not self.serials or not certificate:
            return False
        return x509.load_der_x509_certificate(certificate).serial_number in self.serials
