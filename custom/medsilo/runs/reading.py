"""Read the files of a run's folder; each error is one line that names the file and the remedy."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from medsilo.core.errors import MedsiloError
from medsilo.core.package import ENGINE
from medsilo.core.text import plain
from medsilo.runs import paths
from medsilo.runs.fields import SCHEMA, RecordPart
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary
from medsilo.runs.site_files import Provenance

BROKEN = "the file is damaged or was changed by hand: repeat the run"
AnyPart = TypeVar("AnyPart", bound=RecordPart)


def read_summary(folder: Path) -> Summary:
    return read_versioned(Summary, folder, paths.SUMMARY, "run")


def read_provenance(folder: Path) -> Provenance:
    where = _where(folder, paths.PROVENANCE)
    return _checked(Provenance, _parsed(read_text(folder, paths.PROVENANCE), where), where)


def read_rounds(folder: Path, growing: bool = False) -> list[Round]:
    """Read rounds.jsonl.

    Args:
        growing: whether the run may still write the file, so that an incomplete last line is ignored
    """
    if growing and not (folder / paths.ROUNDS).exists():
        return []
    lines = read_text(folder, paths.ROUNDS).split("\n")
    rounds = []
    for number, line in enumerate(lines[:-1] if growing else lines, start=1):
        if line.strip():
            where = f"{_where(folder, paths.ROUNDS)}, line {number}"
            rounds.append(_checked(Round, _parsed(line, where), where))
    return rounds


def read_of_sites(model: type[AnyPart], run: Path, name: str) -> dict[str, AnyPart]:
    """Read a file of each site from a run's folder; sites that lack the file are left out."""
    found = {}
    for folder in (path.parent for path in sorted((run / paths.SITES).glob(f"*/{name}"))):
        content = _parsed(read_text(folder, name, "site"), _where(folder, name))
        found[folder.name] = _checked(model, content, name)
    return found


def read_text(folder: Path, file: str, kind: str = "run") -> str:
    name = folder.resolve().name
    try:
        return (folder / file).read_text(encoding="utf-8")
    except FileNotFoundError:
        below = sorted(folder.glob(f"*/medsilo/*/{file}"))  # a file in an NVFlare workspace, or in a downloaded job
        remedy = f"give a complete {kind} folder, or repeat the {kind} if it was interrupted"
        remedy = f"give {below[-1].parent.relative_to(folder)} in it" if below else remedy
        raise MedsiloError(f"{kind.capitalize()} '{name}' has no {file}: {remedy}", str(folder)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"{file} of {kind} '{name}' cannot be read: check its permissions", str(error)) from None


def read_versioned(model: type[AnyPart], folder: Path, file: str, kind: str) -> AnyPart:
    where = _where(folder, file, kind)
    content = _parsed(read_text(folder, file, kind), where)
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA or isinstance(version, bool):
        packages = content.get("packages") if isinstance(content, dict) else None
        engine = packages.get(ENGINE) if isinstance(packages, dict) else None
        maker = engine.get("version") if isinstance(engine, dict) else None
        by = f" (written by medsilo {plain(maker)[:40]})" if isinstance(maker, str) else ""
        raise MedsiloError(
            f"{where} has schema {str(version)[:40]}{by}, but this medsilo reads schema {SCHEMA}: "
            f"make the report with the medsilo that made the {kind}"
        )
    return _checked(model, content, where)


def _where(folder: Path, file: str, kind: str = "run") -> str:
    return f"{file} of {kind} '{folder.resolve().name}'"


def _parsed(text: str, where: str) -> Any:
    try:
        # read NaN and Infinity as missing values, because some programs write these invalid JSON values
        return _plain(json.loads(text, parse_constant=lambda constant: None))
    except (ValueError, RecursionError) as error:
        raise MedsiloError(f"{where} is not valid JSON: {BROKEN}", str(error)) from None


def _plain(value: Any) -> Any:
    """Make all strings in a value safe to print, because other parties wrote the strings."""
    if isinstance(value, dict):
        return {plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


def _checked(model: type[AnyPart], content: Any, where: str) -> AnyPart:
    if not isinstance(content, dict):
        raise MedsiloError(f"{where} does not contain a JSON object: {BROKEN}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = plain(".".join(str(step) for step in first["loc"]))
        message = plain(first["msg"].removeprefix("Value error, "))
        raise MedsiloError(f"{where}: {f'{key}: ' if key else ''}{message}; {BROKEN}", str(error)) from None
