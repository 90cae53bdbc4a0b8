"""The certificate of a study from which a hospital or patients left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from medsilo.core import shelf
from medsilo.core.errors import MedsiloError
from medsilo.core.section import Section
from medsilo.flare.jobs import plan_of
from medsilo.runs import paths
from medsilo.sealing import signed, signing
from medsilo.study import judging
from medsilo.study.leaving import Departure
from medsilo_release.release_folder import Hash, Word

CERTIFICATE = "leaving.json"
Files = Annotated[dict[Annotated[str, Field(max_length=1000)], Hash], Field(max_length=10_000)]


class LeavingCertificate(Section):
    """leaving.json: who left, and what was made instead of what."""

    hospital: Word
    patients: bool  # whether it is some of its patients
    plan_before: Hash
    plan: Hash
    begun_after: Annotated[int, Field(ge=0, le=10**6)]  # the round from which the new study went on
    rounds: Hash  # of rounds.jsonl
    models: Files
    copies: Files  # of the old models, that are known of


def certify(gone: Departure, out: Path, key: signing.PrivateKey) -> LeavingCertificate:
    """Write and return what was made instead of what; raises MedsiloError where a run is not of this study."""
    judging.finished_run(out)
    if plan_of(out / paths.PLAN).hash != gone.plan.hash:
        raise MedsiloError("the run is not of this study without who left; run 'medsilo leave' into a new folder")
    if (rounds := shelf.hash_of_file(out / paths.ROUNDS)) == shelf.hash_of_file(gone.study / paths.ROUNDS):
        raise MedsiloError("that run is the study itself; name another one with -o")
    told = LeavingCertificate(
        hospital=gone.hospital,
        patients=gone.patients,
        plan_before=gone.before.hash,
        plan=gone.plan.hash,
        begun_after=gone.begun_in(out),
        rounds=rounds,
        models={path.relative_to(out).as_posix(): shelf.hash_of_file(path) for path in gone.models_in(out)},
        copies=dict(_copies(gone, out)),
    )
    signed.write_signed(out / CERTIFICATE, told, key)
    return told


def _copies(gone: Departure, out: Path) -> Iterator[tuple[str, str]]:
    """Yield each copy of an old model below the folder of runs: the study's own, and where it was copied to."""
    root = gone.study.resolve().parent
    own = {shelf.hash_of_file(path) for path in gone.models_in(gone.study)}
    for path in gone.models_in(root):
        inside = path.resolve().is_relative_to(out.resolve())
        if not inside and (digest := shelf.hash_of_file(path)) in own:
            yield path.relative_to(root).as_posix(), digest
