"""Texts from other parties cannot control a terminal, and their length is limited."""

from pathlib import Path

import pytest

from medsilo.cli import main
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.text import LONGEST, plain, printable
from medsilo.flare.wire import refusal, to_parcel
from medsilo.runs.progress import round_lines
from medsilo.runs.rounds import Round

HOSTILE = "\x1b]0;owned\x07red \x1b[31malert\x1b[0m\r\nmedsilo: all is well\x07\x9b2J \u202etxt.exe\u2028end\x00"
TAMED = "red alert medsilo: all is well txt.exe end"


def test_controls_and_escapes_are_gone() -> None:
    assert plain(HOSTILE) == TAMED
    assert plain("Größe – 3 µm, 漢字") == "Größe – 3 µm, 漢字"
    assert printable("a  b\tc") == "a  b c"
    assert plain("\ud800 x") == "x"


def test_long_texts_are_cut_and_say_so() -> None:
    assert plain("a" * LONGEST) == "a" * LONGEST
    long = plain("b " * 15_000_000)
    assert len(long.encode()) <= LONGEST and long.endswith("…")
    assert plain("\n" * 30_000_000).strip("…") == ""


def test_an_error_of_ours_can_not_carry_them() -> None:
    error = MedsiloError(f"site {HOSTILE} is lost")
    assert str(error) == f"site {TAMED} is lost"
    assert len(str(MedsiloError("x" * 30_000_000))) <= LONGEST


def test_a_refusal_that_came_over_the_wire_can_not_either() -> None:
    for given in (HOSTILE, "x" * 30_000_000, {"a": HOSTILE}, 7):
        with pytest.raises(Refused) as caught:
            to_parcel(refusal(given))  # type: ignore[arg-type]
        assert str(caught.value).isprintable() and len(str(caught.value)) <= LONGEST


def test_the_lines_of_a_round_are_lines() -> None:
    record = Round.model_validate(
        {
            "round": 1,
            "asked": ["a", "b"],
            "sites": {
                "a": {"validation": 0.5, "train_loss": 1, "samples": 3, "seconds": 1, "bytes_up": 1, "bytes_down": 1}
            },
            "refused": {"b": HOSTILE},
            "lost": {},
            "warnings": {"a": [HOSTILE, "x" * 30_000_000]},
        }
    )
    lines = round_lines(record, 1, "accuracy")
    assert len(lines) == 4 and all(line.isprintable() and len(line) < LONGEST + 100 for line in lines)


def test_names_of_files_reach_the_screen_tamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "\x1b[31mrun\udcff")]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "\x1b" not in told and told.strip().isprintable()
