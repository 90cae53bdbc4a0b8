"""Test the lead's lists of revoked certificates, and the rejection of forged lists and of earlier lists."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from medsilo import cli
from medsilo.core.errors import Refused
from medsilo.flare.kit_events import revoked_in, take_revoked
from medsilo.flare.workspace import kit_in
from medsilo.runs.event_reading import read
from medsilo_secagg.identity import signer_of
from nvflare_reliability.revocation import LIST, Revocations
from tests.unit.medsilo_lab.test_provision import certificate, kits_of

A, B = "st-anna", "north"


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    kits_of(tmp_path)
    return tmp_path / "kits"


def revoke(kits: Path, *names: str) -> str:
    assert cli.main(["kits", "revoke", *names, "--kits", str(kits)]) == 0
    return (kits / LIST).read_text()


def forged(kits: Path, kit: Path) -> str:
    """Return a list that revokes all certificates, without a signature by the root's key."""
    root, now = x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes()), datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder(root.subject, now, now + timedelta(days=9))
    builder = builder.add_extension(x509.CRLNumber(99), critical=False)
    for path in kits.glob("*/startup/*.crt"):
        serial = x509.load_pem_x509_certificate(path.read_bytes()).serial_number
        builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(serial, now).build())
    own = builder.sign(rsa.generate_private_key(65537, 2048), SHA256())
    return own.public_bytes(Encoding.PEM).decode()


def holds(kit: Path, own: x509.Certificate) -> bool:
    listener = Revocations(str(kit / "startup/rootCA.pem"))
    listener.look()
    return listener.holds(own.public_bytes(Encoding.DER))


def test_keys_of_every_certificate_that_a_lost_kit_ever_had_are_refused(kits: Path) -> None:
    """A renewed certificate has the key of the earlier certificate, so a thief could show either certificate.

    After the revocation, the server accepts a certificate with a new key.
    """
    first = certificate(kits / A)
    kits_of(kits.parent, renew=(A,))
    second = certificate(kits / A)
    assert first.serial_number != second.serial_number and first.public_key() == second.public_key()
    stolen = shutil.copytree(kits / A, kits.parent / "stolen")
    take_revoked(kits / B, revoke(kits, A))
    kits_of(kits.parent, renew=(A,), new_key=True)

    assert holds(kits / B, first) and holds(kits / B, second)
    assert not holds(kits / B, certificate(kits / A)) and not holds(kits / B, certificate(kits / B))
    thief, honest, judge = (signer_of(kit_in(kit / "startup")) for kit in (stolen, kits / A, kits / B))
    judge.check(A, honest.certificates, honest.sign(b"keys"), b"keys")
    with pytest.raises(Refused, match=rf"{A}: the consortium revoked its certificate"):
        judge.check(A, thief.certificates, thief.sign(b"keys"), b"keys")


def test_a_hospital_takes_later_lists_of_its_root_alone(kits: Path, tmp_path: Path) -> None:
    both = kits / B
    earlier, later = revoke(kits, A), revoke(kits, "lead@clinic.org")
    take_revoked(both, later)
    # each list contains all entries of the previous list
    assert revoked_in(both) == later and holds(both, certificate(kits / A))
    (tmp_path / "other").mkdir()
    kits_of(tmp_path / "other")
    for text in (earlier, forged(kits, both), revoke(tmp_path / "other/kits", A), "no list", 7, None, "x" * (2 << 20)):
        take_revoked(both, text)
        assert revoked_in(both) == later
    assert not holds(both, certificate(both))
    assert len([line for line in read(both, "") if "revoked 2 certificates" in line]) == 1


def test_a_damaged_list_lets_in_nobody_who_was_out(kits: Path) -> None:
    take_revoked(kits / B, text := revoke(kits, A))
    listener = Revocations(str(kits / B / "startup/rootCA.pem"))
    assert listener.look() and not listener.look()
    for damaged in ("", text[:200], forged(kits, kits / B)):
        (kits / B / LIST).write_text(damaged)
        assert not listener.look() and listener.holds(certificate(kits / A).public_bytes(Encoding.DER))
    honest, judge = (signer_of(kit_in(kits / own / "startup")) for own in (A, B))
    # without a readable list, the kit does not know the revoked keys
    with pytest.raises(Refused, match=f"{LIST} cannot be read"):
        judge.check(A, honest.certificates, honest.sign(b"keys"), b"keys")
    take_revoked(kits / B, text)
    assert revoked_in(kits / B) == text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "called 'nobody'"),
        ("../st-anna", "called '../st-anna'"),
        # an entry for the server would have no effect, because hospitals do not check the server's certificate by the
        # list
        ("localhost", "is the server"),
    ],
)
def test_a_name_that_can_t_be_revoked_is_refused_in_one_line(
    name: str, said: str, kits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kits", "revoke", name, "--kits", str(kits)]) == 1
    assert said in capsys.readouterr().err and not (kits / LIST).exists()
    assert cli.main(["kits", "revoke", A, "--kits", str(kits / A)]) == 1
    assert "private-root" in capsys.readouterr().err
