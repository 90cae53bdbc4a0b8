"""A small file or message that would expand without limit is rejected with an error message of one line."""

import gzip
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import safetensors.torch
import torch

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError, Refused
from medsilo.core.files import load_facts, load_tensors
from medsilo.runs.messages import MOST_ROUNDS, Request
from medsilo.site.ledger import Ledger
from medsilo.site.policy import Policy
from medsilo.tasks.scans import Scan
from medsilo_lab.consortium.backup import put_back
from medsilo_papers.public_files import arrays_of
from tests.histories import DATA
from tests.unit.medsilo_lab.test_provision import kits_of
from tests.unit.site.test_ledger import filled

DEEP = 200_000
MEMORY = 32 << 20


@contextmanager
def one_line(words: str, kind: type[MedsiloError] = MedsiloError) -> Iterator[None]:
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=words) as caught:
            yield
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------- backups
@pytest.mark.parametrize(
    ("name", "content"),
    [("kit/local/medsilo.yaml", b"- a\n"), ("kit/local/resources.json", b"\xff"), ("kit/medsilo.service", b"\xff")],
)
def test_a_damaged_file_of_a_backup_is_one_line(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kits_of(tmp_path)
    [kit] = [path.parents[1] for path in (tmp_path / "kits").glob("*/startup/fed_server.json")]
    (kit / "local/medsilo.yaml").write_text(f"output: {tmp_path / 'studies'}\n")
    (tmp_path / "studies").mkdir()
    assert main(["kits", "backup", str(kit), "-o", str(tmp_path / "whole.zip")]) == 0
    with ZipFile(tmp_path / "whole.zip") as whole, ZipFile(tmp_path / "other.zip", "w") as other:
        assert name in whole.namelist()
        for one in whole.infolist():
            other.writestr(one, content if one.filename == name else whole.read(one))
    capsys.readouterr()
    assert main(["kits", "restore", str(tmp_path / "other.zip"), "--kit", str(tmp_path / "new")]) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert Path(name).name in told and "Traceback" not in told and not (tmp_path / "new").exists()


def test_facts_of_a_backup_that_become_large(tmp_path: Path) -> None:
    """In an earlier version, reading a backup of 10 MB took 10 GB of memory."""
    with ZipFile(tmp_path / "server.zip", "w", ZIP_DEFLATED) as archive:
        archive.writestr("kit/startup/fed_server.json", "{}")
        with archive.open("backup.json", "w") as facts:
            for _ in range(40):
                facts.write(b" " * (1 << 20))
    assert (tmp_path / "server.zip").stat().st_size < 1 << 17
    with one_line("is no whole backup"):
        put_back(tmp_path / "server.zip", tmp_path / "kit")


# ---------------------------------------------------------------------------------------------------- images
def test_a_deflated_dicom_file_is_never_opened(tmp_path: Path) -> None:
    """In an earlier version, reading a DICOM file of 4.3 MB took 4.4 GB of memory."""
    pytest.importorskip("pydicom")
    from pydicom.dataset import Dataset
    from pydicom.uid import DeflatedExplicitVRLittleEndian as DEFLATED

    from medsilo.tasks.headers import check_dicom
    from medsilo_dicom.header import CT, read_headers
    from tests.dicoms import write_series

    [plain] = write_series(tmp_path, np.zeros((1, 4, 4), np.int16), np.eye(4))
    assert read_headers(plain)
    bomb = Dataset()
    bomb.SOPClassUID, bomb.SOPInstanceUID, bomb.SeriesInstanceUID, bomb.StudyInstanceUID = CT, "1.2.3", "1.2.4", "1.2.5"
    bomb.PixelData = bytes(64 << 20)
    bomb["PixelData"].VR = "OW"
    bomb.ensure_file_meta()
    bomb.file_meta.TransferSyntaxUID = DEFLATED
    path = tmp_path / "bomb.dcm"
    bomb.save_as(path, enforce_file_format=True)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    assert not read_headers(path)
    assert tracemalloc.get_traced_memory()[1] < MEMORY
    tracemalloc.stop()
    with one_line("damaged or no image", DataError):
        check_dicom(path)


def test_an_element_of_a_kind_that_no_library_knows(tmp_path: Path) -> None:
    """pydicom raises NotImplementedError only when a program reads the DICOM element of the unknown type."""
    pytest.importorskip("pydicom")
    from medsilo_dicom.header import read_headers
    from tests.dicoms import write_series

    [path] = write_series(tmp_path, np.zeros((1, 4, 4), np.int16), np.eye(4))
    tag = struct.pack("<HH", 0x0010, 0x0010)
    assert path.read_bytes().count(tag + b"PN") == 1
    path.write_bytes(path.read_bytes().replace(tag + b"PN", tag + b"XX"))
    assert not read_headers(path)


@pytest.mark.parametrize(("kind", "code", "bits"), [("float32", 16, 32), ("uint8", 2, 8)])
def test_a_volume_of_two_megabytes_that_claims_two_gigabytes(tmp_path: Path, kind: str, code: int, bits: int) -> None:
    header = bytearray(352)
    struct.pack_into("<i", header, 0, 348)
    across = 1000 if kind == "float32" else 2000
    struct.pack_into("<8h", header, 40, 3, across, 1000, 600 if kind == "float32" else 1200, 1, 1, 1, 1)
    struct.pack_into("<hh", header, 70, code, bits)
    struct.pack_into("<f", header, 108, 352.0)
    header[344:348] = b"n+1\0"
    path = tmp_path / "bomb.nii.gz"
    path.write_bytes(gzip.compress(bytes(header) + np.random.default_rng(0).bytes(2 << 20)))
    for read in (Scan.read, Scan.of_mask):
        with one_line("claims more values than its file holds", DataError):
            read(path)


def test_a_picture_of_thirty_thousand_squared(tmp_path: Path) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    padding = chunk(b"tEXt", b"Comment\0" + b"x" * (1 << 20))
    data = chunk(b"IDAT", zlib.compress(bytes(30_001 * 100)))
    path = tmp_path / "bomb.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + padding + data + chunk(b"IEND", b""))
    with one_line("claims more values than its file holds", DataError):
        Scan.read(path)


# ---------------------------------------------------------------------------------------------------- other files
@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), ",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 4000,
        b"{'descr': '''",
        b"\0" * 60,
    ],
)
def test_a_damaged_header_of_an_array(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "bad.npz"
    with ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(12))
    with one_line("bad.npz can't be read", DataError):
        arrays_of(path, ["x"])


