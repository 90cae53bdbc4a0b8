"""Objects that come over the network: over real associations, and none that should not."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pydicom
import pytest
from pydicom.uid import generate_uid
from pynetdicom import AE

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError
from medsilo_dicom.header import CT, read_tree
from medsilo_dicom.node import DISCARDED, FULL, TAKEN, WRONG, Inbox, Node, is_uid, send
from medsilo_dicom.series import make_series
from tests.dicoms import write_study

CAPTURE, PRIVATE = "1.2.840.10008.5.1.4.1.1.7", "1.3.12.2.1107.5.9.1"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a study: slices, and their segmentation."""
    folder = tmp_path_factory.mktemp("study")
    return [*write_study(folder, "p0", 0), folder / "B/mask"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(Inbox(tmp_path / "in", 1 << 30, 1 << 20), ["MEDSILO"], port=0, title="HERE") as node:
        yield node


def files_in(node: Node) -> list[Path]:
    return sorted(path for path in node.inbox.folder.rglob("*") if path.is_file())


def associated(node: Node, own: str = "MEDSILO", called: str = "HERE"):
    sender = AE(ae_title=own)
    sender.acse_timeout = sender.dimse_timeout = sender.network_timeout = 60
    for kind in ("1.2.840.10008.1.1", CT):
        sender.add_requested_context(kind)
    return sender.associate("127.0.0.1", node.port, ae_title=called)


def test_a_study_that_was_sent_is_a_case(study: list[Path], node: Node) -> None:
    assert send(study, f"HERE@127.0.0.1:{node.port}") == 0
    assert send(study[:1], f"HERE@127.0.0.1:{node.port}") == 0  # again: it is there already
    kept = files_in(node)
    assert len(kept) == len(study) and all(path.stat().st_mode & 0o77 == 0 for path in kept)
    uid = pydicom.dcmread(study[0]).StudyInstanceUID
    assert not any(uid in str(path) for path in kept)
    tree = read_tree(kept)
    ((series, headers),) = tree.images.items()
    assert len(make_series(headers).slices) == len(study) - 1 and len(tree.annotations[series]) == 1


def test_only_those_who_are_allowed_may_send(node: Node) -> None:
    for own, called in (("OTHER", "HERE"), ("MEDSILO", "THERE")):
        assert not associated(node, own, called).is_established
    association = associated(node)
    assert association.send_c_echo().Status == TAKEN
    association.release()
    with pytest.raises(MedsiloError, match="--allow"):
        Node(node.inbox, []).__enter__()
    assert node.address == "127.0.0.1"


def test_an_object_that_can_not_be_kept_is_refused_and_ends_nothing(study: list[Path], node: Node) -> None:
    association = associated(node)
    bad = pydicom.dcmread(study[0])
    bad.StudyInstanceUID = "../../etc"
    assert association.send_c_store(bad).Status == WRONG
    changed = pydicom.dcmread(study[0])
    assert association.send_c_store(changed).Status == TAKEN
    changed.PatientID = "another"
    assert association.send_c_store(changed).Status == WRONG  # the first one stays
    node.inbox.quota = 0
    assert association.send_c_store(pydicom.dcmread(study[1])).Status == FULL
    node.inbox.quota = 1 << 30
    assert association.send_c_store(pydicom.dcmread(study[2])).Status == TAKEN
    association.release()
    assert len(files_in(node)) == 2 and node.inbox.refused == 3


def test_what_training_can_not_use_is_passed_over_and_the_rest_comes(study: list[Path], node: Node) -> None:
    said: list[str] = []
    node.say = said.append
    sender = AE(ae_title="MEDSILO")
    for kind in (CAPTURE, PRIVATE, "1.2.840.10008.5.1.4.1.2.2.1", CT):
        sender.add_requested_context(kind)
    association = sender.associate("127.0.0.1", node.port, ae_title="HERE")
    accepted = {str(context.abstract_syntax) for context in association.accepted_contexts}
    assert accepted == {CAPTURE, PRIVATE, CT}  # and no question may be asked
    for kind in (CAPTURE, PRIVATE) * 2:
        other = pydicom.dcmread(study[0])
        other.SOPClassUID = kind
        assert association.send_c_store(other).Status == DISCARDED
    assert association.send_c_store(pydicom.dcmread(study[0])).Status == TAKEN
    for number in range(3):
        bad = pydicom.dcmread(study[0])
        bad.StudyInstanceUID = f"../{number}"
        assert association.send_c_store(bad).Status == WRONG
    association.release()
    assert len(files_in(node)) == 1 and node.passed_over == 4 and node.inbox.refused == 3
    assert len(said) == 2 and "neither CT" in said[0] and "a UID that is none" in said[1]


def test_studies_that_were_not_asked_for_are_refused(study: list[Path], tmp_path: Path) -> None:
    own = str(pydicom.dcmread(study[0]).StudyInstanceUID)
    Inbox(tmp_path, 1 << 20, 1 << 16, frozenset([own])).keep(study[0].read_bytes())
    inbox = Inbox(tmp_path, 1 << 20, 1 << 16, frozenset([f"{own}.1"]))
    with pytest.raises(DataError, match="not asked for"):
        inbox.keep(study[1].read_bytes())
    assert inbox.refused == 1 and len(list(tmp_path.rglob("*.dcm"))) == 1


def test_a_sender_without_end_is_cut_off(study: list[Path], node: Node) -> None:
    large = pydicom.dcmread(study[0])
    large.PixelData = bytes(8 << 20)
    association = associated(node)
    answer = association.send_c_store(large)
    assert "Status" not in answer or answer.Status != TAKEN
    assert node.inbox.refused == 1 and not files_in(node)
    association.abort()
    assert send(study[:1], f"HERE@127.0.0.1:{node.port}") == 0  # others are not hindered


def test_names_are_made_of_hashes_of_uids(study: list[Path], tmp_path: Path) -> None:
    for good in ("1.2.840.10008.1.1", "2.25.0", "0.1"):
        assert is_uid(good)
    for bad in ("", "1", "1..2", "1.02", "3.1", "1.2/3", "1.2\n", "1." + "1" * 64, "../1.2"):
        assert not is_uid(bad)
    inbox = Inbox(tmp_path, 1 << 20, 1 << 16)
    content = study[0].read_bytes()
    assert inbox.keep(content) == inbox.keep(content)
    for wrong in (b"", b"no DICOM", content[:-50], content[:300]):
        with pytest.raises(DataError):
            inbox.keep(wrong)
    with pytest.raises(DataError, match="--largest"):
        inbox.keep(content + bytes(1 << 16))
    other = pydicom.dcmread(study[0])
    other.SOPClassUID = CAPTURE
    with pytest.raises(DataError, match="neither"):
        inbox.keep(in_bytes(other))
    other.SOPClassUID, other.SOPInstanceUID = CT, generate_uid()
    again = Inbox(tmp_path, len(content) + 100, 1 << 16)  # knows what is there
    with pytest.raises(DataError, match="--quota"):
        again.keep(in_bytes(other))


def in_bytes(elements: pydicom.Dataset) -> bytes:
    content = BytesIO()
    elements.save_as(content)
    return content.getvalue()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "https://host/dicom-web", "--studies", "list.txt"], "is no DICOM node"),
        (["--from", "ARCHIVE@127.0.0.1:9", "--studies", "odd.txt"], "no StudyInstanceUID"),
        (["--from", "ARCHIVE@127.0.0.1:9", "--studies", "list.txt"], "does not answer"),
        (["--from", "ARCHIVE@127.0.0.1:9", "--studies", "no-list"], "no list of studies"),
        (["--from", "ARCHIVE@127.0.0.1:9"], "--studies"),
        (["--studies", "list.txt"], "--studies needs --from"),
        ([], "--allow"),
    ],
)
def test_what_makes_no_sense_is_said(options: list[str], words: str, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "list.txt").write_text("1.2.3")
    (tmp_path / "odd.txt").write_text("../x")
    monkeypatch.chdir(tmp_path)
    assert main(["receive", str(tmp_path / "in"), *options]) == 1
    assert words in capsys.readouterr().err
