"""An independent implementation of secure aggregation, written from the documentation with hashlib, numpy and
cryptographic primitives.

`python -m tests.sealed_vectors` writes a JSON file with fixed inputs, and with the outputs that every implementation
must give.
"""

import hmac
import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

FILE = Path(__file__).parent / "sealed-vectors.json"
LABEL, PRIME, CHECK = "medsilo sealing 1", 2**256 + 297, 4
STUDY, PLAN, SITES, THRESHOLD, ROUND = "vectors", "plan", ("east", "north", "south", "west"), 3, 7
NAME, BOUND, DROPPED = "model", 16.0, "west"
NUMBERS = {
    "east": [0.0, 1.0, -1.0, 16.0, -16.0, 0.5, 1e-3],
    "north": [1.5, -2.25, 0.001, 3.0, -0.5, 15.75, 0.0],
    "south": [-1.0, 2.0, 0.125, -3.5, 0.25, -16.0, 7.0],
    "west": [0.3, -0.7, 4.0, 1e-6, 9.5, 2.5, -8.0],
}


def statement(*parts: str | int | bytes) -> bytes:
    written = b""
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        written += {str: b"s", int: b"i", bytes: b"b"}[type(part)] + len(content).to_bytes(8, "big") + content
    return written


def digest(*parts: str | int | bytes) -> bytes:
    return sha256(statement(LABEL, *parts)).digest()


def derive(secret: bytes, *purpose: str | int | bytes) -> bytes:
    """Return 32 bytes of HKDF-SHA256 without salt."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, statement(LABEL, *purpose) + b"\1", "sha256")


def secret_of(site: str, what: str) -> bytes:
    return sha256(f"{site}: {what}".encode()).digest()


def public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, other: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))


def stream(key: bytes, count: int) -> np.ndarray:
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), "<u8")


def share_of(secret: bytes, coefficients: list[int], place: int) -> bytes:
    value = int.from_bytes(secret, "big") + sum(c * place ** (power + 1) for power, c in enumerate(coefficients))
    return (value % PRIME).to_bytes(33, "big")


class Vectors:
    """A round of four hospitals whose keys are hashes of their names."""

    def __init__(self) -> None:
        self.terms = digest("terms", STUDY, PLAN, *SITES, THRESHOLD)
        self.channel = {site: public(secret_of(site, "channel")) for site in SITES}
        self.mask = {site: public(secret_of(site, "mask")) for site in SITES}
        offers = [part for site in SITES for part in (site, self.mask[site])]
        self.context = digest("round", self.terms, ROUND, *offers)
        most = 0.999 * 2.0**63 / len(SITES)
        self.scale = 2.0 ** math.floor(math.log2(most / BOUND))

    def shares(self, dealer: str, reader: str) -> bytes:
        """Return the shares that the site `dealer` gives to `reader`: a share of the seed, and a share of the key for
        pairwise masks.
        """
        found = b""
        for what in ("seed", "mask"):
            drawn = [secret_of(dealer, f"coefficient {power} of {what}") for power in range(1, THRESHOLD)]
            coefficients = [int.from_bytes(own, "big") for own in drawn]
            found += share_of(secret_of(dealer, what), coefficients, SITES.index(reader) + 1)
        return found

    def box(self, sender: str, reader: str) -> bytes:
        about = statement("shares", ROUND, sender, self.mask[sender])
        key = derive(agree(secret_of(sender, "channel"), self.channel[reader]), "box", sender, reader)
        nonce = secret_of(sender, f"nonce for {reader}")[:12]
        return nonce + ChaCha20Poly1305(key).encrypt(nonce, self.shares(sender, reader), about)

    def words(self, site: str) -> np.ndarray:
        whole = np.rint(np.array(NUMBERS[site], np.float32).astype(np.float64) * self.scale)
        words = np.zeros(len(whole) + CHECK, "<i8")
        words[: len(whole)] = whole
        return words.view("<u8")

    def own_mask(self, site: str) -> np.ndarray:
        key = derive(secret_of(site, "seed"), "own", self.context, NAME)
        return stream(key, len(NUMBERS[site]) + CHECK)

    def pair_mask(self, site: str, other: str) -> np.ndarray:
        """Return the mask that the site `site` adds to its numbers for the pair with the site `other`."""
        mine, theirs = SITES.index(site), SITES.index(other)
        secret = agree(secret_of(site, "mask"), self.mask[other])
        key = derive(secret, "pair", self.context, NAME, min(mine, theirs), max(mine, theirs))
        mask = stream(key, len(NUMBERS[site]) + CHECK)
        return mask if mine < theirs else np.zeros_like(mask) - mask

    def masked(self, site: str) -> np.ndarray:
        found = self.words(site) + self.own_mask(site)
        for other in SITES:
            if other != site:
                found = found + self.pair_mask(site, other)
        return found

    def sum(self, sites: tuple[str, ...]) -> np.ndarray:
        total = np.zeros_like(self.words(SITES[0]))
        for site in sites:
            total = total + self.masked(site) - self.own_mask(site)
            for gone in set(SITES) - set(sites):
                total = total - self.pair_mask(site, gone)
        return total

    def facts(self) -> dict[str, Any]:
        kinds = ("channel", "mask", "seed")
        return {
            "secrets": {site: {kind: secret_of(site, kind).hex() for kind in kinds} for site in SITES},
            "numbers": NUMBERS,
            "terms": self.terms.hex(),
            "context": self.context.hex(),
            "boxes": {f"{a} to {b}": sha256(self.box(a, b)).hexdigest() for a in SITES for b in SITES if a != b},
            "own masks": {site: self.own_mask(site).tobytes().hex() for site in SITES},
            "masked": {site: self.masked(site).tobytes().hex() for site in SITES},
            "sum": self.sum(SITES).tobytes().hex(),
            f"sum without {DROPPED}": self.sum(tuple(site for site in SITES if site != DROPPED)).tobytes().hex(),
        }


if __name__ == "__main__":
    FILE.write_text(json.dumps(Vectors().facts(), indent=1) + "\n")
