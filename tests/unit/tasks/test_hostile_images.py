"""For a hostile image, the reader follows no path in a header, allocates no memory by a claimed size, and reads the
next image.
"""

import csv
import gzip
import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import SimpleITK

from medsilo.cli import main
from medsilo.core.errors import DataError
from medsilo.tasks.headers import check_dicom
from medsilo.tasks.image_formats import FORMATS, PNG
from medsilo.tasks.scans import Scan
from medsilo_lab.deploy.image_files import find_images
from medsilo_lab.start.folder_layout import layout_of_folder
from tests.hospital import Volume, write_volume
from tests.unit.deploy.test_predict import drawn, oblique, small_plan, write_run

SECRET = b"root:x:0:0 " * 20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", small_plan(), "global/best.safetensors")
    return tmp_path / "run"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Write a file with enough bytes for 4 x 4 x 4 values, which a hostile image's header names as its data."""
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "secret"


def good(path: Path) -> None:
    write_volume(path, Volume(drawn((4, 32, 32)), oblique((0.6, 0.6, 3.0))))


def nifti(path: Path, **fields: bytes) -> None:
    good(path)
    content = bytearray(path.read_bytes())
    for place, value in fields.items():
        offset = int(place.removeprefix("at_"))
        content[offset : offset + len(value)] = value
    path.write_bytes(content)


def not_readable_by_nibabel(path: Path) -> None:
    nifti(path, at_70=struct.pack("<h", 9999))  # nibabel raises HeaderDataError for an unknown data type


def offset_that_overflows(path: Path) -> None:
    nifti(path, at_108=struct.pack("<f", float("inf")))


BROKEN = [not_readable_by_nibabel, offset_that_overflows]


# ---------------------------------------------------------------------------------------------------- H6
def test_a_table_is_written_where_no_image_could_be_answered(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "scan.nii").write_text("no image")
    assert main(["predict", str(run), str(tmp_path / "scan.nii"), "-o", str(tmp_path / "out")]) == 1
    (row,) = csv.DictReader((tmp_path / "out/predictions.csv").open())
    assert row["image"] == "scan.nii" and "damaged or no image" in row["error"]
    assert row["experts"] == row["mask"] == row["confidence"] == ""
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "1 of the images failed" in told


