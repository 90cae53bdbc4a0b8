"""medsilo writes a file completely or not at all, and rejects unsafe file names.

A failed read or write, for example on a full disk, gives an error of one line.
"""

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medsilo.core.errors import MedsiloError, NoRoom
from medsilo.core.files import append_line, load_tensors, save_tensors, sweep, write_json, write_passing, write_text
from medsilo.core.mmap_store import MOST_FILES, TYPES, _File, stored, stretches_of
from medsilo.core.text import is_safe_name
from medsilo.core.yaml_text import read_yaml
from medsilo.site.query_budget import LockedFolder
from medsilo_server.record import Record

TENSORS = {
    "weight": torch.tensor([[1.5, -2.0], [float("nan"), 4.0]]),
    "half": torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
}


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.shape == other[name].shape
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(other[name]))


# ---------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize("name", ["a", "Hospital-1", "a.b_c-d", "0", "a" * 63])
def test_safe_names(name: str) -> None:
    assert is_safe_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".a", "-a", "_a", "a/b", "a\\b", "a b", "a\n", "\na", "a..b", "ä", "a" * 64, "a\0", "a\u202eb"],
)
def test_unsafe_names(name: str) -> None:
    assert not is_safe_name(name)


# ---------------------------------------------------------------------------------------------------- tensors
def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "t.safetensors"
    facts = {"round": 3, "best": [0.1 + 0.2, 1], "mixers": {"model": {"sites": ["a"]}}, "none": None}
    save_tensors(path, TENSORS, facts)
    tensors, read = load_tensors(path)
    assert_same(tensors, TENSORS)
    assert read == facts
    assert read["best"][0] == 0.1 + 0.2


@pytest.mark.parametrize("dtype", list(TYPES))
def test_every_type_comes_back_by_the_format_s_own_library(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"odd": torch.tensor([True]), "x": torch.tensor([[0, 1, 7]]).to(dtype), "one": torch.tensor(1).to(dtype)}
    save_tensors(tmp_path / "t", tensors)
    assert_same(safetensors.torch.load_file(tmp_path / "t"), tensors)


def test_a_type_that_the_format_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match="no name for the type torch.complex128 of deep"):
        save_tensors(tmp_path / "t", {"deep": torch.ones(2, dtype=torch.complex128)})
    assert listed(tmp_path) == []


