"""Write and verify signed JSON values; each value contains the signer's public key.

Signatures are deterministic: equal content and keys give equal signatures. A signature proves its origin only to a
verifier who already knows the fingerprint of the signer's key.
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
from medsilo.site.kit import KitFiles
from medsilo.site.signing import KeyPurpose, PrivateKey, UseKey, public_text, sign_with, verify

LARGEST = 8 << 20  # limit on the bytes of a signed file
Hexadecimal = Annotated[str, Field(max_length=4000, pattern=r"^([0-9a-f]{2})+$")]
S = TypeVar("S", bound=Section)


class Signature(Section):
    content: dict[str, Any]
    key: Hexadecimal
    signature: Hexadecimal
    certified: Annotated[str, Field(max_length=4000, pattern=r"^([0-9a-f]{2})*$")] = Field(
        "", exclude_if=not_
    )  # the signature with which the kit's key certifies the signing key


def fingerprint(public: str) -> str:
    """Return a key's fingerprint for people to compare: 32 hexadecimal digits of its SHA-256, in groups of four."""
    digits = hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]
    return "-".join(digits[place : place + 4] for place in range(0, 32, 4))


def digest_of(content: Section) -> str:
    return hashlib.sha256(_canonical(content.model_dump(mode="json"))).hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _signed_bytes(kind: type[Section], key: str, content: Mapping[str, Any]) -> bytes:
    """Return the bytes to sign; the bytes include the type of content, so that a signature is invalid for another type
    of content.
    """
    return f"medsilo {kind.__name__} 1\n{key}\n".encode() + _canonical(content)


def signed(content: Section, key: PrivateKey | UseKey) -> Signature:
    told, public = content.model_dump(mode="json"), public_text(key)
    signature = sign_with(key, _signed_bytes(type(content), public, told))
    certified = key.certified.hex() if isinstance(key, UseKey) else ""
    return Signature(content=told, key=public, signature=signature.hex(), certified=certified)


def line_of(signature: Signature) -> bytes:
    return _canonical(signature.model_dump())


def opened(text: bytes, kind: type[S], name: str, form: Callable[[Signature], bytes] = line_of) -> tuple[S, str]:
    """Verify a signed value and return its content and the signer's public key, or raise MedsiloError if the value is
    invalid.

    Args:
        name: the value's name in error messages
        form: the function that serialised the value
    """
    try:
        found = checked(Signature, json.loads(text), name)
        if form(found) != text:
            raise ValueError("medsilo did not write the file")
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
    """Sign a value, write it to a file, and return the key's fingerprint."""
    made = signed(content, key)
    write_text(path, _written(made).decode())
    return fingerprint(made.key)


def _written(signature: Signature) -> bytes:
    return (json.dumps(signature.model_dump(), indent=1, allow_nan=False) + "\n").encode()


def read_signed(path: Path, kind: type[S]) -> tuple[S, str]:
    """Verify a signed file and return its content and the signer's public key, or raise MedsiloError if the file is
    invalid.
    """
    try:
        there = read_bounded(path, LARGEST)
    except FileNotFoundError as error:
        raise MedsiloError(f"there is no {path.name}; give the folder or file that was signed", str(path)) from error
    except (OSError, ValueError) as error:
        raise MedsiloError(f"{path.name} is damaged or not signed ({type(error).__name__})", str(path)) from error
    return opened(there, kind, path.name, _written)


def read_own(path: Path, kind: type[S], key: PrivateKey | UseKey) -> S:
    """Read a file that the given key signed; raise MedsiloError if another key signed the file."""
    content, _ = read_signed(path, kind)
    # The whole file is compared, because the signature does not cover the certification of the key.
    if read_bounded(path, LARGEST) != _written(signed(content, key)):
        raise MedsiloError(f"{path.name} was changed after it was signed, or another key signed it", str(path))
    return content


def read_of_kit(path: Path, kind: type[S], kit: KitFiles, use: KeyPurpose) -> S:
    """Read a file that a kit's key signed. If the earlier key of a renewed kit signed the file, the new key signs the
    file again.
    """
    key = kit.key_for(use)
    try:
        return read_own(path, kind, key)
    except MedsiloError:
        before = kit.earlier_key_for(use)
        if before is None:
            raise
        content = read_own(path, kind, before)
        write_signed(path, content, key)
        return content


def hashes_in(folder: Path, but: str) -> Iterator[tuple[str, str]]:
    """Yield the name and SHA-256 of each file in a folder and its subfolders, except the file named `but`."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise MedsiloError(f"{name} is a link to another place; get the folder again from its signer", str(path))
        if path.is_file() and name != but:
            with path.open("rb") as file:
                yield name, hashlib.file_digest(file, "sha256").hexdigest()