# ---------------------------------------------------------------------------------------------------- M1
@pytest.mark.parametrize("spoil", BROKEN)
def test_a_library_s_own_error_stops_no_other_image(spoil, run: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    spoil(images / "1.nii")
    good(images / "2.nii")
    assert main(["predict", str(run), str(images), "-o", str(tmp_path / "out")]) == 1
    first, second = json.loads((tmp_path / "out/predictions.json").read_text())["cases"]
    assert "damaged or no image" in first["error"]
    assert second["error"] is None and second["mask"] == "2_mask.nii"


@pytest.mark.parametrize("spoil", BROKEN)
def test_a_broken_mask_is_an_error_of_ours(spoil, tmp_path: Path) -> None:
    spoil(tmp_path / "mask.nii")
    with pytest.raises(DataError, match="a mask can't be read"):
        Scan.of_mask(tmp_path / "mask.nii")


# ---------------------------------------------------------------------------------------------------- M2
META = "ObjectType = Image\nNDims = 3\nBinaryData = True\nDimSize = 4 4 4\n{more}ElementType = MET_UCHAR\n"
NRRD = "NRRD0004\ntype: uchar\ndimension: 3\nsizes: 4 4 4\nencoding: raw\n{data}\n"
NAMING = [
    ("a.mha", META + "ElementDataFile = {secret}\n"),
    ("a.mhd", META + "ElementDataFile = {secret}\n"),
    ("a.mha", META + "ElementDataFile: {secret}\n"),
    ("a.mha", META + "ElementDataFile = ../secret\n"),
    ("a.mha", META + "ElementDataFile = beside.raw\n"),
    ("a.mhd", META + "ElementDataFile = link.raw\n"),
    ("a.mhd", META + "ElementDataFile = LIST\n{secret}\n{secret}\n{secret}\n{secret}\n"),
    ("a.mhd", META + "ElementDataFile = LIST 2D\n{secret}\n"),
    ("a.mhd", META + "ElementDataFile = ../secret%d 1 4 1\n"),
    ("a.mha", META + "Comment = x ElementDataFile = LOCAL\nElementDataFile = {secret}\n"),
    ("a.mha", META + "Comment = \rElementDataFile = {secret}\r\n"),
    ("a.nrrd", NRRD.replace("{data}", "data file: {secret}\n")),
    ("a.nhdr", NRRD.replace("{data}", "data file: {secret}\n")),
    ("a.nhdr", NRRD.replace("{data}", "datafile: ../secret\n")),
    ("a.nrrd", NRRD.replace("{data}", "Data File: {secret}\n")),
    ("a.nrrd", NRRD.replace("{data}", "data file: LIST\n{secret}\n")),
    ("a.nhdr", NRRD.replace("{data}", "data file: beside.raw\n")),
    ("a.nrrd", NRRD.replace("{data}", "\rdata file: {secret}")),
]


@pytest.mark.parametrize(("name", "text"), NAMING, ids=range(len(NAMING)))
def test_a_header_that_names_another_file_is_not_followed(name, text, secret: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "beside.raw").write_bytes(SECRET)
    (folder / "link.raw").symlink_to(secret)
    (folder / name).write_text(text.format(secret=secret, more=""))
    with pytest.raises(DataError, match="names another file"):
        Scan.read(folder / name)


@pytest.mark.parametrize("axes", ["-13", "0", "11", "3\nNDims = 12", "3\n NDims: -2", "3e9", "999999999999", ""])
def test_a_number_of_axes_for_which_the_library_has_no_room_is_refused_before_it(axes: str, tmp_path: Path) -> None:
    """With an unchecked header, SimpleITK would write beyond its memory and crash the process."""
    told = META.format(more="").replace("NDims = 3", f"NDims = {axes}")
    (tmp_path / "a.mha").write_bytes(f"{told}ElementDataFile = LOCAL\n".encode() + bytes(64))
    with pytest.raises(DataError, match="damaged"):
        Scan.read(tmp_path / "a.mha")


@pytest.mark.parametrize("name", ["a.hdf5", "a.vtk", "a.spr", "a.mnc", "a.gipl", "a.lsm", "a.mrc"])
def test_other_kinds_of_files_are_not_opened(name, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(600))
    with pytest.raises(DataError, match="no image"):
        Scan.read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.mha", "a.mhd", "a.nrrd"])
@pytest.mark.parametrize("packed", [False, True])
def test_values_in_the_file_and_an_mhd_s_beside_it_are_read(name, packed, tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(tmp_path / name), packed)
    assert np.array_equal(Scan.read(tmp_path / name).values[0], values)


# ---------------------------------------------------------------------------------------------------- DICOM
def dicom(path: Path, packed: bool = False, first: int = 0) -> bytes:
    """Write a DICOM file of 5 x 6 pixels, or a compressed file of three larger frames, because the compressor has a
    minimum size.
    """
    shape = (3, 16, 16) if packed else (1, 5, 6)
    image = SimpleITK.GetImageFromArray(np.arange(first, first + math.prod(shape), dtype=np.uint16).reshape(shape))
    SimpleITK.WriteImage(image, str(path), packed)
    return path.read_bytes()


def test_a_dicom_element_that_claims_gigabytes_is_refused_before_they_are_taken(tmp_path: Path) -> None:
    """With an unchecked header, GDCM would allocate the claimed memory and never free it."""
    whole = dicom(tmp_path / "a.dcm")
    assert Scan.read(tmp_path / "a.dcm").values.size == 30
    # in implicit VR, an element's length follows directly after the element's tag
    place = whole.rindex(struct.pack("<HH", 0x7FE0, 0x0010)) + 4
    (tmp_path / "a.dcm").write_bytes(whole[:place] + struct.pack("<I", 3_000_000_000) + whole[place + 4 :])
    with pytest.raises(DataError, match="damaged") as caught:
        Scan.read(tmp_path / "a.dcm")
    assert "claims 3000000000 bytes" in caught.value.private
    with pytest.raises(DataError, match="damaged"):
        Scan.read(tmp_path)


def test_sequences_and_both_ways_of_writing_are_walked_through(tmp_path: Path) -> None:
    meta = struct.pack("<HH2sH", 2, 0x10, b"UI", 18) + b"1.2.840.10008.1.2\0"
    item = struct.pack("<HHI", 0xFFFE, 0xE000, 8) + struct.pack("<HHI", 8, 0x60, 0)
    sequence = struct.pack("<HHI", 8, 0x1140, 0xFFFFFFFF) + item + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    lying = sequence.replace(struct.pack("<HHI", 8, 0x60, 0), struct.pack("<HHI", 8, 0x60, 2**31))
    explicit = meta[:6] + struct.pack("<H", 20) + b"1.2.840.10008.1.2.1\0"
    # The items of a sequence of unknown VR are in implicit VR, and later elements are in explicit VR again.
    head, after = (
        struct.pack("<HH2sHI", 9, 0x1010, b"UN", 0, 0xFFFFFFFF),
        struct.pack("<HH2sH4s", 8, 0x60, b"CS", 4, b"MR  "),
    )
    unknown, false = head + sequence[8:] + after, head + lying[8:] + after
    beyond = unknown[:-6] + struct.pack("<H", 999) + unknown[-4:]
    for opening, data, well in (
        *((meta, sequence, True), (meta, lying, False)),
        *((explicit, unknown, True), (explicit, false, False), (explicit, beyond, False)),
    ):
        (tmp_path / "x.dcm").write_bytes(bytes(128) + b"DICM" + opening + data)
        if well:
            check_dicom(tmp_path / "x.dcm")
        else:
            with pytest.raises(DataError):
                check_dicom(tmp_path / "x.dcm")


# ---------------------------------------------------------------------------------------------------- all formats
def write_scan(path: Path, packed: bool = False, first: int = 0) -> None:
    """Write a volume of 3 x 4 x 5 values with SimpleITK."""
    values = np.arange(first, first + 60, dtype=np.int16).reshape(3, 4, 5)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(path), packed)


