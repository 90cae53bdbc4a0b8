"""The signature over a record's files, by the key of the hospital's kit or by one made beside its medsilo.yaml.

The same files have the same signature. It proves something only to who knows the key's fingerprint beforehand.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from medsilo.extend import MedsiloError, Section, read_bounded, signing, write_bytes, write_json

SIGNATURE = "signature.json"
BEGINS = b"medsilo record 1\n"  # of what is signed, so that the signature is of no use for anything else
LARGEST = 16 << 20  # bytes of a file
AGAIN = "ask the hospital for the record"


class RecordSignature(Section):
    """signature.json: the SHA-256 of each file, the public key, and its signature over both."""

    files: dict[Annotated[str, Field(pattern=r"^[a-z][a-z.]{0,40}$")], str]
    key: Annotated[str, Field(max_length=4000, pattern=r"^([0-9a-f]{2})+$")]
    signature: Annotated[str, Field(max_length=4000, pattern=r"^([0-9a-f]{2})*$")] = ""

    @property
    def content(self) -> bytes:
        """The bytes that are signed."""
        return BEGINS + json.dumps({"files": self.files, "key": self.key}, sort_keys=True).encode()


def fingerprint(public: str) -> str:
    """Return what stands for a public key."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()


def write_signed(folder: Path, files: Mapping[str, bytes], key: signing.PrivateKey) -> str:
    """Write files and the signature over them, and return the key's fingerprint."""
    for name, content in files.items():
        write_bytes(folder / name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    unsigned = RecordSignature(files=digests, key=signing.public_text(key))
    signed = signing.sign_with(key, unsigned.content, salted=False)
    write_json(folder / SIGNATURE, {**unsigned.model_dump(), "signature": signed.hex()})
    return fingerprint(unsigned.key)


def verify(folder: Path, expected: str) -> int:
    """Return how many files are as this key signed them; raises MedsiloError with what is wrong."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        told = RecordSignature.model_validate_json(read_bounded(folder / SIGNATURE, LARGEST))
        public = load_der_public_key(bytes.fromhex(told.key))
        signing.verify(public, bytes.fromhex(told.signature), told.content, salted=False)
        there = {path.name for path in folder.iterdir()} - {SIGNATURE}
    except InvalidSignature as error:
        raise MedsiloError(f"{SIGNATURE} was changed after it was signed; {AGAIN}") from error
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise MedsiloError(f"{SIGNATURE} is missing or damaged; give the folder of a record") from error
    if (signer := fingerprint(told.key)) != expected.strip().lower():
        whose = "it is not the one given; " if expected else ""
        raise MedsiloError(f"the key {signer} signed it; {whose}ask the hospital for its key, and give that with --key")
    if strange := sorted(there ^ told.files.keys()):
        raise MedsiloError(f"{strange[0]} is {'not signed' if strange[0] in there else 'missing'}; {AGAIN}")
    for name, digest in told.files.items():
        if _digest(folder / name) != digest:
            raise MedsiloError(f"{name} was changed after it was signed; {AGAIN}")
    return len(told.files)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_bounded(path, LARGEST)).hexdigest()
    except (OSError, ValueError):
        return ""
