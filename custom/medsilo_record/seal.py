"""The signature over a record's files, by the key of the hospital's kit or by one made beside its medsilo.yaml."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from medsilo.extend import MedsiloError, Section, signed, signing, write_bytes

SIGNATURE = "signature.json"
fingerprint = signed.fingerprint


class RecordFiles(Section):
    """The SHA-256 of each file of a record."""

    files: dict[Annotated[str, Field(pattern=r"^[a-z][a-z.]{0,40}$")], str]


def write_signed(folder: Path, files: Mapping[str, bytes], key: signing.PrivateKey) -> str:
    """Write files and the signature over them, and return the key's fingerprint."""
    for name, content in files.items():
        write_bytes(folder / name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    return signed.write_signed(folder / SIGNATURE, RecordFiles(files=digests), key)


def verify(folder: Path, expected: str) -> int:
    """Return how many files are as this key signed them; raises MedsiloError with what is wrong."""
    told, key = signed.read_signed(folder / SIGNATURE, RecordFiles)
    signed.check_files(folder, told.files, SIGNATURE)
    if (signer := fingerprint(key)) != expected.strip().lower():
        whose = "it is not the one given; " if expected else ""
        raise MedsiloError(f"the key {signer} signed it; {whose}ask the hospital for its key, and give that with --key")
    return len(told.files)