def write_picture(path: Path, packed: bool = False, first: int = 0) -> None:
    """Write a flat image of 24 x 20 grey pixels with SimpleITK."""
    pixels = np.arange(first, first + 480).astype(np.uint8).reshape(24, 20) // 2
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(pixels), str(path), packed)


def huge_png() -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(30_001))
    parts = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (head, data))
    return PNG + b"".join(parts)


# For each format, a function that writes a small file with a given path.
SAMPLES = {one.name: write_scan if one.volumes else write_picture for one in FORMATS} | {"DICOM": dicom}
# For each format, bytes of a small file, and the bytes that replace them so that the header claims a huge image. If the
# bytes are empty, the replacement is the whole file.
CLAIMS = {
    "NIfTI": {struct.pack("<3h", 5, 4, 3): struct.pack("<3h", 30000, 30000, 4000)},
    "MHA": {b"DimSize = 5 4 3": b"DimSize = 30000 30000 4000"},
    "NRRD": {b"sizes: 5 4 3": b"sizes: 30000 30000 4000"},
    "DICOM": {
        struct.pack("<HHIH", 0x28, element, 2, size): struct.pack("<HHIH", 0x28, element, 2, 65535)
        for element, size in ((0x10, 5), (0x11, 6))
    },
    "PNG": {b"": huge_png()},
    "JPEG": {struct.pack(">BHH", 8, 24, 20): struct.pack(">BHH", 8, 65500, 65500)},
    "TIFF": {
        struct.pack("<HHIH", tag, kind, 1, size): struct.pack("<HHIH", tag, kind, 1, 65500)
        for kind in (3, 4)
        for tag, size in ((256, 20), (257, 24))
    },
    "BMP": {struct.pack("<ii", 20, 24): struct.pack("<ii", 65500, 65500)},
}
FILES = [(one.name, f"a{suffix}") for one in FORMATS for suffix in one.suffixes or (".dcm",)]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_file_in_any_format_is_found_and_read(kind: str, name: str, tmp_path: Path) -> None:
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
        SAMPLES[kind](tmp_path / part / name)
    folder = tmp_path / "images"
    assert find_images([folder]) == [folder if kind == "DICOM" else folder / name]
    layout, suffix = layout_of_folder(tmp_path), name.removeprefix("a")
    assert (layout.images, layout.labels) == ((f"images/*{suffix}",), f"labels/*{suffix}")
    values = Scan.read(folder / name).values
    assert values.max() > values.min()


