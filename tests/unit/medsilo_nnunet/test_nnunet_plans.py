"""Compare nnU-Net's plans from merged fingerprints of several hospitals with nnU-Net's plans for the pooled data."""

import json
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.core.section import checked
from medsilo_lab.nnunet_planning import FOLDERS, make_plans, unsure_keys
from medsilo_nnunet import PLANNERS
from medsilo_nnunet.fingerprint import CaseFacts, Fingerprint, MeasuredSite, facts_of, samples_of
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_network import NnUNetPlans
from medsilo_nnunet.question import SegmentationQuestion
from tests.federations import (
    KINDS,
    Federation,
    federation,
    intensities_are_near,
    pooled_fingerprint,
    write_volumes,
)

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")

FEDERATIONS, REAL = 200, 10
INTENSITIES = "foreground_intensity_properties_per_channel"


def holdings_of(drawn: Federation, **memory: float) -> dict[str, MeasuredSite]:
    return {
        site: MeasuredSite.model_construct(reader="SimpleITKIO", memory=memory.get(site.replace("-", "_")))
        for site in drawn.hospitals
    }


def merged(drawn: Federation) -> Fingerprint:
    return Fingerprint.merged(
        Fingerprint.received(json.loads(Fingerprint.of(cases, drawn.samples).model_dump_json()))
        for cases in drawn.hospitals.values()
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key in ("raw", "preprocessed", "results"):
        (tmp_path / key).mkdir()
        monkeypatch.setenv(f"nnUNet_{key}", str(tmp_path / key))
    return tmp_path


def plans_in_one_place(
    home: Path, question: SegmentationQuestion, fingerprint: Mapping[str, Any], planner: str
) -> dict[str, Any]:
    from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
    from nnunetv2.experiment_planning.experiment_planners.residual_unets import residual_encoder_unet_planners

    settings = {
        **question.in_nnunet(),
        "numTraining": len(fingerprint["spacings"]),
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "SimpleITKIO",
        "dataset": {"a": {"images": ["a"], "label": "a"}},
    }
    for key, name, values in (("raw", "dataset", settings), ("preprocessed", "dataset_fingerprint", fingerprint)):
        (home / key / question.name).mkdir(exist_ok=True)
        (home / key / question.name / f"{name}.json").write_text(json.dumps(values))
    kind = {**vars(residual_encoder_unet_planners), "ExperimentPlanner": ExperimentPlanner}[planner]
    with redirect_stdout(StringIO()), torch.device("meta"):
        planned = kind(question.name)
        planned.plan_experiment()
    path = home / "preprocessed" / question.name / f"{planned.plans_identifier}.json"
    plans: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return plans


def without_intensities(plans: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plans without the intensity statistics, which merging changes slightly."""
    return {key: value for key, value in plans.items() if key != INTENSITIES}


def plans_are_those_of_one_place(home: Path, number: int, larger: float = 1) -> list[str]:
    drawn, planner = enlarged(federation(number), larger), PLANNERS[number // len(KINDS) % 3]
    pooled = plans_in_one_place(home, drawn.question, pooled_fingerprint(drawn.cases), planner)
    own = make_plans(drawn.question, merged(drawn), holdings_of(drawn), planner).plans
    assert without_intensities(own) == without_intensities(pooled)
    intensities_are_near(own, pooled, drawn.cases)
    assert checked(NnUNetPlans, own, "plans.json").in_nnunet() == own
    return list(own["configurations"])


def enlarged(drawn: Federation, times: float) -> Federation:
    def larger(case: CaseFacts) -> CaseFacts:
        return replace(case, size=[max(1, round(times * voxels)) for voxels in case.size])

    return replace(drawn, hospitals={site: list(map(larger, cases)) for site, cases in drawn.hospitals.items()})


@pytest.mark.long
def test_where_numbers_cover_cases_the_keys_that_this_may_change_are_named() -> None:
    """If a disclosed number stands for several cases, medsilo lists the keys of the plans that may differ from plans
    for pooled data.
    """
    differ, missed, named, told = 0, 0, 0, 0
    for drawn in map(federation, range(12)):
        if min(map(len, drawn.hospitals.values())) < 5:
            continue

        def flat(fingerprint: Fingerprint, drawn: Federation = drawn) -> dict[str, Any]:
            return make_plans(drawn.question, fingerprint, holdings_of(drawn)).plans

        exact = [Fingerprint.of(cases, drawn.samples) for cases in drawn.hospitals.values()]
        rough = [Fingerprint.of(cases, drawn.samples, 5) for cases in drawn.hospitals.values()]
        assert {one.least for one in rough} == {5} and not unsure_keys(flat(Fingerprint.merged(exact)), exact, flat)
        true, made = (flat(Fingerprint.merged(one))["configurations"] for one in (exact, rough))
        wrong = {
            f"{name}.{key}" for name in true.keys() & made for key in true[name] if true[name][key] != made[name][key]
        }
        unsure = {one for one in unsure_keys({"configurations": made}, rough, flat) if "." in one}
        differ, missed = differ + len(wrong), missed + len(wrong - unsure)
        named, told = named + len(unsure), told + sum(map(len, made.values()))
    assert differ > 20 and missed <= 0.05 * differ and named < 0.5 * told


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_plans_are_those_of_data_in_one_place(home: Path, number: int) -> None:
    plans_are_those_of_one_place(home, number)


@pytest.mark.long
def test_there_is_a_cascade_where_nnunet_plans_one(home: Path) -> None:
    """Plans for small volumes have one stage, and plans for larger volumes have a cascade of two stages."""
    asked = [(KINDS.index(kind), times) for kind in ("ct", "two modalities") for times in (1, 1.2, 1.35, 2)]
    planned = [plans_are_those_of_one_place(home, *one) for one in asked]
    cascades = ["3d_cascade_fullres" in own for own in planned]
    assert cascades == ["3d_lowres" in own for own in planned]
    assert {True, False} == set(cascades[:4]) == set(cascades[4:])


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(KINDS), FEDERATIONS))
def test_plans_of_many_federations_are_those_of_data_in_one_place(home: Path, number: int) -> None:
    plans_are_those_of_one_place(home, number)


def test_the_plan_fits_the_smallest_hospital_or_says_who_is_too_small(home: Path) -> None:
    drawn = federation(KINDS.index("tiny"))
    fingerprint, small = merged(drawn), holdings_of(drawn, hospital_0=5.5, hospital_1=16)
    fitting = make_plans(drawn.question, fingerprint, small)
    assert (fitting.memory, fitting.too_small) == (5.5, ())
    fixed = make_plans(drawn.question, fingerprint, small, memory=12)
    assert (fixed.memory, fixed.too_small) == (12, ("hospital-0",))
    assert make_plans(drawn.question, fingerprint, holdings_of(drawn)).memory == 8  # nnU-Net's default memory is 8 GB
    assert Path(os.environ[FOLDERS[0]]) == home / "raw"
    other = dict(small) | {"hospital-1": MeasuredSite.model_construct(reader="NibabelIO")}
    with pytest.raises(MedsiloError, match="NibabelIO and SimpleITKIO; agree on one"):
        make_plans(drawn.question, fingerprint, other)


# ------------------------------------------------------------------------------------------------------ real volumes
def question_of(number: int) -> SegmentationQuestion:
    channels = [("CT",), ("FLAIR",), ("T1", "T2")][number % 3]
    return SegmentationQuestion(name="Dataset007_Volumes", channels=channels, labels={"background": 0, "lesion": 1})


@pytest.mark.slow
def test_hospitals_measure_and_the_lead_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question, asked = question_of(1), tmp_path / "question.yaml"
    asked.write_text("name: Dataset007_Volumes\nchannels: [FLAIR]\nlabels: {background: 0, lesion: 1}\n")
    files = []
    for site, cases in {"st-anna": 7, "north": 6}.items():
        write_volumes(tmp_path / site, question, [f"{site}{case}" for case in range(cases)], 1, (1, 1, 2))
        files.append(str(tmp_path / f"{site}.json"))
        assert (
            main(
                ["nnunet", "measure", str(asked), "--data", str(tmp_path / site), "--cases", "100000", "-o", files[-1]]
            )
            == 0
        )
        assert "cases: 5, each number of 5 or more" in capsys.readouterr().out
        assert not any(f"{site}{case}" in Path(files[-1]).read_text() for case in range(cases))
    plans = tmp_path / "plans.json"
    assert main(["nnunet", "plan", str(asked), *files, "-o", str(plans)]) == 0
    assert "10 cases of 2 hospitals, for 8 GB" in capsys.readouterr().out
    made = json.loads(plans.read_text())
    assert checked(NnUNetPlans, made, "plans.json").in_nnunet() == made

    sent = json.loads(Path(files[0]).read_text())
    sent["memory"] = 4.5
    Path(files[0]).write_text(json.dumps(sent))
    assert main(["nnunet", "plan", str(asked), *files, "-o", str(plans), "--memory", "8"]) == 1
    assert "hospitals with less memory: st-anna" in capsys.readouterr().err
    for wrong, told in (("{", "can't be read"), (json.dumps({**sent, "question": "0" * 64}), "another question")):
        Path(files[0]).write_text(wrong)
        assert main(["nnunet", "plan", str(asked), *files, "-o", str(plans)]) == 1
        assert told in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("number", range(REAL))
def test_volumes_are_measured_as_by_nnunet_in_one_place(home: Path, number: int) -> None:
    from nnunetv2.experiment_planning.dataset_fingerprint import fingerprint_extractor

    extractor = fingerprint_extractor.DatasetFingerprintExtractor
    question, pool = question_of(number), home / "raw" / "Dataset007_Volumes"
    few = 2000  # number of intensities per case; nnU-Net samples 10^8 intensities from all cases together
    folders = {}
    for site, spacing in {"a": (0.9, 0.9, 3.0), "b": (1.0, 1.0, 1.2 + number), "c": (0.7, 0.8, 5)}.items():
        folders[site] = home / "hospitals" / site
        names = [f"{site}{case}" for case in range(2 + (number + ord(site)) % 3)]
        for folder in (folders[site], pool):
            write_volumes(folder, question, names, number, spacing)
    held = {site: RawData.of(folder, question) for site, folder in folders.items()}
    holdings = {site: MeasuredSite.model_construct(reader=data.reader) for site, data in held.items()}
    cases = sum(len(data.listing.usable) for data in held.values())
    assert samples_of(cases) == 10**8 // cases
    facts = {site: list(facts_of(data, few)) for site, data in held.items()}
    fingerprint = Fingerprint.merged(Fingerprint.of(own, few) for own in facts.values())
    own = make_plans(question, fingerprint, holdings).plans

    extract = extractor(question.name, 1)
    extract.show_progress_bar = False
    extract.num_foreground_voxels_for_intensitystats = few * cases
    with redirect_stdout(StringIO()):
        extract.run()
    pooled_print = json.loads((home / "preprocessed" / question.name / "dataset_fingerprint.json").read_text())
    from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner

    with redirect_stdout(StringIO()), torch.device("meta"):
        ExperimentPlanner(question.name).plan_experiment()
    pooled = json.loads((home / "preprocessed" / question.name / "nnUNetPlans.json").read_text())
    assert pooled[INTENSITIES] == pooled_print[INTENSITIES]
    assert without_intensities(own) == without_intensities(pooled)
    intensities_are_near(own, pooled, [case for own_facts in facts.values() for case in own_facts], rounding=1e-5)
