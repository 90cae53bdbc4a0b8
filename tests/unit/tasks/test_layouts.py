"""medsilo reads every published folder layout, splits it by patient, trains for one step and tests; a wrong layout
gives an error.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from medsilo.core.errors import DataError
from medsilo.registry import TASKS
from medsilo.tasks.scans import Scan
from medsilo.tasks.site_data import SiteData, patients_of
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import parts_by_draw
from medsilo_papers.nuclei import images_in, nuclei_in
from results import convert
from tests import layouts
from tests.layouts import LAYOUTS, Layout

PARTS = ("train", "validation", "test")
Read = dict[str, SiteData]


def load(layout: Layout, folder: Path, seed: int = 0, **numbers: object) -> Read:
    task = TASKS[layout.task["name"]](**{**layout.task, **numbers})
    return {site: task.load(site, layout.sites, seed, folder) for site in layout.sites}


def where(data: Read) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for site in data.values():
        for part in PARTS:
            for patient in patients_of(getattr(site, part)):
                found.setdefault(patient, set()).add(part)
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def folder(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layout.make(tmp_path_factory.mktemp("data"))


def test_it_is_read_and_split_without_a_patient_in_two_parts(layout: Layout, folder: Path) -> None:
    task = TASKS[layout.task["name"]](**layout.task)
    data, again = load(layout, folder), load(layout, folder)
    assert all(len(parts) == 1 for parts in where(data).values())
    for site in layout.sites:
        for part in PARTS:
            cases = getattr(data[site], part)
            assert len(cases) == len(patients_of(cases)) > 0
            assert list(patients_of(cases)) == list(patients_of(getattr(again[site], part)))
            for inputs, target in (cases[0], cases[len(cases) - 1]):
                assert tuple(inputs.shape) == task.shape and inputs.dtype == torch.float32 and inputs.isfinite().all()
                assert target.dtype == torch.int64 and 0 <= target.min() <= target.max() < task.goal.classes
    everyone = [set(where({site: one})) for site, one in data.items()]
    assert sum(map(len, everyone)) == len(set.union(*everyone))


def test_the_paper_s_split_is_another(layout: Layout, folder: Path) -> None:
    if "split" not in TASKS[layout.task["name"]].model_fields:
        pytest.skip("each picture counts as a patient: the paper's split is the only one")
    papers = load(layout, folder, split="paper")
    assert all(len(getattr(site, part)) for site in papers.values() for part in PARTS)
    counted = [sum(len(getattr(site, part)) for part in PARTS) for site in papers.values()]
    assert counted == [sum(len(getattr(site, part)) for part in PARTS) for site in load(layout, folder).values()]
    if any(len(cases) > len(set(patients_of(cases))) for site in papers.values() for cases in (site.train,)):
        # without a split by patient, one patient's cases are in several parts of the split
        assert max(len(parts) for parts in where(papers).values()) > 1


def test_an_empty_folder_is_told_what_is_expected_where(layout: Layout, tmp_path: Path) -> None:
    for place in (tmp_path, None):
        with pytest.raises(DataError) as caught:
            load(layout, place)
        text = str(caught.value)
        assert len(text.splitlines()) == 1 and str(tmp_path) not in text
        assert ("expected" if place else "medsilo.yaml") in text and layout.task["name"] in text


def test_a_site_takes_no_other_s_folder(layout: Layout, folder: Path, tmp_path: Path) -> None:
    task = TASKS[layout.task["name"]](**layout.task)
    shutil.copytree(folder, tmp_path / "first")
    for name in ("second", "SECOND-"):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(DataError, match="expected"):
            task.load("second", ["first", "second"], 0, tmp_path)
    with pytest.raises(DataError, match="expected"):
        task.load("third", ["first", "second", "third"], 0, tmp_path)


def test_it_is_surveyed_and_a_paper_s_split_stops_nobody(layout: Layout, folder: Path) -> None:
    for split in ("patient", "paper"):
        if split == "patient" or "split" in TASKS[layout.task["name"]].model_fields:
            numbers = layout.task if split == "patient" else {**layout.task, "split": split}
            task = TASKS[layout.task["name"]](**numbers)
            survey = task.survey(layout.sites[0], layout.sites, 0, DataSource(folder=folder))
            assert survey.usable and all(part.cases for part in survey.parts.values())
            assert split == "paper" or not any("two parts" in problem.what for problem in survey.problems)


@pytest.mark.parametrize("name", ["tnbc", "fundus", "prostate-3"])
def test_a_file_is_the_same_in_training_and_prediction(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    task = TASKS[layout.task["name"]](**layout.task)
    train = task.load(layout.sites[0], layout.sites, 0, layout.make(tmp_path)).train
    if name == "prostate-3":
        cases = [(tmp_path / "ISBI_1.5" / train.patients[0], train[0][0])]
    else:
        pattern = f"{train.patients[0]}/*_1.png" if name == "tnbc" else f"{train.patients[0]}.*"
        cases = [(next(tmp_path.glob(f"*/{pattern}")), train[0][0])]
    for path, inputs in cases:
        predicted = task.inputs_of(Scan.read(path).values)
        # two libraries decode JPEG differently
        assert min(float((one - inputs).abs().mean()) for one in predicted) < 0.02


# ------------------------------------------------------------------------------------------------------- single layouts
def test_outlines_are_filled_where_they_are_and_ambiguous_ones_are_not(tmp_path: Path) -> None:
    task = TASKS["nuclei"](size=48)
    lungs = task.load("monusac2020-lung", ["monusac2020-lung"], 0, layouts.monusac(tmp_path))
    expected = np.zeros((30, 44), np.uint8)
    expected[6:18, 8:20] = 1
    for image in images_in(tmp_path):
        if image.name[5:12] in ("55-1594", "49-6743"):
            assert np.array_equal(nuclei_in(image, (30, 44)), expected)
    assert {name[5:] for name in where({"": lungs})} == set(layouts.LUNGS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<Annotations>",
        "<Other/>",
        '<Annotations><Annotation><Vertex X="1" Y="2"/></Annotation></Annotations>',
        '<Annotations><Annotation><Region><Vertex X="a"/></Region></Annotation></Annotations>',
        '<!DOCTYPE a [<!ENTITY b "c">]><Annotations><Annotation/></Annotations>',
    ],
)
def test_annotations_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    layouts.monuseg(tmp_path)
    next(tmp_path.rglob("*.xml")).write_text(text)
    with pytest.raises(DataError, match="Annotation, Region and Vertex") as caught:
        load(LAYOUTS["monuseg"], tmp_path)
    assert "TCGA" not in str(caught.value) and "TCGA" in caught.value.private


def test_the_published_test_sets_are_the_paper_s(tmp_path: Path) -> None:
    data = load(LAYOUTS["monusac"], layouts.monusac(tmp_path), split="paper")["monusac2020-lung"]
    tested = {f"TCGA-{code}" for code in layouts.TESTED if code in layouts.LUNGS}
    assert set(patients_of(data.test)) == tested
    assert len(data.validation) == round(0.2 * (len(data.train) + len(data.validation)))


def test_neighbours_are_channels_and_end_slices_no_cases(tmp_path: Path) -> None:
    layouts.prostate(tmp_path)
    three = load(LAYOUTS["prostate-3"], tmp_path)["isbi-15"]
    one = TASKS["prostate"](size=32, slices=1).load("isbi-15", ["isbi-15"], 0, tmp_path)
    shown = [sum(len(getattr(data, part)) for part in PARTS) for data in (three, one)]
    assert shown == [5 * 5, 5 * 6]  # with three slices per input, slice 0 has no neighbour and is left out
    assert set(patients_of(three.train)) == set(patients_of(one.train))
    for case in range(len(three.train)):
        patient, (volume, middle) = three.train.patients[case], three.train.cases[case]
        same = [i for i, name in enumerate(one.train.patients) if name == patient]
        by_slice = {one.train.cases[i][1]: one.train[i][0][0] for i in same}
        assert volume == one.train.cases[same[0]][0]
        for channel in (0, 1):
            assert torch.equal(three.train[case][0][channel], by_slice[middle - 1 + channel])


def test_intensities_are_those_of_the_papers() -> None:
    volume = np.linspace(-100, 5000, 4 * 16 * 16).reshape(4, 16, 16).astype(np.float32)
    cut = np.minimum(volume.astype(np.float64), np.percentile(volume.astype(np.float64), 99))
    harmofl = 255 * (cut - cut.min()) / (cut.max() - cut.min())
    got = TASKS["prostate"](size=16, slices=1, brightest=255.0).inputs_of(volume[None])
    assert np.abs(got[:, 0].numpy() - harmofl).max() < 1e-3
    fedsm = (np.clip(volume.astype(np.float64), 0, 2048) * 255 / 2048).astype(np.uint8) / 255
    got = TASKS["prostate"](size=16, slices=1, intensity="fixed").inputs_of(volume[None])
    # rounding to 8 bits twice may differ by one step
    assert np.abs(got[:, 0].numpy() - fedsm).max() < 1 / 255 + 1e-6
    assert np.abs(got[:, 0].numpy() - fedsm).mean() < 1e-3
    assert (
        TASKS["prostate"](size=16)
        .inputs_of(volume[None])[0, 0]
        .equal(TASKS["prostate"](size=16).inputs_of(volume[None])[0, 1])
    )


def test_augmentation_turns_and_flips_image_and_mask_together_and_each_way_alike() -> None:
    task = TASKS["prostate"](size=16)
    mask = torch.arange(16).reshape(4, 4)
    case = (torch.stack([mask, mask + 100, mask + 200]).float(), mask)
    seen: dict[tuple, int] = {}
    for seed in range(800):
        image, turned = task.augmented(case, seed)
        assert torch.equal(image[1], turned + 100.0) and type(image) is torch.Tensor is type(turned)
        seen[tuple(turned.flatten().tolist())] = seen.get(tuple(turned.flatten().tolist()), 0) + 1
    assert len(seen) == 8 and min(seen.values()) > 60 and max(seen.values()) < 145
    assert all(torch.equal(a, b) for a, b in zip(task.augmented(case, 5), task.augmented(case, 5), strict=True))


@pytest.mark.parametrize(("make", "site"), layouts.EYES)
def test_the_disc_holds_the_cup_in_every_source(make: Callable[[Path], Path], site: str, tmp_path: Path) -> None:
    convert.fundus(make(tmp_path))
    task = TASKS["fundus"](size=32)
    data = task.load(site, [site], 0, tmp_path)
    assert sum(len(getattr(data, part)) for part in PARTS) == 8
    disc, cup = task.goal.masks(data.train[0][1][None])[0]
    assert bool((cup <= disc).all()) and float(cup.sum()) * 4 == pytest.approx(float(disc.sum()), rel=0.35)
    right = torch.nn.functional.one_hot(data.train[0][1], 3).permute(2, 0, 1)[None] * 20.0
    assert task.goal.loss(right, data.train[0][1][None]) < 1e-3
    assert set(task.goal.measures(right, data.train[0][1][None])) >= {"dice", "dice_disc", "dice_cup"}


def test_masks_of_other_greys_are_refused(tmp_path: Path) -> None:
    layouts.plain_fundus(tmp_path)
    layouts.picture(tmp_path / "rim-one/masks/r0.png", layouts.eye((0, 100, 200)))
    with pytest.raises(DataError, match=r"0, 1 \(rim\) and 2 \(cup\)"):
        load(LAYOUTS["fundus"], tmp_path)


# ----------------------------------------------------------------------------------------------------- rejected layouts
SPOILT = {
    "tnbc": [("TNBC_NucleiSegmentation/GT_01/01_1.png", b"no", "mask is absent or damaged")],
    "prostate-3": [
        ("ISBI_1.5/Case00.nii.gz", b"no", "can't be read"),
        ("ISBI_1.5/Case00_segmentation.nii.gz", None, "1 of 5 volumes have no mask"),
    ],
    "fundus": [("rim-one/masks/r0.png", None, "1 of 8 pictures in images/ have no mask")],
}


@pytest.mark.parametrize(("name", "path", "content", "words"), [(n, *case) for n in SPOILT for case in SPOILT[n]])
def test_what_is_wrong_is_said(name: str, path: str, content: str | bytes | None, words: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    layout.make(tmp_path)
    if content is None:
        shutil.rmtree(tmp_path / path) if (tmp_path / path).is_dir() else (tmp_path / path).unlink()
    else:
        (tmp_path / path).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        load(layout, tmp_path)
    assert words in str(caught.value) and str(tmp_path) not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_damaged_and_deep_pictures_are_refused(tmp_path: Path) -> None:
    layouts.plain_fundus(tmp_path)
    path, task = tmp_path / "rim-one/images/r0.jpg", TASKS["fundus"](size=32)
    for content, words in ((path.read_bytes()[:200], "damaged"), (None, "8 bits")):
        if content is None:
            layouts.picture(path, np.zeros((32, 28), np.uint16), format="PNG")
        else:
            path.write_bytes(content)
        with pytest.raises(DataError, match=words) as caught:
            load(LAYOUTS["fundus"], tmp_path)
        assert path.name not in str(caught.value) and path.name in caught.value.private
        survey = task.survey("rim-one", ["rim-one"], 0, DataSource(folder=tmp_path))
        assert not survey.usable and path.name in str(survey.problems[0].private)


def test_links_are_followed_within_the_data_folder_and_refused_when_they_lead_out_of_it(
    layout: Layout, folder: Path, tmp_path: Path
) -> None:
    task = TASKS[layout.task["name"]](**layout.task)
    root = tmp_path / "data"
    shutil.copytree(folder, root)
    visible = [path for path in sorted(root.rglob("*")) if not path.name.startswith((".", "__"))]
    path = next(path for path in visible if path.is_file())
    inner = [path for path in visible if path.is_dir()][:1]
    moves = [(root / ".kept", path), (tmp_path / "elsewhere", path), *((tmp_path / "far", one) for one in inner)]
    for kept, target in moves:
        target.rename(kept)
        target.symlink_to(kept)
        if kept.parent == root:
            assert task.read(layout.sites[0], layout.sites, 0, DataSource(folder=root))
        else:
            with pytest.raises(DataError, match="1 files or.*folder are links") as caught:
                task.read(layout.sites[0], layout.sites, 0, DataSource(folder=root))
            assert target.name not in str(caught.value) and caught.value.private == target.relative_to(root).as_posix()
            survey = task.survey(layout.sites[0], layout.sites, 0, DataSource(folder=root))
            assert not survey.usable and "links" in survey.problems[0].what
        target.unlink()
        kept.rename(target)


@pytest.mark.parametrize("groups", [3, 4, 10, 97])
def test_groups_go_whole_near_the_shares_and_no_part_is_empty(groups: int) -> None:
    sizes = np.random.default_rng(groups).integers(1, 9, groups)
    names = [f"p{group}" for group, size in enumerate(sizes) for _ in range(size)]
    for seed in range(20):
        parts = parts_by_draw(names, (0.64, 0.16, 0.2), seed)
        assert all(len({p for name, p in zip(names, parts, strict=True) if name == one}) == 1 for one in set(names))
        counts = np.bincount(parts, minlength=3)
        assert counts.all() and counts.sum() == len(names)
        if groups == 97:
            assert np.abs(counts / len(names) - (0.64, 0.16, 0.2)).max() < 0.03
    with pytest.raises(DataError, match="fewer than 3 patients"):
        parts_by_draw(["a", "b", "b"], (0.64, 0.16, 0.2), 0)