def test_facts_of_tensors_without_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1)}, path, {"facts": "[" * DEEP})
    for read in (load_tensors, load_facts):
        with one_line("cannot be read"):
            read(path)


def test_a_policy_without_end(tmp_path: Path) -> None:
    (tmp_path / "resources.json").write_text("[" * DEEP)
    with one_line("resources.json cannot be read"):
        Policy.read(tmp_path)


def entry_without_end(ledger: Ledger) -> None:
    lines = ledger.file.read_bytes().splitlines(keepends=True)
    ledger.file.write_bytes(b"".join([*lines[:-1], b'{"content": ' + b"[" * DEEP + b"\n"]))


def head(change: Callable[[dict[str, Any]], object]) -> Callable[[Ledger], None]:
    def write(ledger: Ledger) -> None:
        said = json.loads(ledger.head.read_text())
        change(said)
        ledger.head.write_text(json.dumps(said, indent=1) + "\n")

    return write


@pytest.mark.parametrize(
    "damage",
    [
        entry_without_end,
        lambda ledger: ledger.head.write_text('{"content": ' + "[" * DEEP),
        head(lambda said: said["content"].update(more=float("nan"))),
        head(lambda said: said["content"].update(lines=float("nan"))),
        head(lambda said: said["content"].update(lines=float("inf"))),
        head(lambda said: said["content"].update(lines=-5)),
        head(lambda said: said["content"].update(lines=2**70)),
    ],
)
def test_a_ledger_that_somebody_wrote_in(tmp_path: Path, damage: Callable[[Ledger], None]) -> None:
    damage(filled(tmp_path))
    with one_line("ledger"):
        Ledger(tmp_path, DATA).standing()


# ---------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize("key", ["round", "last", "selected"])
@pytest.mark.parametrize("value", [2**53 + 1, 2**64, 10**4000, MOST_ROUNDS + 1, -1])
def test_a_round_beyond_all_rounds(key: str, value: int) -> None:
    asked = {"task": "round", "round": 1, "study": "s", "plan": "p", "sites": ["a"]}
    assert Request.received(asked).round == 1
    with one_line("input should be (less|greater) than or equal to", Refused):
        Request.received(asked | {key: value})
