"""The page's pictures of AdaFed: the matrix with the sites' names, and bars for every site and method."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.report import page, pictures
from medsilo.report.read import read_all
from medsilo.runs.schema import Details, Similarity
from tests.unit.test_report import save, spoil, summary_of

SCORES = {"hospital-a": 0.5, "hospital-b": 0.75, "hospital-c": None}
WEIGHTS = [[0.5, 0.3, 0.2], [0.1, 0.5, 0.4], [0.25, 0.25, 0.5]]


def details(**changes: object) -> dict:
    return {"details": Details(similarity=Similarity(sites=list(SCORES), weights=WEIGHTS, noise=0.0), **changes)}


def test_the_matrix_names_its_sites_and_numbers() -> None:
    svg = ElementTree.fromstring(pictures.heat_map(list(SCORES), WEIGHTS, key="k", title="T"))
    texts = [element.text for element in svg.iter() if element.tag == "text"]
    assert texts.count("hospital-a") == 2
    assert [text for text in texts if text.startswith(".")] == [f"{w:.2f}"[1:] for row in WEIGHTS for w in row]
    titles = [element.text for element in svg.iter("title")]
    assert "hospital-b takes 0.400 from hospital-c" in titles
    shades = [float(element.get("fill-opacity")) for element in svg.iter("rect")]
    assert shades[0] == shades[4] == shades[8] == 0  # what sites keep of their own would drown the rest
    assert shades[5] == 1 and 0 < shades[3] < shades[1] < 1
    assert "hospital-a keeps 0.50 of its own, most of the others from hospital-b (0.30)." in svg.find("desc").text


def test_one_site_and_zero_weights_can_be_drawn() -> None:
    for weights in ([[1.0]], [[1.0, 0.0], [0.0, 1.0]]):
        names = [f"s{n}" for n in range(len(weights))]
        ElementTree.fromstring(pictures.heat_map(names, weights, key="k", title="T"))


def test_many_sites_lose_the_numbers_and_keep_the_words() -> None:
    names = [f"a-hospital-with-a-long-name-{n}" for n in range(20)]
    svg = pictures.heat_map(names, [[0.05] * 20] * 20, key="k", title="T")
    texts = [element.text for element in ElementTree.fromstring(svg).iter("text")]
    assert len(texts) == 40 and all(len(text) <= 14 for text in texts)


def test_the_page_shows_matrix_source_and_bars(tmp_path: Path) -> None:
    share = {"source": "share", "data": "20% of every site's training cases", "start": True}
    runs = [
        save(tmp_path, summary_of("fedavg", "FedAvg", SCORES)),
        save(tmp_path, summary_of("adafed", "AdaFed", SCORES, **details(pretraining=share))),
        save(tmp_path, summary_of("f-adafed", "f-AdaFed", SCORES, **details())),
    ]
    text = page.render(read_all(runs), "Title")
    assert text.count('class="heat') == 18
    assert "trained on: 20% of every site&#39;s training cases. The models started from it, too." in text
    assert "No data were shared" in text
    assert "Test accuracy at every site" in text and "Test accuracy at hospital-a" in text
    assert "Who learns from whom" not in page.render(read_all(runs[:1]), "Title")


@pytest.mark.parametrize("weights", [[[1.0]], [[1, 0], [0, 1], [0, 0]], "none"])
def test_a_damaged_matrix_is_named(weights: object, tmp_path: Path) -> None:
    run = save(tmp_path, summary_of("adafed", "AdaFed", SCORES, **details()))
    spoil(run, "details", "similarity", "weights", value=weights)
    with pytest.raises(MedsiloError, match=r"details\.similarity"):
        read_all([run])
