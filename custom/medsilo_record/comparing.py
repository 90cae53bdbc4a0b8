"""Differences of two records, in sentences: of two plans, two settings or two versions of medsilo."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded
from medsilo.core.package import package_facts
from medsilo.core.section import Section
from medsilo_record.facts import Case, RecordEntry

FILE = "record.json"
LARGEST = 8 << 20
Line = Annotated[str, Field(max_length=20_000)]
SKIPPED = ("study", "report", "description")  # said by the lines on versions and keys, or by other entries


class Filed(Section):
    """record.json: all that a record says, for another record to be compared with."""

    version: Line
    build: Line
    hash: Line  # of the plan
    site: Line
    keys: dict[Line, Line]  # of the resolved plan
    titles: dict[Line, Line]
    entries: dict[Line, tuple[Line, ...]]

    @classmethod
    def of(cls, case: Case, entries: Sequence[RecordEntry]) -> "Filed":
        """Return what a record says."""
        build = package_facts()
        return cls(
            version=build["version"],
            build=build["hash"],
            hash=case.plan.hash,
            site=case.site,
            keys={key: str(value)[:20_000] for key, value in case.plan.by_key.items()},
            titles={entry.key: entry.title for entry in entries},
            entries={entry.key: entry.says for entry in entries},
        )

    @classmethod
    def read(cls, folder: Path) -> "Filed":
        """Return the record in a folder; raises MedsiloError."""
        try:
            return cls.model_validate_json(read_bounded(folder / FILE, LARGEST))
        except (OSError, ValueError, ValidationError) as error:
            raise MedsiloError(f"{FILE} is missing or damaged; give the folder of a record, or a job") from error

    def written(self) -> str:
        """Return the text of record.json."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def differences(new: Filed, old: Filed) -> Iterator[str]:
    """Yield what changed, a sentence a line."""
    if (new.version, new.build) != (old.version, old.build):
        yield f"medsilo was {old.version} (build {old.build[:12]}) and is {new.version} (build {new.build[:12]})."
    if new.site != old.site:
        yield f"The hospital was {old.site or 'not named'} and is {new.site or 'not named'}."
    yield from _keys(new.keys, old.keys)
    for key in sorted(new.entries.keys() | old.entries.keys()):
        if key not in SKIPPED:
            title = new.titles.get(key) or old.titles.get(key) or key
            says, said = new.entries.get(key, ()), old.entries.get(key, ())
            yield from (f'{title}: the record no longer says "{line}"' for line in said if line not in says)
            yield from (f'{title}: the record now says "{line}"' for line in says if line not in said)


def _keys(new: Mapping[str, str], old: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(new.keys() | old.keys()):
        if key not in old:
            yield f"{key} is new in the plan: {new[key]}."
        elif key not in new:
            yield f"{key} is no longer in the plan; it was {old[key]}."
        elif new[key] != old[key]:
            yield f"{key} was {old[key]} and is {new[key]}."