def test_tensors_on_the_disk_are_written_like_those_in_memory(tmp_path: Path) -> None:
    vectors = {"b": torch.randn(5), "a": torch.randn(3, dtype=torch.float64), "none": torch.empty(0)}
    mapped = dict(zip(vectors, stored(vectors.values()), strict=True))
    save_tensors(tmp_path / "stored", {**mapped, "c": torch.tensor(7)}, {"round": 1})
    save_tensors(tmp_path / "plain", {**vectors, "c": torch.tensor(7)}, {"round": 1})
    assert (tmp_path / "stored").read_bytes() == (tmp_path / "plain").read_bytes()
    assert_same(load_tensors(tmp_path / "stored")[0], {**vectors, "c": torch.tensor(7)})
    assert listed(tmp_path) == ["plain", "stored"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_spills")
def test_a_file_is_handed_on_when_nobody_reads_it_any_more_and_not_before() -> None:
    def file_of(tensor: torch.Tensor) -> int:
        [(content, _, _)] = stretches_of([tensor])
        return content.file.number

    (one,) = stored([torch.arange(1000)])
    number = file_of(one)
    part = one[500:]
    del one
    (other,) = stored([torch.zeros(1000, dtype=torch.int64)])
    assert file_of(other) != number and torch.equal(part, torch.arange(500, 1000))
    del part
    (third,) = stored([torch.full((10,), 7)])
    assert file_of(third) == number and third.tolist() == [7] * 10 and not other.any()


@pytest.mark.usefixtures("fresh_spills")
def test_files_that_nobody_reads_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medsilo.core.mmap_store.MOST_SPARE", 20_000)
    rows = [stored([torch.zeros(1000, dtype=torch.int64)]) for _ in range(30)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    rows.clear()
    kept = sum(os.fstat(number).st_size for number in _File.spare)
    assert kept <= 20_000 and len(_File.spare) <= MOST_FILES
    assert len(list(Path("/proc/self/fd").iterdir())) < before


def test_tensors_that_share_memory_or_are_parts_of_others(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {"all": base, "again": base, "row": base[1], "turned": base.t(), "column": base[:, 2], "one": base[2, 3]}
    save_tensors(tmp_path / "t", tensors)
    assert_same(load_tensors(tmp_path / "t")[0], tensors)
    assert base.tolist()[1] == [4.0, 5.0, 6.0, 7.0]


def test_a_file_is_written_where_a_file_system_syncs_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fails = tmp_path / "words.txt", errno.EINVAL

    def sync(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(fails, os.strerror(fails))

    monkeypatch.setattr(os, "fsync", sync)
    write_text(path, "new")
    assert path.read_text() == "new"
    fails = errno.EIO
    with pytest.raises(MedsiloError, match=r"words\.txt could not be written"):
        write_text(path, "newer")


def test_what_is_of_use_for_moments_is_for_this_account_alone(tmp_path: Path) -> None:
    for value in (1, 2):
        write_passing(tmp_path / "now.json", value)
        assert json.loads((tmp_path / "now.json").read_text()) == value and listed(tmp_path) == ["now.json"]
        assert (tmp_path / "now.json").stat().st_mode & 0o777 == 0o600
    write_passing(tmp_path / "no/folder/now.json", 3)


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path: Path, there: str) -> None:
    if there == "a file":
        (tmp_path / "records").write_text("x")
    else:
        (tmp_path / "records/lock").mkdir(parents=True)
    folder = LockedFolder(tmp_path / "records", "lock", 1.0, "this hospital's records", "nothing leaves")
    with pytest.raises(MedsiloError, match=r"records cannot be used .*'state_dir'"), folder.alone():
        pass


def test_of_a_file_that_is_no_text_the_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(MedsiloError, match=r"0xFF in line 2"):
        read_yaml(tmp_path / "plan.yaml", "the plan", "a plan")


@pytest.mark.long
def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    """A process that is killed during a write leaves the old or the new file, and a temporary file that medsilo later
    removes.
    """
    script = (
        "import sys, torch; from pathlib import Path; from medsilo.core.files import save_tensors\n"
        "big = {'w': torch.zeros(4 << 20)}\n"
        "while True: save_tensors(Path(sys.argv[1]) / 'state.safetensors', big); print('whole', flush=True)"
    )
    left: set[str] = set()
    for pause in (0.0, 0.004, 0.008, 0.012, 0.016):
        with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(pause)
            process.kill()
        left |= {path.name for path in tmp_path.iterdir()} - {"state.safetensors"}
        sweep(tmp_path, tmp_path / "nowhere")
        assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
        assert load_tensors(tmp_path / "state.safetensors")[0]["w"].numel() == 4 << 20
    assert left


def test_a_reader_sees_one_file_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save_tensors(path, {"a": torch.zeros(50_000)})
    ended = threading.Event()

    def write() -> None:
        for value in range(1, 40):
            save_tensors(path, {"a": torch.full((50_000,), float(value))})
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not ended.is_set() or not reads:
        values = load_tensors(path)[0]["a"]
        assert torch.equal(values, values[:1].expand_as(values))
        reads += 1
    writer.join()


@pytest.mark.parametrize(
    "content", [None, b"", b"PK\x03\x04 a pickle", b"\xff" * 100, (10**9).to_bytes(8, "little") + b"{}"], ids=repr
)
def test_a_damaged_file_is_one_line_without_its_folder(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "secret-folder" / "state-3.safetensors"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MedsiloError, match="missing or damaged") as caught:
        load_tensors(path)
    text = str(caught.value)
    assert text.startswith("state-3.safetensors cannot be read")
    assert "secret-folder" not in text
    assert "secret-folder" in caught.value.private
    assert len(text.splitlines()) == 1


def test_a_file_cut_short_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save_tensors(path, TENSORS, {"round": 1})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(MedsiloError, match="damaged"):
            load_tensors(path)


def test_safetensors_of_others_are_refused(tmp_path: Path) -> None:
    import safetensors.torch

    for number, metadata in enumerate((None, {"a": "b"}, {"facts": "{"})):
        path = tmp_path / str(number)
        safetensors.torch.save_file({"a": torch.ones(1)}, path, metadata)
        with pytest.raises(MedsiloError, match="damaged"):
            load_tensors(path)


# ---------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_what_is_no_json_leaves_the_former_file(tmp_path: Path, bad: object) -> None:
    write_json(tmp_path / "s.json", {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "s.json", {"a": bad})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}
    assert listed(tmp_path) == ["s.json"]


def test_a_study_goes_on_from_the_greatest_round(tmp_path: Path) -> None:
    record = Record(tmp_path)
    with pytest.raises(MedsiloError, match="has no checkpoint"):
        record.load_checkpoint()
    facts = {"plan": "", "sites": [], "best": None, "settled": {}, "details": {}, "mixers": {}}
    for number in (2, 10, 9):
        save_tensors(record.checkpoints / f"round-{number}.safetensors", {}, {**facts, "round": number})
    (record.checkpoints / ".round-11.safetensors.77.part").touch()
    assert record.load_checkpoint()[1]["round"] == 10


# ---------------------------------------------------------------------------------------------------- full disks
@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_leaves_the_former_file(tiny_disk: Path) -> None:
    path = tiny_disk / "t.safetensors"
    save_tensors(path, {"a": torch.ones(100_000)}, {"round": 1})
    for save in (lambda: save_tensors(path, {"a": torch.zeros(200_000)}), lambda: write_text(path, "x" * 800_000)):
        with pytest.raises(MedsiloError, match="could not be written") as caught:
            save()
        assert len(str(caught.value).splitlines()) == 1
        assert load_tensors(path)[0]["a"].sum() == 100_000
        assert listed(tiny_disk) == ["t.safetensors"]
    path.unlink()
    save_tensors(path, {"a": torch.zeros(200_000)})


def test_a_disk_without_room_for_a_name(tiny_disk: Path) -> None:
    (tiny_disk / "filler").write_bytes(b"x" * resource.getpagesize() * (os.statvfs(tiny_disk).f_bavail))
    with pytest.raises(MedsiloError, match="the disk is full"):
        write_text(tiny_disk / "s.json", "x")
    assert listed(tiny_disk) == ["filler"]


@pytest.mark.parametrize("folder", ["/proc/medsilo", "/dev/null/medsilo"])
def test_a_folder_that_cannot_be_made_is_one_line(folder: str) -> None:
    with pytest.raises(MedsiloError, match="could not be written"):
        write_text(Path(folder) / "plan.yaml", "x")


@pytest.mark.parametrize(("why", "raised"), [(errno.ENOSPC, NoRoom), (errno.EACCES, MedsiloError)])
def test_a_line_that_cannot_be_added_says_whether_the_disk_is_full(
    why: int, raised: type[MedsiloError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk raises an separate class of error, because a study waits for space instead of ending."""

    def fails(descriptor: int) -> None:
        raise OSError(why, "no")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(MedsiloError, match=r"lines\.jsonl could not be written") as caught:
        append_line(tmp_path / "lines.jsonl", "{}")
    assert type(caught.value) is raised
