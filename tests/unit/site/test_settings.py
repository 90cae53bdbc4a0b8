"""Each fault in a hospital's settings gives an error of one line, and missing settings have default values."""

from datetime import date
from pathlib import Path

import pytest

from medsilo.cli.options import settings_of
from medsilo.core.errors import MedsiloError
from medsilo.site.settings import SiteSettings, make_settings, read_settings_of_all
from medsilo.tasks.sources import DataSource
from medsilo_lab.engines.simulator import prepare_workspace
from tests.commands import parsed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device": "gpu"}, "device: 'gpu' is not known"),
        ({"device": "cuda:"}, "device: 'cuda:' is not known"),
        ({"device": "cpu\n"}, "device: 'cpu\\n' is not known"),
        ({"precision": "float16"}, "choose 'float32' or 'bfloat16'"),
        ({"threads": 0}, "threads: the value is too small"),
        ({"threads": True}, "threads: the value is a truth value"),
        ({"public_data": 1}, "public_data: the value is no truth value"),
        ({date(2026, 1, 1): 1}, "give texts, numbers, lists and mappings only"),
        ({"memory_limit": 255}, "255 MiB are too few"),
        ({"data_folder": "/d/anna"}, "data_folder: unknown key"),
        (
            {"data": {"folder": "/d/anna", "image": "anna/*"}},
            "data.image: unknown key",
        ),
        ({"data": {"folder": ["/d/anna"]}}, "data.folder: the value is no text"),
        ("anna", "keys of these: data, output, device"),
        (["anna"], "keys of these: data, output, device"),
    ],
)
def test_wrong_settings_are_one_line_without_paths(values: object, words: str) -> None:
    with pytest.raises(MedsiloError) as caught:
        make_settings(values, "the site's medsilo.yaml")
    text = str(caught.value)
    assert text.startswith("the site's medsilo.yaml: ") and words in text
    assert len(text.splitlines()) == 1 and "anna" not in text


@pytest.mark.parametrize(
    "values",
    [
        {"calibration": False},
        {"min_cases_per_average": 1},
        {"models_disk": 1},
        {"score_rounding": 0},
        {"quotas": {"disk": 1}},
        {"privacy": {"epsilon": 1, "delta": 1e-5, "protective_epsilon": 1000}},
        {"privacy": {"epsilon": 1, "delta": 1e-5, "unit": "record"}},
        {"data": {"folder": "/d", "split": 1}},
        {"data": {"folder": "/d", "cache": "disk"}},
    ],
)
def test_no_key_lowers_a_constant(values: dict[str, object]) -> None:
    with pytest.raises(MedsiloError, match="unknown key; remove it") as caught:
        make_settings(values, "the site's medsilo.yaml")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "synthetic", "floors"),
    [
        ({}, False, (5, 8, 5, 2)),
        ({}, True, (1, 8, 1, 0)),
        ({"public_data": True}, False, (5, 1, 1, 0)),
        ({"min_patients_per_metric": 20}, False, (20, 20, 20, 2)),
        ({"min_patients_per_metric": 20}, True, (20, 20, 1, 0)),
        ({"min_patients_per_metric": 1}, False, (1, 8, 1, 2)),
    ],
)
def test_how_many_patients_what_leaves_must_cover(
    values: dict[str, object], synthetic: bool, floors: tuple[int, ...]
) -> None:
    """The tuple `floors` has the minimum numbers of patients for a score and for an average, and the rounding of counts
    and of scores.
    """
    own = make_settings(values, "x")
    told = own.least(synthetic), own.least_averaged(synthetic), own.count_unit(synthetic)
    assert (*told, own.resolution([], synthetic).patients) == floors


def test_without_a_card_cases_are_read_by_the_process_that_trains() -> None:
    compute = make_settings({"device": "cpu", "threads": 3}, "x").compute()
    assert (compute.threads, compute.workers) == (3, 0)


def test_settings_are_read_from_the_kit(tmp_path: Path) -> None:
    assert SiteSettings.read(tmp_path) == SiteSettings()
    (tmp_path / "medsilo.yaml").write_text("device: cpu\nthreads: 2\n")
    assert SiteSettings.read(tmp_path) == SiteSettings(device="cpu", threads=2)
    (tmp_path / "medsilo.yaml").write_text("")
    assert SiteSettings.read(tmp_path) == SiteSettings()
    # with the value 0, the site trains in NVFlare's process
    (tmp_path / "medsilo.yaml").write_text("memory_limit: 0\n")
    assert SiteSettings().isolated and not SiteSettings.read(tmp_path).isolated
    (tmp_path / "medsilo.yaml").write_text("memory_limit: 256\n")
    assert SiteSettings.read(tmp_path).most_memory == 256 << 20
    (tmp_path / "medsilo.yaml").write_text("device: cpu\nlisten: 8080\n")
    assert SiteSettings.read(tmp_path, with_others=True) == SiteSettings(device="cpu")
    with pytest.raises(MedsiloError, match="listen: unknown key"):
        SiteSettings.read(tmp_path)
    for text in ("device: [", "\0"):
        (tmp_path / "medsilo.yaml").write_text(text)
        with pytest.raises(MedsiloError, match=r"medsilo\.yaml cannot be read"):
            SiteSettings.read(tmp_path)


def test_the_command_line_stands_above_a_sites_settings_and_these_above_those_of_a_run(tmp_path: Path) -> None:
    run = SiteSettings(device="cpu", data={"folder": "/run"}, threads=2)  # type: ignore[arg-type]
    (tmp_path / "medsilo.yaml").write_text("threads: 3\ndata: {folder: /site, table: t.csv, label_map: {1: ball}}\n")

    def told(*words: str) -> SiteSettings:
        _, values = parsed(["resume", "run", *words])
        return settings_of(values["device"], values["data"], values["settings_folder"], run, pictures=True)

    assert told() == run.model_copy(update={"pictures": True, "approval": "none"})
    assert told("--data", "/other").data == DataSource(folder=Path("/other"))
    assert told("--data", "/other", "--device", "auto").model_dump(include={"device", "threads"}) == {
        "device": "auto",
        "threads": 2,
    }
    own = told("--settings", str(tmp_path))
    assert own.threads == 3 and own.data == SiteSettings.read(tmp_path).data and own.data.is_described
    with pytest.raises(MedsiloError, match="no such folder of settings"):
        told("--settings", str(tmp_path / "nowhere"))


def test_sites_of_one_machine_may_have_settings_of_their_own(tmp_path: Path) -> None:
    for place, text in ((".", "threads: 3"), ("b", "data: {folder: /b}"), ("c", "{}")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "medsilo.yaml").write_text(text)
    settings = settings_of("cpu", None, tmp_path, pictures=True)
    assert [settings.of(site).threads for site in "abc"] == [3, 1, 1]
    assert settings.of("b").data == DataSource(folder=Path("/b")) and settings.of("a").data is None
    assert all(settings.of(site).pictures and settings.of(site).device == "cpu" for site in "abc")
    settings.check_sites("abcd")
    with pytest.raises(MedsiloError, match=r"medsilo\.yaml for c,.* a, b"):
        settings.check_sites("ab")
    prepare_workspace(tmp_path / "workspace", settings, tmp_path / "out", "abc")
    again = read_settings_of_all(tmp_path / "workspace/local")
    assert [again.of(site).threads for site in "abc"] == [3, 1, 1] and again.of("b").data == settings.of("b").data


def test_a_setting_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "medsilo.yaml").write_text("device: cpu\ndevice: auto\n")
    with pytest.raises(MedsiloError, match="twice"):
        SiteSettings.read(tmp_path)
