"""Orthanc as the other side: an archive that the developers did not write, on real associations, plain and over TLS."""

import datetime
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pydicom
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo_dicom.header import read_tree
from medsilo_dicom.node import AUTHORITY, CERTIFICATE, FOLDER, KEY, Inbox, Node, retrieve, send
from medsilo_dicom.series import make_series, read_again, values_of
from tests.dicoms import write, write_study

ORTHANC = shutil.which("Orthanc")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(ORTHANC is None, reason="needs Debian's package orthanc")]
CAPTURE, PRIVATE = "1.2.840.10008.5.1.4.1.1.7", "1.3.12.2.1107.5.9.1"


@dataclass
class Archive:
    """A running Orthanc."""

    web: str
    port: int

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.web}{path}", data, method=method), timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def fill(self, files: list[Path]) -> None:
        for path in files:
            self.ask("/instances", path.read_bytes())

    def send(self, node: Node, **more: Any) -> Any:
        """Let it send all its studies to a node, as its users do."""
        known = {"AET": node.title, "Host": "127.0.0.1", "Port": node.port, **more}
        self.ask("/modalities/here", known, "PUT")
        return self.ask("/modalities/here/store", {"Resources": self.ask("/studies"), "Synchronous": True})


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(folder: Path, **more: Any) -> Iterator[Archive]:
    folder.mkdir(parents=True)
    web, port = free_port(), free_port()
    settings = {
        **{"Name": "tests", "DicomAet": "ARCHIVE", "HttpPort": web, "DicomPort": port, "RemoteAccessAllowed": False},
        **{"StorageDirectory": str(folder / "kept"), "IndexDirectory": str(folder / "kept"), "Plugins": []},
        **{"DicomAlwaysAllowStore": True, "DicomAlwaysAllowGet": True, "DicomAlwaysAllowFind": True},
        **{"DicomAlwaysAllowMove": True, "AuthenticationEnabled": False, "DicomModalities": {}},
        **{"DicomModalitiesInDatabase": True, **more},
    }
    (folder / "orthanc.json").write_text(json.dumps(settings), "utf-8")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([str(ORTHANC), str(folder / "orthanc.json")], stdout=log, stderr=log)
    try:
        archive = Archive(f"http://127.0.0.1:{web}", port)
        for _ in range(300):
            try:
                archive.ask("/system")
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text("utf-8")
                time.sleep(0.1)
        yield archive
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    yield from started(tmp_path / "archive")


@pytest.fixture
def study(tmp_path: Path) -> list[Path]:
    """A study as archives hold it: slices, a segmentation, a screen shot, and an object of a manufacturer's own."""
    files = [*write_study(tmp_path / "study", "p0", 0), tmp_path / "study/B/mask"]
    shot = pydicom.dcmread(files[0])
    shot.SOPClassUID, shot.Modality, shot.BurnedInAnnotation = CAPTURE, "OT", "YES"
    for number, kind in enumerate((CAPTURE, PRIVATE)):
        shot.SOPClassUID = kind
        shot.SOPInstanceUID, shot.SeriesInstanceUID = (pydicom.uid.generate_uid() for _ in range(2))
        write(shot, tmp_path / f"study/C{number}")
        files.insert(number, tmp_path / f"study/C{number}")
    return files


def check_kept(folder: Path, study: list[Path]) -> None:
    """All that came is the study, value by value, without the screen shot and the manufacturer's object."""
    kept = sorted(folder.rglob("*.dcm"))
    assert len(kept) == len(study) - 2
    ((series, headers),) = read_tree(kept).images.items()
    assert len(read_tree(kept).annotations[series]) == 1
    slices = [path for path in study if path.name.startswith("IM")]
    assert (values_of(make_series(headers)) == values_of(read_again(slices))).all()


def test_a_study_with_a_screen_shot_comes_whole(archive: Archive, study: list[Path], tmp_path: Path) -> None:
    archive.fill(study)
    said: list[str] = []
    with Node(Inbox(tmp_path / "in", 1 << 30, 1 << 26), ["ARCHIVE"], port=0, title="HERE", say=said.append) as node:
        told = archive.send(node)
    assert told["FailedInstancesCount"] == 0
    check_kept(tmp_path / "in", study)
    assert node.passed_over == 2 and node.inbox.refused == 0
    assert len(said) == 1 and "neither CT, MR or PET" in said[0]


