"""Signed files: a JSON value, the public key of who signed it, and the signature."""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import Field, ValidationError

from medsilo.extend import MedsiloError, Section, checked, in_words, signing, write_json

LARGEST = 4 << 20  # bytes of a signed file
Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{20,100}={0,2}$")]
S = TypeVar("S", bound=Section)


class Signature(Section):
    """A signed file, as it is written."""

    content: dict[str, Any]
    key: Base64
    signature: Base64


def own_key(path: Path) -> Ed25519PrivateKey:
    """Return the Ed25519 key in a PEM file that only its owner reads; it is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = signing.own_key(path, "releases and receipts")
    if not isinstance(key, Ed25519PrivateKey):
        raise MedsiloError("--key: this is no Ed25519 key; name a file that is not there, and one is made", str(path))
    return key


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the public key of a private one."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def fingerprint(public: bytes) -> str:
    """Return what people compare on the telephone: 32 hexadecimal digits of the key's SHA-256, in fours."""
    digits = hashlib.sha256(public).hexdigest()[:32]
    return "-".join(digits[place : place + 4] for place in range(0, 32, 4))


def canonical(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a value that are signed: the same for equal values."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signed_bytes(kind: type[Section], content: Mapping[str, Any]) -> bytes:
    """Return what is signed: a signature of one kind of file is of no use for another."""
    return f"medsilo {kind.__name__} 1\n".encode() + canonical(content)


def write_signed(path: Path, content: Section, key: Ed25519PrivateKey) -> None:
    """Write a value with its signature."""
    told = content.model_dump(mode="json")
    made = [
        base64.b64encode(part).decode() for part in (public_bytes(key), key.sign(signed_bytes(type(content), told)))
    ]
    write_json(path, {"content": told, "key": made[0], "signature": made[1]})


def read_signed(path: Path, kind: type[S]) -> tuple[S, bytes]:
    """Return what a signed file says, and who signed it; raises MedsiloError for any other file."""
    try:
        if path.stat().st_size > LARGEST:
            raise MedsiloError(f"{path.name} has more than {LARGEST} bytes; it is none of medsilo's", str(path))
        found = checked(Signature, json.loads(path.read_text("utf-8")), path.name)
        public = base64.b64decode(found.key)
        Ed25519PublicKey.from_public_bytes(public).verify(
            base64.b64decode(found.signature), signed_bytes(kind, found.content)
        )
        return checked(kind, found.content, path.name), public
    except InvalidSignature as error:
        raise MedsiloError(f"{path.name} was altered after it was signed, or the signature is forged") from error
    except ValidationError as error:
        raise MedsiloError(
            f"{path.name}: {in_words(error, Signature if error.title == Signature.__name__ else kind)}", str(path)
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise MedsiloError(
            f"{path.name} cannot be read as a signed file ({type(error).__name__})", str(path)
        ) from error
