"""medsilo reads WFDB and EDF recordings with the values that were written, and rejects false headers."""

from pathlib import Path

import numpy as np
import pytest

from medsilo.core.errors import DataError
from medsilo.registry import TASKS
from medsilo.tasks.sources import DataSource
from medsilo_lab.start.dataset_layout import DatasetLayout, first_sight
from medsilo_series.waves import rows_of, wave_of


def write_wfdb(path: Path, stored: np.ndarray, form: str = "16", names: tuple[str, ...] = ("I", "II"), **head) -> None:
    """Write samples [rows, signals] as a WFDB recording with 1000 units per millivolt and a rate of 100 Hz."""
    rows, count = stored.shape
    if form == "212":
        flat = np.append(stored.ravel(), [0] * (stored.size % 2)).astype(np.int64) & 0xFFF
        low, high = flat[::2], flat[1::2]
        packed = np.stack([low & 255, low >> 8 | high >> 8 << 4, high & 255], 1).astype(np.uint8).tobytes()
    elif form == "24":
        packed = stored.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    elif form == "80":
        packed = (stored + 128).astype(np.uint8).tobytes()
    else:
        packed = stored.astype({"16": "<i2", "61": ">i2", "32": "<i4"}[form]).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".dat").write_bytes(packed)
    name = head.get("file", f"{path.stem}.dat")
    lines = [f"{path.stem} {count} {head.get('rate', 100)} {head.get('rows', rows)}"]
    lines += [f"{name} {form} 1000.0(5)/mV 16 0 0 0 0 {own}" for own in names]
    path.write_text("\n".join(lines), "utf-8")


@pytest.mark.parametrize(
    ("form", "most"), [("16", 32767), ("61", 32767), ("24", 8_000_000), ("32", 2**30), ("80", 127), ("212", 2047)]
)
def test_samples_of_each_format_are_read(form: str, most: int, tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(-most, most, (51, 2), endpoint=True)
    write_wfdb(tmp_path / "a.hea", stored, form)
    wave, values = rows_of(tmp_path / "a.hea", ["II", "I"])
    assert (wave.names, wave.rate, wave.rows) == (("I", "II"), 100, 51)
    np.testing.assert_allclose(values, (stored[:, ::-1] - 5) / 1000, rtol=1e-6)
    lost = {"16": -32768, "61": -32768, "24": -(2**23), "32": -(2**31), "80": -128, "212": -2048}[form]
    stored[3, 0] = lost
    write_wfdb(tmp_path / "a.hea", stored, form)
    assert np.argwhere(np.isnan(rows_of(tmp_path / "a.hea", ["I", "II"])[1])).tolist() == [[3, 0]]


def test_what_ptb_xl_says_of_its_samples_holds(shared_data: Path) -> None:
    for path in sorted((shared_data / "ptbxl_4sites/records100/00000").glob("*.hea"))[:20]:
        wave, values = rows_of(path, wave_of(path).names)
        lines = [line.split() for line in path.read_text("utf-8").splitlines()[1:13]]
        stored = np.rint(values.astype(np.float64) * 1000).astype(np.int64)
        assert stored[0].tolist() == [int(line[5]) for line in lines]
        assert (stored.sum(0) % 65536).tolist() == [int(line[6]) for line in lines]
        assert wave.rows == 1000 and wave.names[:2] == ("I", "II")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"rows": 10**12}, "more than"),
        ({"rows": 1000}, "shorter than its header"),
        ({"file": "../other.dat"}, "is not in its folder"),
        ({"file": "/etc/passwd"}, "is not in its folder"),
        ({"file": "s3://host/a.dat"}, "is not in its folder"),
        ({"rate": "nan"}, "header can't be read"),
        ({"rate": "1e99"}, "header can't be read"),
        ({"form": "508"}, "another format"),
        ({"names": ("I", "I")}, "header can't be read"),
        ({"names": ("I",)}, "header can't be read"),
    ],
)
def test_headers_that_lie_are_refused(head: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "other.dat").write_bytes(bytes(4000))
    form = head.pop("form", "16")
    write_wfdb(tmp_path / "in/a.hea", np.zeros((50, 2), int), **head)
    text = (tmp_path / "in/a.hea").read_text("utf-8").replace(" 16 1000", f" {form} 1000")
    (tmp_path / "in/a.hea").write_text(text, "utf-8")
    with pytest.raises(DataError, match=words):
        rows_of(tmp_path / "in/a.hea", ["I", "II"])


