"""Faulty YAML gives within seconds an error of one line that names the fault."""

import time
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError, YamlError
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import load_plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.consortium.description import read_consortium
from tests.conftest import make_plan, over_all

PLAN = make_plan()
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
BAD = {
    "aliases": (ALIASES, "names for parts"),
    "an anchor": ("a: &x 1\n", "names for parts"),
    "merging": ("a: {<<: 1, <<: 2}\n", "given twice"),
    "a type": ("seed: !!int x\n", "types of its own"),
    "a type of Python's": ("seed: !!python/object/apply:os.system [ls]\n", "types of its own"),
    "a set": ("seed: !!set {a, b}\n", "types of its own"),
    "5,000 digits": (f"seed: {'7' * 5000}\n", "more than 40 digits"),
    "5,000 hexadecimal digits": (f"seed: 0x{'7' * 5000}\n", "more than 40 digits"),
    "5,000 digits of a float": (f"seed: {'7' * 5000}.5\n", "more than 40 digits"),
    "no digits": ("seed: 0b_\n", "number"),
    "3,000 brackets": ("[" * 3000, "levels deep"),
    "3,000 brackets that close": ("[" * 3000 + "]" * 3000, "levels deep"),
    "3,000 braces": ("{a: " * 3000, "levels deep"),
    "3,000 dashes": ("- " * 3000 + "a", "levels deep"),
    "3,000 questions": ("? " * 3000 + "a", "levels deep"),
    "30,000 keys": ("".join(f"k{number}: 1\n" for number in range(30_000)), "more than"),
    "2 MB": ("a: " + "x" * 2_000_000, "more than 262144 bytes"),
    "a key given twice": ("a: 1\nb: 2\na: 3\n", "key 'a' is given twice"),
    "a list for a key": ("? [a]\n: 1\n", "a key is a list"),
    "half a character": ('a: "\\ud800"\n', "control characters"),
    "an escape": ('a: "\\e[2J"\n', "control characters"),
    "a zero byte": ('a: "\\0"\n', "control characters"),
    "two documents": ("a: 1\n---\nb: 2\n", "another document"),
    "no YAML": ("a: b: c\n", "mapping values are not allowed"),
}


@pytest.mark.long
@over_all("name", BAD)
@pytest.mark.parametrize("reader", ["plan", "settings", "consortium", "--set"])
def test_bad_yaml_is_one_line_at_once(name: str, reader: str, tmp_path: Path) -> None:
    text, words = BAD[name]
    path = tmp_path / "medsilo.yaml"
    path.write_text(text)
    read = {
        "plan": lambda: load_plan(path),
        "settings": lambda: SiteSettings.read(tmp_path),
        "consortium": lambda: read_consortium(path),
        "--set": lambda: PLAN.with_changes([f"task={text}"]),
    }[reader]
    started = time.process_time()
    with pytest.raises(MedsiloError, match=words) as caught:
        read()
    assert time.process_time() - started < 3  # reading takes 0.4 s on an idle machine
    told = str(caught.value)
    assert "\n" not in told and "\x1b" not in told and len(told) < 2000
    told.encode()


def test_what_is_no_date_is_a_text() -> None:
    assert load_yaml("a: 2026-13-45\nb: 2026-01-02\n") == {"a": "2026-13-45", "b": "2026-01-02"}


def test_the_line_is_told() -> None:
    with pytest.raises(YamlError, match="^line 3 is not valid YAML: names for parts"):
        load_yaml("a: 1\nb: 2\nc: &x 3\n")


def test_as_much_as_may_be_read_is_read_at_once() -> None:
    text = "".join(f"key-{number}: {number}\n" for number in range(9_990))
    started = time.process_time()
    assert len(load_yaml(text)) == 9_990
    assert time.process_time() - started < 6
