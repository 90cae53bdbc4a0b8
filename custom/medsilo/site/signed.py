"""Signed files and lines: a JSON value, the public key of who signed it, the signature; and folders that a file lists.

The same value has the same signature. It proves something only to who knows the key's fingerprint beforehand.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from operator import not_
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_der_public_key
from pydantic import Field, ValidationError

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded, write_text
from medsilo.core.section import Section, checked
from medsilo.core.wording import in_words
from medsilo.site.signing import PrivateKey, UseKey, public_text, sign_with, verify

LARGEST = 8 << 20  # bytes of a signed file
Hexadecimal = Annotated[str, Field(max_length=4000, pattern=r"^([0-9a-f]{2})+$")]
S = TypeVar("S", bound=Section)


class Signature(Section):
    """A signed value, as it is written."""

    content: dict[str, Any]
    key: Hexadecimal
    signature: Hexadecimal
    certified: Annotated[str, Field(max_length=4000, pattern=r"^([0-9a-f]{2})*$")] = Field(
        "", exclude_if=not_
    )  # by the key of a kit, where the one that signs is of one use


def fingerprint(public: str) -> str:
    """Return what people compare on the telephone: 32 hexadecimal digits of the key's SHA-256, in fours."""
    digits = hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]
    return "-".join(digits[place : place + 4] for place in range(0, 32, 4))


def digest_of(content: Section) -> str:
    """Return the SHA-256 of a value: the same for equal values."""
    return hashlib.sha256(_canonical(content.model_dump(mode="json"))).hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _signed_bytes(kind: type[Section], key: str, content: Mapping[str, Any]) -> bytes:
    """Return what is signed: a signature of one kind of file is of no use for another."""
    return f"medsilo {kind.__name__} 1\n{key}\n".encode() + _canonical(content)


def signed(content: Section, key: PrivateKey | UseKey) -> Signature:
    """Return a value with its signature."""
    told, public = content.model_dump(mode="json"), public_text(key)
    signature = sign_with(key, _signed_bytes(type(content), public, told))
    certified = key.certified.hex() if isinstance(key, UseKey) else ""
    return Signature(content=told, key=public, signature=signature.hex(), certified=certified)


def line_of(signature: Signature) -> bytes:
    """Return a signed value as one line."""
    return _canonical(signature.model_dump())


def opened(text: bytes, kind: type[S], name: str, form: Callable[[Signature], bytes] = line_of) -> tuple[S, str]:
    """Return what a signed value says, and the public key of who signed it; raises MedsiloError for anything else.

    name: what it is, for people. form: how it is written.
    """
    try:
        found = checked(Signature, json.loads(text), name)
        if form(found) != text:
            raise ValueError("written by something else")
        signature, told = bytes.fromhex(found.signature), _signed_bytes(kind, found.key, found.content)
        verify(load_der_public_key(bytes.fromhex(found.key)), signature, told)
        return checked(kind, found.content, name), found.key
    except InvalidSignature as error:
        raise MedsiloError(f"{name} was changed after it was signed, or its signature is forged") from error
    except ValidationError as error:
        what = in_words(error, Signature if error.title == Signature.__name__ else kind, tells_values=False)
        raise MedsiloError(f"{name} is damaged: {what}") from error
    except (ValueError, TypeError, RecursionError, UnsupportedAlgorithm) as error:
        raise MedsiloError(f"{name} is damaged or not signed ({type(error).__name__})") from error


def write_signed(path: Path, content: Section, key: PrivateKey | UseKey) -> str:
    """Write a value with its signature, and return the key's fingerprint."""
    made = signed(content, key)
    write_text(path, _written(made).decode())
    return fingerprint(made.key)


def _written(signature: Signature) -> bytes:
    return (json.dumps(signature.model_dump(), indent=1, allow_nan=False) + "\n").encode()


def read_signed(path: Path, kind: type[S]) -> tuple[S, str]:
    """Return what a signed file says, and the public key of who signed it; raises MedsiloError for any other file."""
    try:
        there = read_bounded(path, LARGEST)
    except FileNotFoundError as error:
        raise MedsiloError(f"there is no {path.name}; give the folder or file that was signed", str(path)) from error
    except (OSError, ValueError) as error:
        raise MedsiloError(f"{path.name} is damaged or not signed ({type(error).__name__})", str(path)) from error
    return opened(there, kind, path.name, _written)


def read_own(path: Path, kind: type[S], key: PrivateKey | UseKey) -> S:
    """Return what a file says that this very key signed; raises MedsiloError for any other file."""
    content, _ = read_signed(path, kind)
    if read_bounded(path, LARGEST) != _written(signed(content, key)):  # what certifies the key is not signed itself
        raise MedsiloError(f"{path.name} was changed after it was signed, or by another key", str(path))
    return content


def hashes_in(folder: Path, but: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of each file below a folder, except one."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise MedsiloError(f"{name} is a link to another place; get the folder again from who signed it", str(path))
        if path.is_file() and name != but:
            with path.open("rb") as file:
                yield name, hashlib.file_digest(file, "sha256").hexdigest()