def test_studies_of_a_list_are_fetched_by_their_node(
    archive: Archive, study: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    archive.fill([*study, *write_study(tmp_path / "other", "p1", 1)])
    (tmp_path / "list.txt").write_text(f"{pydicom.dcmread(study[0]).StudyInstanceUID}\n", "utf-8")
    common = ["--from", f"ARCHIVE@127.0.0.1:{archive.port}", "--studies", str(tmp_path / "list.txt")]
    assert main(["receive", str(tmp_path / "in"), *common]) == 0, capsys.readouterr().err
    check_kept(tmp_path / "in", study)
    (tmp_path / "list.txt").write_text("1.2.3.4\n", "utf-8")
    assert main(["receive", str(tmp_path / "none"), *common]) == 1


def test_where_a_node_knows_no_c_get_it_is_asked_to_move(
    archive: Archive, study: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.fill(study)
    monkeypatch.setattr("medsilo_dicom.node.GET", "1.2.840.10008.5.1.4.1.2.99.3")  # Orthanc knows no such
    node = Node(Inbox(tmp_path / "in", 1 << 30, 1 << 26), [], port=free_port(), title="HERE")
    archive.ask("/modalities/here", {"AET": "HERE", "Host": "127.0.0.1", "Port": node.port}, "PUT")
    retrieve(f"ARCHIVE@127.0.0.1:{archive.port}", [str(pydicom.dcmread(study[0]).StudyInstanceUID)], node)
    check_kept(tmp_path / "in", study)
    archive.ask("/modalities/here", method="DELETE")
    said: list[str] = []
    node = Node(Inbox(tmp_path / "none", 1 << 30, 1 << 26), [], port=free_port(), title="HERE", say=said.append)
    retrieve(f"ARCHIVE@127.0.0.1:{archive.port}", [str(pydicom.dcmread(study[0]).StudyInstanceUID)], node)
    assert not node.inbox.kept and node.inbox.refused and "is HERE known there?" in said[0]


# ---------------------------------------------------------------------------------------------------- TLS
def authority(folder: Path, *names: str) -> None:
    """Write a folder for each name: its certificate and key, and that of the authority which signed all."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = _certificate("authority", key, "authority", key, True)
    for name in names:
        other = ec.generate_private_key(ec.SECP256R1())
        place = folder / name
        place.mkdir(parents=True)
        (place / AUTHORITY).write_bytes(own.public_bytes(serialization.Encoding.PEM))
        signed = _certificate(name, other, "authority", key, False)
        (place / CERTIFICATE).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.TraditionalOpenSSL
        plain = serialization.NoEncryption()
        (place / KEY).write_bytes(other.private_bytes(serialization.Encoding.PEM, form, plain))


def _certificate(name: str, key: Any, by: str, signer: Any, may_sign: bool) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, by))
    made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    return made.add_extension(x509.BasicConstraints(may_sign, None), True).sign(signer, hashes.SHA256())


def test_both_directions_are_encrypted_and_a_strangers_certificate_is_refused(
    study: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority(tmp_path / "tls", "here", "archive")
    authority(tmp_path / "strangers", "here")
    theirs = tmp_path / "tls/archive"
    secure = {
        **{
            "DicomTlsEnabled": True,
            "DicomTlsCertificate": str(theirs / CERTIFICATE),
            "DicomTlsPrivateKey": str(theirs / KEY),
        },
        **{"DicomTlsTrustedCertificates": str(theirs / AUTHORITY), "DicomTlsRemoteCertificateRequired": True},
    }
    for archive in started(tmp_path / "archive", **secure):
        address = f"ARCHIVE@127.0.0.1:{archive.port}"
        slices = [path for path in study if path.name.startswith("IM")]
        with pytest.raises(MedsiloError, match="does not answer"):
            send(slices, address)  # not encrypted
        monkeypatch.setenv(FOLDER, str(tmp_path / "strangers/here"))
        with pytest.raises(MedsiloError, match="does not answer"):
            send(slices, address)
        with Node(Inbox(tmp_path / "none", 1 << 30, 1 << 26), ["ARCHIVE"], port=0, title="HERE") as node:
            archive.fill(slices[:1])
            with pytest.raises(HTTPError):
                archive.send(node, UseDicomTls=True)
        assert not node.inbox.kept
        monkeypatch.setenv(FOLDER, str(tmp_path / "tls/here"))
        assert send(study[2:], address) == 0  # Orthanc takes no objects of a manufacturer over the network
        with Node(Inbox(tmp_path / "in", 1 << 30, 1 << 26), ["ARCHIVE"], port=0, title="HERE") as node:
            archive.fill(study[:2])
            archive.send(node, UseDicomTls=True)
            with pytest.raises(HTTPError):
                archive.send(node, UseDicomTls=False)
        check_kept(tmp_path / "in", study)
        listed = tmp_path / "one.txt"
        listed.write_text(uid_of(study))
        assert main(["receive", str(tmp_path / "got"), "--from", address, "--studies", str(listed)]) == 0
        check_kept(tmp_path / "got", study)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(MedsiloError, match=FOLDER):
        send(slices, address)


def uid_of(study: list[Path]) -> str:
    return str(pydicom.dcmread(study[0]).StudyInstanceUID)
