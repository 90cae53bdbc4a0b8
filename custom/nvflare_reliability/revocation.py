"""Read and sign the list of revoked certificates (RFC 5280).

The consortium's root authority signs the list, and each startup kit has a copy.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

LOG = logging.getLogger(__name__)
LIST = "revoked.pem"  # name of the list's file in a startup kit
LARGEST = 1 << 20  # maximum bytes of a list of revoked certificates; about 10,000 certificates fit into such a list


def read_list(text: bytes, root: x509.Certificate) -> x509.CertificateRevocationList:
    """Parse the list of revoked certificates in a PEM text, and return the list. Raise ValueError if `root` has not
    signed the list.
    """
    if len(text) > LARGEST:
        raise ValueError(f"the list of revoked certificates has more than {LARGEST >> 20} MiB")
    found = x509.load_pem_x509_crl(text)
    if found.issuer != root.subject or not found.is_signature_valid(root.public_key()):  # type: ignore[arg-type]
        raise ValueError("the consortium's root did not sign the list")
    return found


def number_of(revoked: x509.CertificateRevocationList) -> int:
    """Return the serial number of a list of revoked certificates; a newer list has a larger number."""
    return revoked.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def list_in(kit: Path) -> x509.CertificateRevocationList | None:
    """Return the list of revoked certificates in a startup kit, or None if the kit has no list.

    Raise OSError or ValueError if the list is unreadable.
    """
    try:
        text = (kit / LIST).read_bytes()
    except FileNotFoundError:
        return None
    return read_list(text, x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes()))


def is_newer(text: bytes, kit: Path) -> bool:
    """Return True if a list is newer than the list in a startup kit.

    Raise OSError or ValueError if the given list is invalid, or if the root authority of the kit did not sign the list.
    """
    told = read_list(text, x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes()))
    try:
        before = list_in(kit)
    except ValueError:  # the list in the kit may be damaged
        before = None
    return before is None or number_of(told) > number_of(before)


def signed_list(
    before: x509.CertificateRevocationList | None,
    certificates: list[x509.Certificate],
    root: x509.Certificate,
    sign: Callable[[x509.CertificateRevocationListBuilder], x509.CertificateRevocationList],
) -> x509.CertificateRevocationList:
    """Return a new signed list that contains the certificates of the previous list and the given certificates.

    Args:
        certificates: The certificates that are not in the previous list.
        sign: Signs the list with the root authority's key.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    builder = x509.CertificateRevocationListBuilder(root.subject, now, root.not_valid_after_utc)
    builder = builder.add_extension(x509.CRLNumber(number_of(before) + 1 if before else 1), critical=False)
    known = {one.serial_number: one for one in before or []}
    for certificate in certificates:
        made = x509.RevokedCertificateBuilder(certificate.serial_number, now).build()
        known.setdefault(certificate.serial_number, made)
    for _, one in sorted(known.items()):
        builder = builder.add_revoked_certificate(one)
    return sign(builder)


class Revocations:
    """The certificates that the list in a startup kit revokes.

    The list is read again when its file changes. A list that the root authority has not signed is ignored.
    """

    def __init__(self, root: str | None) -> None:
        self.root = Path(root) if root else None
        self.seen: tuple[int, int] | None = None
        self.serials: frozenset[int] = frozenset()

    def look(self) -> bool:
        """Read the list again if its file has changed, and return True if the new list revokes certificates that the
        old list does not revoke.
        """
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
        """Return True if a certificate is revoked.

        Args:
            certificate: The certificate in DER form.
        """
        if not self.serials or not certificate:
            return False
        return x509.load_der_x509_certificate(certificate).serial_number in self.serials