# Every format that SimpleITK writes, for volumes and for flat images, compressed and uncompressed. Pages of a TIFF file
# are a volume.
STORED = [
    (write, name, packed)
    for kind, name in FILES
    for write in {SAMPLES[kind]: 0, write_picture: 0} | ({write_scan: 0} if kind == "TIFF" else {})
    for packed in (False, True)
    if (kind, write) != ("DICOM", write_picture)
]
# Suffixes of files whose compressed values have a checksum, including data files with a separate header.
SUMMED = {".gz", ".mha", ".zraw", ".nrrd", ".png"}


def read_after(others: list[Path], path: Path) -> list[np.ndarray | str]:
    """Read a file again after each of the other files, whose values remain in freed memory; return the values or
    errors.
    """
    results: list[np.ndarray | str] = []
    for other in others:
        Scan.read(other)
        try:
            results.append(Scan.read(path).values)
        except DataError as error:
            results.append(str(error))
    return results


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[Path], Path, bool]:
    """Write three files of the same size with different values; return the first two, and the third, which tests then
    damage.
    """
    write, name, packed = request.param
    paths = [tmp_path / part / name for part in ("1", "2", "damaged")]
    for first, path in zip((7, 100, 0), paths, strict=True):
        path.parent.mkdir()
        write(path, packed, first)
    return paths[:2], paths[2], packed