@pytest.mark.parametrize(
    "content", [b"", b"a 2 100 50", b"a/3 2 100 50\n", b"\xff\xfe\x00", b"a -1 1 1", b"a 2 100 x\n"]
)
def test_a_header_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.hea").write_bytes(content)
    with pytest.raises(DataError, match="header can't be read"):
        wave_of(tmp_path / "a.hea")


def test_edf_is_read_as_its_library_wrote_it(tmp_path: Path) -> None:
    edf = pytest.importorskip("pyedflib", reason="needs medsilo[edf]")
    values = np.random.default_rng(0).normal(size=(2, 400))
    heads = edf.highlevel.make_signal_headers(["I", "II"], sample_frequency=100, physical_min=-10, physical_max=10)
    edf.highlevel.write_edf(str(tmp_path / "a.edf"), values, heads, edf.highlevel.make_header())
    wave, read = rows_of(tmp_path / "a.edf", ["II", "I"])
    assert (wave.names, wave.rate, wave.rows) == (("II", "I"), 100, 400)
    np.testing.assert_allclose(read, values[::-1].T, atol=20 / 65535)
    slow = [*heads[:1], heads[1] | {"sample_frequency": 50}]
    edf.highlevel.write_edf(str(tmp_path / "b.edf"), [values[0], values[1][:200]], slow, edf.highlevel.make_header())
    assert wave_of(tmp_path / "b.edf").names == ("I",)  # wave_of lists only the signals with the highest sampling rate
    with pytest.raises(DataError, match="different sampling rates"):
        rows_of(tmp_path / "b.edf", ["I", "II"])
    whole = (tmp_path / "a.edf").read_bytes()
    for bad in (b"", whole[:300], whole[:-100], b"\0" * 1000):
        (tmp_path / "c.edf").write_bytes(bad)
        with pytest.raises(DataError, match="damaged"):
            wave_of(tmp_path / "c.edf")


def test_init_deals_recordings_by_the_tables_column(tmp_path: Path) -> None:
    """From a folder of WFDB recordings and a table, init makes a plan in which each hospital has its own recordings."""
    lines = ["recording,label,patient,site"]
    for number in range(24):
        stored = np.rint(1000 * np.sin(np.arange(400) * (0.1 + number % 2))[:, None] * [[1, 2]]).astype(int)
        write_wfdb(tmp_path / f"data/records/{number:02}.hea", stored)
        lines.append(
            f"records/{number:02}.hea,{['slow', 'fast'][number % 2]},p{number},{'north' if number < 14 else 'south'}"
        )
    (tmp_path / "data/cases.csv").write_text("\n".join(lines), "utf-8")
    (tmp_path / "data/all.csv").write_text("a,b\n1,2\n", "utf-8")
    sight = first_sight(DatasetLayout(tmp_path / "data", "here"))
    chosen = {key: value for key, (value, _) in sight.choices.plan.items()}
    assert chosen["participation.sites"] == ["north", "south"] and chosen["task.partition"] == {"kind": "column"}
    assert chosen["task.rate"] == 100 and chosen["task.signals"] == ["I", "II"]
    own = {key.removeprefix("task."): value for key, value in chosen.items() if key.startswith("task.")}
    task = TASKS["series-folder"].model_validate(own)
    source = DataSource(folder=tmp_path / "data")
    counts = {
        site: sum(part.cases for part in task.survey(site, ["north", "south"], 0, source).parts.values())
        for site in ("north", "south")
    }
    windows = (400 - chosen["task.window"]) // chosen["task.step"] + 1
    assert counts == {"north": 14 * windows, "south": 10 * windows}
