"""A fault in the consortium's file gives an error of one line, which names the key and the remedy."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo_lab.consortium.description import read_consortium

GOOD: dict[str, Any] = {
    "name": "trial",
    "server": {"host": "localhost", "organisation": "clinic", "storage": "/var/lib/x"},
    "hospitals": [
        {"name": "st-anna", "organisation": "st_anna", "contact": "it@st-anna.org", "policies": "policies"},
        {"name": "north", "organisation": "north", "contact": "it@north.org", "policies": "policies"},
    ],
    "people": [{"name": "lead@clinic.org", "organisation": "clinic", "role": "lead"}],
}


NORTH = {"name": "relay-n", "host": "relay.north.org", "port": 8002, "organisation": "north", "behind": ["north"]}
TOP = {**NORTH, "name": "relay-top", "host": "relay.top.org", "behind": ["relay-n"]}


def write(folder: Path, change: Callable[[dict[str, Any]], None] = lambda values: None) -> Path:
    (folder / "policies").mkdir(exist_ok=True)
    (folder / "policies" / "medsilo.yaml").write_text("device: cpu\n")
    values = copy.deepcopy(GOOD)
    change(values)
    (folder / "consortium.yaml").write_text(yaml.safe_dump(values))
    return folder / "consortium.yaml"


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        for key in path[:-2]:
            values = values[key]
        values[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("hospitals", 1, "name", "st-anna"), ["'st-anna'", "twice"]),
        (put("hospitals", 1, "name", "ST-Anna"), ["'ST-Anna'", "twice"]),
        (put("hospitals", 1, "name", "localhost"), ["'localhost'", "twice"]),
        (put("hospitals", 1, "name", "private-root"), ["private-root", "own folder"]),
        (put("hospitals", 1, "name", "../north"), ["hospitals.1.name", "odd characters", "'../north'"]),
        (put("hospitals", 1, "name", "north\n"), ["hospitals.1.name", "odd characters"]),
        (put("hospitals", 1, "name", 7), ["hospitals.1.name", "string"]),
        (put("hospitals", 1, "organisation", "north & co"), ["hospitals.1.organisation", "odd characters"]),
        (put("hospitals", 1, "contact", "none"), ["hospitals.1.contact", "e-mail"]),
        (put("hospitals", 1, "policies", "elsewhere"), ["north", "elsewhere", "medsilo.yaml"]),
        (put("hospitals", 1, "policies", "x" * 300), ["north", "medsilo.yaml"]),
        (put("hospitals", []), ["hospitals", "1 or more"]),
        (put("people", 0, "role", "boss"), ["people.0.role", "'lead'", "'org_admin'"]),
        (put("people", 0, "name", "lead"), ["people.0.name", "e-mail"]),
        (put("server", "host", "https://fl.org"), ["server.host", "without https://"]),
        (put("server", "host", "a" * 64), ["server.host", "63"]),
        (put("server", "port", 80000), ["server.port", "65535"]),
        (put("server", "storage", "jobs"), ["server.storage", "absolute"]),
        (put("server", "prot", 8002), ["server.prot", "8002", "did you mean port"]),
        (put("root_valid_days", 0), ["root_valid_days"]),
        (put("relays", [NORTH | {"behind": []}]), ["relays.0.behind", "1 or more"]),
        (put("relays", [NORTH | {"port": 0}]), ["relays.0.port", "too small"]),
        (put("relays", [NORTH | {"name": "relay.n"}]), ["relays.0.name", "odd characters"]),
        (put("relays", [NORTH | {"name": "North"}]), ["'north'", "twice"]),
        (put("relays", [NORTH | {"name": "server"}]), ["'server'", "another name"]),
        (put("relays", [NORTH | {"behind": ["south"]}]), ["relay-n", "'south'", "not a hospital or relay"]),
        (put("relays", [NORTH, TOP | {"behind": ["north"]}]), ["north is behind relay relay-n and again", "relay-top"]),
        (put("relays", [NORTH | {"behind": ["north", "north"]}]), ["north is behind relay relay-n and again"]),
        (put("relays", [NORTH, TOP | {"host": NORTH["host"]}]), ["port 8002", "relay.north.org", "relay-top"]),
        (put("relays", [NORTH | {"host": "localhost"}]), ["port 8002", "localhost", "relay-n"]),
        (put("relays", [NORTH | {"behind": ["relay-top"]}, TOP]), ["relay-n is behind itself"]),
    ],
)
def test_what_is_wrong_is_one_line(
    change: Callable, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["kits", "make", str(write(tmp_path, change)), "-o", str(tmp_path / "kits")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("medsilo: consortium.yaml: ")
    assert all(word in line for word in words), line
    assert not (tmp_path / "kits").exists()


@pytest.mark.parametrize("text", ["[", "name: a\nname: b\n", "\0", "- 1\n", ""])
def test_what_is_no_such_file_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "consortium.yaml").write_text(text)
    with pytest.raises(MedsiloError, match=r"^consortium\.yaml[^\n]+$"):
        read_consortium(tmp_path / "consortium.yaml")


def test_the_example_is_right(root: Path) -> None:
    consortium = read_consortium(root / "provisioning" / "consortium.yaml")
    assert {hospital.policies.name for hospital in consortium.hospitals} == {"strict-hospital", "teaching-hospital"}


def test_the_examples_of_policies_need_no_checkout(tmp_path: Path) -> None:
    """A lead who installed medsilo from wheels can name the example policies as the documentation does."""
    file = write(tmp_path, put("hospitals", 0, "policies", "site_configs/strict-hospital"))
    first, other = (hospital.policies for hospital in read_consortium(file).hospitals)
    assert (first / "privacy.json").is_file() and other == tmp_path / "policies"
    (tmp_path / "site_configs/strict-hospital").mkdir(parents=True)
    (tmp_path / "site_configs/strict-hospital/medsilo.yaml").write_text("device: cpu\n")
    assert read_consortium(file).hospitals[0].policies == tmp_path / "site_configs/strict-hospital"
    with pytest.raises(MedsiloError, match="st-anna: site_configs/stern"):
        read_consortium(write(tmp_path, put("hospitals", 0, "policies", "site_configs/stern")))