@pytest.mark.parametrize("stored", STORED, indirect=True)
def test_a_truncated_file_in_any_format_is_refused_or_has_all_its_values(stored) -> None:
    others, path, _ = stored
    values = Scan.read(path).values
    for file in path.parent.iterdir():
        whole = file.read_bytes()
        for length in {*range(0, len(whole), max(1, len(whole) // 20)), *(len(whole) - lost for lost in (1, 4, 8, 9))}:
            file.write_bytes(whole[:length])
            (read,) = read_after(others[:1], path)
            assert "\n" not in read if isinstance(read, str) else np.array_equal(read, values), length
        file.write_bytes(whole)


@pytest.mark.parametrize("stored", STORED, indirect=True)
def test_a_damaged_file_never_yields_what_was_in_memory(stored) -> None:
    others, path, packed = stored
    values = Scan.read(path).values
    file = next((one for one in path.parent.iterdir() if one != path), path)
    summed = file.suffix in SUMMED and (packed or file.suffix in (".gz", ".png"))
    whole = file.read_bytes()
    for place in range(len(whole) - 40, len(whole), 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        first, second = read_after(others, path)
        assert np.array_equal(first, second), place
        assert isinstance(first, str) or not summed or np.array_equal(first, values), place


def test_the_checksum_of_a_large_nifti_file_is_compared(tmp_path: Path) -> None:
    """nibabel stops after the last value, and therefore never checks the checksum that follows."""
    values = np.random.default_rng(0).integers(0, 2000, (30, 80, 80), np.int16)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(tmp_path / "a.nii.gz"))
    assert np.array_equal(Scan.read(tmp_path / "a.nii.gz").values[0], values)
    content = bytearray((tmp_path / "a.nii.gz").read_bytes())
    content[-8] ^= 1
    (tmp_path / "a.nii.gz").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        Scan.read(tmp_path / "a.nii.gz")


def test_a_compressed_dicom_file_without_its_last_frame_is_refused(tmp_path: Path) -> None:
    whole = dicom(tmp_path / "a.dcm", packed=True)
    for end in (whole.rindex(struct.pack("<HH", 0xFFFE, 0xE000)), len(whole) - 8):
        (tmp_path / "a.dcm").write_bytes(whole[:end])
        with pytest.raises(DataError, match="damaged"):
            Scan.read(tmp_path / "a.dcm")


@pytest.mark.parametrize(
    "told", ["BinaryDataByteOrderMSB = False", "BinaryDataByteOrderMSB = True", "CompressedDataSize = 0"]
)
def test_compressed_values_of_a_metaimage_are_read_as_stored_or_not_at_all(told: str, tmp_path: Path) -> None:
    """If a header lacks CompressedDataSize, SimpleITK would take the header for compressed values."""
    values = np.arange(64, dtype=">i2" if "MSB = True" in told else "<i2").reshape(4, 4, 4)
    data = zlib.compress(values.tobytes())
    size = "" if "Size" in told else f"CompressedDataSize = {len(data)}\n"
    head = META.format(more=f"CompressedData = True\n{size}{told}\n").replace("UCHAR", "SHORT")
    (tmp_path / "a.mha").write_bytes(f"{head}ElementDataFile = LOCAL\n".encode() + data)
    (tmp_path / "a.mhd").write_bytes(f"{head}ElementDataFile = a.zraw\n".encode())
    (tmp_path / "a.zraw").write_bytes(data)
    assert np.array_equal(Scan.read(tmp_path / "a.mhd").values[0], values)
    if size:
        assert np.array_equal(Scan.read(tmp_path / "a.mha").values[0], values)
    else:
        with pytest.raises(DataError, match="damaged"):
            Scan.read(tmp_path / "a.mha")


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("last", [False, True])
def test_channels_of_a_compressed_nrrd_file_may_come_first_or_last(order: str, last: bool, tmp_path: Path) -> None:
    values = np.arange(120, dtype="<i2" if order == "little" else ">i2").reshape(2, 3, 4, 5)  # [C, D, H, W]
    told = ("domain domain domain list", "5 4 3 2") if last else ("list domain domain domain", "2 5 4 3")
    head = f"NRRD0004\ntype: short\ndimension: 4\nkinds: {told[0]}\nsizes: {told[1]}\nendian: {order}\nencoding: gzip"
    data = gzip.compress((values if last else np.moveaxis(values, 0, -1)).tobytes())
    (tmp_path / "a.nrrd").write_bytes(head.encode() + b"\n\n" + data)
    assert np.array_equal(Scan.read(tmp_path / "a.nrrd").values, values)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("a.mha", META.format(more="HeaderSize = -1\n") + "ElementDataFile = LOCAL\n"),
        ("a.nrrd", NRRD.replace("{data}", "byte skip: -1\n")),
    ],
)
def test_values_at_the_end_of_a_file_are_not_shifted(name: str, head: str, tmp_path: Path) -> None:
    """SimpleITK reads the image's bytes from the end of such a file, and takes header bytes for values if the file is
    too short.
    """
    (tmp_path / name).write_bytes(head.encode() + bytes(range(64)))
    assert np.array_equal(Scan.read(tmp_path / name).values.ravel(), range(64))
    for data in (bytes(range(60)), bytes(range(64)) + b"more"):
        (tmp_path / name).write_bytes(head.encode() + data)
        with pytest.raises(DataError, match="damaged"):
            Scan.read(tmp_path / name)


def test_a_bmp_file_with_compressed_pixels_is_refused(tmp_path: Path) -> None:
    """If compressed pixels are damaged, SimpleITK reads beyond its memory, and the process crashes."""
    write_picture(tmp_path / "a.bmp")
    whole = (tmp_path / "a.bmp").read_bytes()
    (tmp_path / "a.bmp").write_bytes(whole[:30] + struct.pack("<I", 1) + whole[34:])
    with pytest.raises(DataError, match="BMP files are compressed"):
        Scan.read(tmp_path / "a.bmp")


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_no_memory_is_taken_for_values_that_a_header_only_claims(kind: str, name: str, tmp_path: Path) -> None:
    SAMPLES[kind](tmp_path / name)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "rb") as file:
        whole = content = file.read()
    for old, claimed in CLAIMS[kind].items():
        content = content.replace(old, claimed) if old else claimed
    assert content != whole
    with opened(tmp_path / name, "wb") as file:
        file.write(content)
    with pytest.raises(DataError, match="claims more values"):
        Scan.read(tmp_path / name)
