"""A hospital's privacy ledger, which records the differential privacy cost of every answer before the answer is sent.

A hospital has one ledger file per data set. Each line of the ledger is a signed entry with the hash of the previous
line. A second file, the head, contains the number of lines and the hash of the last line. An answer leaves the hospital
only after its entry is on disk. If the process dies before the answer is sent, the ledger charges an answer that no
other party received.

A key of the hospital's startup kit signs the ledger's entries. If a kit is renewed with a new key, either the old key
signs the new key, or the hospital's engineer accepts the new key. If a hospital has no kit, the key is in the ledger's
folder, and anybody who may write to this folder can forge entries. The ledger detects lines that were changed, removed,
added or swapped, a truncated file, and entries that were signed with another key. The ledger does not detect changes
that the owner of the key makes. If somebody restores an earlier state of ledger and head, the copies of the head, in
the kit and at servers, show this.
"""

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import not_
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal

from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import FILE, sync_names
from medsilo.core.section import Section
from medsilo.privacy.accounting import counted, epsilon_of, together
from medsilo.privacy.mechanisms import Charge, Mechanism
from medsilo.site.kit import KitFiles
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import LockedFolder, QueryBudget
from medsilo.site.settings import PrivacyRequirements
from medsilo.site.signed import S, Signature, line_of, opened, read_signed, signed, write_signed
from medsilo.site.signing import PrivateKey, UseKey, own_key, public_text

# name of the ledger's folder, which is in the folder of the query budget; name of the file of a key
FOLDER_NAME, OWN_KEY, LOCK = "ledger", "key.pem", "ledger.lock"
OF = "this hospital's privacy ledger"
WAIT = 120.0  # seconds to wait for another process's lock
START = "0" * 64  # stands in the first line instead of the hash of the previous line
KEPT = "ledger-{}.head.json"  # a copy of the head in the kit, one for each data set
TAKEN_OVER = "a renewed kit's key signs from here on, which the one before it let in"
ACCEPTED = "the engineer looked at it: this key signs from here on"
MOST_CHARGES = 10_000
SLACK = 1e-9  # tolerance of ε for rounding errors of sums
WHOLE = "the whole study"
ABOUT = 0.01  # tolerance of ε while the cost of a study is only estimated
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=200)]
Kind = Literal["opened", "planned", "charged", "sent"]


class Spending(Section):
    study: Text
    plan: Text
    method: Text
    lead: Text = ""  # the submitter of the study, if known


class LedgerEntry(Section):
    number: int = Field(ge=0)
    previous: Hash
    time: int
    kind: Kind
    data: Text
    # the study of the entry; None if the entry begins the ledger, or if the entry introduces a new key
    spending: Spending | None = None
    what: Text = ""
    # identifies the answer, so that an answer that is sent a second time is not charged a second time
    attempt: Text = ""
    charges: tuple[Charge, ...] = Field((), max_length=MOST_CHARGES)
    delta: float | None = None  # the hospital's δ
    epsilon: float | None = None  # ε of all charges up to this entry; None if ε has no bound
    # Only for a training script's answer: the bits of each type of content, and ρ of the noise that was added to the
    # script's update.
    bits: dict[Text, Annotated[int, Field(ge=0)]] = Field({}, exclude_if=not_)
    update_rho: Annotated[float, Field(gt=0)] | None = Field(None, exclude_if=not_)
    handed: str = Field("", exclude_if=not_)  # the public key that this entry's signer allows for the next entry


class _Head(Section):
    began: Hash  # hash of the ledger's first line
    lines: int = Field(ge=0)
    hash: Hash  # hash of the ledger's last line
    time: int


@dataclass(frozen=True)
class LedgerStanding:
    entries: tuple[LedgerEntry, ...]
    head: str  # hash of the ledger's last line
    # True if the last line is incomplete. An incomplete line charges nothing, because its answer was not sent yet.
    torn: bool
    keys: tuple[str, ...] = ("",)  # keys[n]: the signing key after n lines
    hashes: tuple[str, ...] = (START,)  # hashes[n]: the hash after n lines

    @cached_property
    def charged(self) -> Counter[Mechanism]:
        return counted(charge for entry in self.entries if entry.kind == "charged" for charge in entry.charges)

    def of(self, study: str) -> Counter[Mechanism]:
        return counted(charge for entry in self._of(study, "charged") for charge in entry.charges)

    def studies(self) -> list[str]:
        """Return the names of all studies with planned or actual charges, in the order of their first entry."""
        return list(dict.fromkeys(_study(entry) for entry in self.entries if entry.spending))

    def most_of(self, study: str) -> Counter[Mechanism]:
        """For each mechanism, return the larger of the study's charges so far and its planned charges."""
        planned = self._of(study, "planned")
        return self.of(study) | (counted(planned[-1].charges) if planned else Counter())

    def has(self, study: str, attempt: str) -> bool:
        return any(entry.attempt == attempt for entry in self._of(study, "charged"))

    def _of(self, study: str, kind: Kind) -> list[LedgerEntry]:
        return [entry for entry in self.entries if entry.kind == kind and _study(entry) == study]

    def epsilon(self, delta: float) -> float:
        return epsilon_of(self.charged, delta)


class Ledger:
    def __init__(
        self,
        path: Path,
        data: str,
        key: PrivateKey | UseKey | None = None,
        kit: Path | None = None,
        files: KitFiles | None = None,
    ) -> None:
        """Prepare a data set's ledger. The ledger's files do not exist before the first entry is written.

        Args:
            path: folder of the hospital's query budget
            key: signing key of the kit, or None without a kit, where the key is in the ledger's folder
            kit: folder of the kit, which contains a copy of the head
            files: key files of the kit, from which the key is read again if the kit is renewed during a study
        """
        self.folder, self.data, self._fixed, self._files = path / FOLDER_NAME, data, key, files
        self.file, self.head = self.folder / f"{data}.jsonl", self.folder / f"{data}.head.json"
        self._heads = [self.head, *([kit / KEPT.format(data)] if kit else [])]
        self._folder = LockedFolder(self.folder, LOCK, WAIT, "this hospital's privacy ledger", "nothing leaves")
        # cache: for each verified line, the line's entry and signer
        self._read: dict[bytes, tuple[LedgerEntry, str]] = {}

    @property
    def exists(self) -> bool:
        return self.file.exists() or any(head.exists() for head in self._heads)

    # ------------------------------------------------------------------ writing
    def plan(self, study: "CountedStudy", planned: Sequence[Charge]) -> None:
        """Admit a study: reserve the study's planned charges while the study runs. Raise Refused if the privacy budget
        is too small for the planned charges.
        """
        with self._opened() as standing:
            study.check(standing, standing.of(study.name) | counted(planned))
            self._append(standing, "planned", study, WHOLE, "", together(planned, WHOLE))

    def expect(self, study: "CountedStudy", planned: Sequence[Charge]) -> None:
        """Raise Refused if a study's estimated charges would exceed the privacy budget. If the study was admitted
        earlier, the study's recorded charges are checked instead of estimated charges.
        """
        with self._opened() as standing:
            study.check(standing, standing.most_of(study.name) or counted(planned), ABOUT)

    def afford(self, study: "CountedStudy", charges: Sequence[Charge]) -> None:
        """Raise Refused if the given charges would exceed the privacy budget; the method writes no entry."""
        with self._opened() as standing:
            study.check(standing, standing.of(study.name) + counted(charges))

    def charge(self, study: "CountedStudy", purpose: str, attempt: str, charges: Sequence[Charge]) -> None:
        """Record the charges of an answer on disk before the answer is sent; raise Refused if the charges exceed the
        privacy budget.

        Args:
            attempt: identifies the answer, which is charged only once
        """
        with self._opened() as standing:
            if standing.has(study.name, attempt):
                return
            study.check(standing, standing.of(study.name) + counted(charges))
            self._append(standing, "charged", study, purpose, attempt, charges)

    def enter(self, study: "CountedStudy", purpose: str, bits: Mapping[str, int], update_rho: float | None) -> None:
        """Record a training script's answer, whose cost in ε is unknown, before the answer is sent."""
        with self._opened() as standing:
            self._append(standing, "sent", study, purpose, bits=dict(bits), update_rho=update_rho)

    def accept(self, old: UseKey | None = None) -> bool:
        """After the hospital's engineer has inspected and accepted the ledger, let the present key sign all further
        entries.

        The method returns True if the ledger was empty, or if the key of the last entry signed the present key.
        """
        with self._folder.alone():
            standing = self._lines_read()
            before = standing.entries and standing.keys[-1]
            own = self.folder / OWN_KEY
            keys = [self._key, *([old] if old else []), *([own_key(own, OF)] if own.exists() else [])]
            handing = next((key for key in keys if public_text(key) == before), None)
            if handing:
                Ledger(self.folder.parent, self.data, handing)._append(standing, "opened", handed=self._public)
            self._append(self._lines_read(), "opened", purpose=ACCEPTED)
            return bool(handing) or not before

    def _take_over(self) -> None:
        """If the kit was renewed, and the last line is signed with the kit's old key, sign the new key with the old
        key.
        """
        lines, _ = _lines(self.file)
        if not lines or self._files is None:
            return
        _, last = _opened(lines[-1], LedgerEntry, f"line {len(lines)}")
        if last == self._public or not (before := self._files.earlier_key_for("ledger")):
            return
        handing = Ledger(self.folder.parent, self.data, before)
        handing._heads = self._heads
        if last == handing._public:
            handing._append(handing.read(), "opened", handed=self._public)
            self._append(self._lines_read(), "opened", purpose=TAKEN_OVER)

    @contextmanager
    def _opened(self) -> Iterator[LedgerStanding]:
        """Within the context, lock the ledger; yield the ledger's verified content."""
        with self._folder.alone():
            self._take_over()
            if not self.exists:
                self._write_head(0, START)
            standing = self.read()
            if not standing.entries:
                # a random value, so that no two ledgers have the same first line
                self._append(standing, "opened", attempt=token_hex(16))
                standing = self.read()
            elif standing.keys[-1] != self._public:  # the key file was missing when the ledger was read
                raise MedsiloError(NOT_OURS)
            yield standing

    def _append(
        self,
        standing: LedgerStanding,
        kind: Kind,
        study: "CountedStudy | None" = None,
        purpose: str = "",
        attempt: str = "",
        charges: Sequence[Charge] = (),
        handed: str = "",
        **sent: Any,
    ) -> None:
        delta = study.demands.delta if study and study.demands else None
        cost = None
        if delta is not None:
            cost = epsilon_of(standing.charged + (counted(charges) if kind == "charged" else Counter()), delta)
        entry = LedgerEntry(
            number=len(standing.entries),
            previous=standing.head,
            time=int(time.time()),
            kind=kind,
            data=self.data,
            spending=study.spending if study else None,
            what=purpose,
            attempt=attempt,
            charges=tuple(charges),
            delta=delta,
            epsilon=cost if cost is not None and math.isfinite(cost) else None,
            handed=handed,
            **sent,
        )
        line = line_of(signed(entry, self._key))
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE)
        with os.fdopen(descriptor, "rb+") as file:
            if standing.torn:
                file.truncate(sum(len(whole) + 1 for whole in _lines(self.file)[0]))
            file.write(line + b"\n")
            file.flush()
            os.fsync(descriptor)
        sync_names(self.folder)
        self._write_head(entry.number + 1, _hash(line))

    def _write_head(self, lines: int, last: str) -> None:
        first = next(iter(_lines(self.file)[0]), b"")
        head = _Head(began=_hash(first), lines=lines, hash=last, time=int(time.time()))
        for file in self._heads:
            write_signed(file, head, self._key)

    # ------------------------------------------------------------------ reading
    def standing(self) -> LedgerStanding:
        """Lock and read the ledger, or raise MedsiloError if somebody changed the ledger."""
        if not self.exists:
            return LedgerStanding((), START, False)
        with self._folder.alone():
            self._take_over()
            return self.read()

    def read(self) -> LedgerStanding:
        """Read the ledger and verify each line.

        Raises MedsiloError if lines are changed or missing, or if the last line was not signed with this hospital's
        key.
        """
        standing = self._lines_read()
        if standing.entries and self._trusted not in ("", standing.keys[-1]):
            raise MedsiloError(NOT_OURS)
        for file in self._heads:
            if file == self.head or file.exists() or standing.entries:
                self._check_head(file, standing)
        return standing

    def _lines_read(self) -> LedgerStanding:
        lines, torn = _lines(self.file)
        given = self._given
        entries: list[LedgerEntry] = []
        keys, hashes = [""], [START]
        for number, line in enumerate(lines):
            if line not in self._read:
                self._read[line] = _opened(line, LedgerEntry, f"line {number + 1}")
            entry, key = self._read[line]
            if entry.number != number or entry.previous != hashes[-1] or entry.data != self.data:
                raise MedsiloError(_changed(f"line {number + 1} does not follow the one before it"))
            # A line may be signed with a new key only if the previous key signed the new key, or if the engineer
            # accepted it.
            if entries and key not in (keys[-1], entries[-1].handed) and not given:
                raise MedsiloError(_changed(f"line {number + 1} is of a key that the one before it did not let in"))
            entries.append(entry)
            hashes.append(_hash(line))
            keys.append(key)
        return LedgerStanding(tuple(entries), hashes[-1], torn, tuple(keys), tuple(hashes))

    def _check_head(self, file: Path, standing: LedgerStanding) -> None:
        where = "its head" if file == self.head else "the head that the kit keeps"
        try:
            head, key = read_signed(file, _Head)
        except MedsiloError as error:
            told = f"{where} is not there, or not as it was signed"
            raise MedsiloError(_changed(told), private=str(error)) from error
        number, there = head.lines, len(standing.entries)
        if there < number:
            raise MedsiloError(_changed(f"{number} lines were written, and {there} are there"))
        if standing.hashes[number] != head.hash:
            raise MedsiloError(_changed(f"line {number} is not the one that was written"))
        if key != (standing.keys[number] or self._trusted or key):
            raise MedsiloError(_changed(f"{where} is signed by another key than its lines"))

    def signed_head(self) -> dict[str, Any]:
        """Return the ledger's signed head; a server stores a copy of the head."""
        with self._folder.alone():
            said = json.loads(self.head.read_text("utf-8"))
        return {**said["content"], "signature": said["signature"]}

    def check_heads(self, heads: Sequence[Mapping[str, Any]]) -> None:
        """Raise Refused if a head was sent to a server earlier, and the present ledger does not continue the ledger of
        this head.

        Heads of other ledgers, of unknown signers, and from before the engineer's last acceptance are ignored.
        """
        standing = self.standing()
        accepted = max((entry.time for entry in standing.entries if entry.what == ACCEPTED), default=-1)
        for head in heads:
            said = {name: head[name] for name in _Head.model_fields}
            if len(standing.hashes) < 2 or said["began"] != standing.hashes[1] or said["time"] <= accepted:
                continue
            if not any(_signed_by(key, said, head["signature"]) for key in set(standing.keys[1:])):
                continue
            number = said["lines"]
            if number > len(standing.entries) or standing.hashes[number] != said["hash"]:
                told = f"a server knows {number} lines, and here are {len(standing.entries)} others"
                raise Refused(_changed(told))

    # ------------------------------------------------------------------ keys and locks
    @property
    def _given(self) -> PrivateKey | UseKey | None:
        return self._files.key_for("ledger") if self._files else self._fixed

    @property
    def _key(self) -> PrivateKey | UseKey:
        return self._given or self._own

    @cached_property
    def _own(self) -> PrivateKey:
        return own_key(self.folder / OWN_KEY, OF)

    @property
    def _public(self) -> str:
        return public_text(self._key)

    @property
    def _trusted(self) -> str:
        """The public key that must have signed the last line; an empty string if the key is unknown."""
        return self._public if self._given or (self.folder / OWN_KEY).exists() else ""


def _opened(text: bytes, kind: type[S], purpose: str) -> tuple[S, str]:
    try:
        return opened(text, kind, purpose)
    except MedsiloError as error:
        raise MedsiloError(_changed(str(error)), error.private) from error


def _signed_by(key: str, head: Mapping[str, Any], signature: str) -> bool:
    with suppress(MedsiloError):
        opened(line_of(Signature(content=dict(head), key=key, signature=signature)), _Head, "the head")
        return True
    return False


@dataclass(frozen=True)
class CountedStudy:
    """A study in a privacy ledger, and the privacy that the hospital demands for it."""

    spending: Spending
    demands: PrivacyRequirements | None = None  # None means that the charge has no limit
    # a function that returns True for a running study, whose planned charges stay reserved
    runs: Callable[[str], bool] = lambda study: False

    @property
    def name(self) -> str:
        return self.spending.study

    def check(self, standing: LedgerStanding, counts: Mapping[Mechanism, int], over: float = SLACK) -> None:
        """Raise Refused if the charges of this study and of all other studies together exceed the hospital's ε.

        Args:
            counts: the total charges of this study
        """
        if self.demands is None:
            return
        demands, where = self.demands, f"in its {FILE_NAME}"
        others: Counter[Mechanism] = Counter()
        for other in standing.studies():
            if other != self.name:
                others += standing.most_of(other) if self.runs(other) else standing.of(other)
        total = epsilon_of(others + Counter(counts), demands.delta)
        if total > demands.epsilon + over:
            alone, spent = epsilon_of(counts, demands.delta), epsilon_of(others, demands.delta)
            raise Refused(
                f"the study costs {_as_epsilon(alone)} at δ = {demands.delta:g}, with earlier studies of these data "
                f"{_as_epsilon(total)}; this hospital allows {demands.epsilon:g} (privacy.epsilon {where}), "
                f"{_as_epsilon(spent)} spent or reserved. Ask for fewer rounds or more noise"
            )


def _as_epsilon(epsilon: float) -> str:
    return f"ε = {epsilon:.3g}" if math.isfinite(epsilon) else "more ε than can be counted"


def _study(entry: LedgerEntry) -> str:
    return entry.spending.study if entry.spending else ""


def _lines(file: Path) -> tuple[list[bytes], bool]:
    """Return the complete lines, and True if an incomplete line follows them.

    After a power failure, the beginning of the last line may read as zeros although its end is on disk.
    """
    try:
        content = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise MedsiloError(_changed("it cannot be read"), private=f"{type(error).__name__}") from error
    *lines, rest = content.split(b"\n")
    if lines and not rest and b"\0" in lines[-1]:
        rest = lines.pop()
    return lines, bool(rest)


def _changed(how: str) -> str:
    return (
        f"this hospital's privacy ledger was changed or is damaged: {how}; nothing leaves until it is put back from a "
        "copy, or its engineer looks at it and says so (medsilo ledger show, accept)"
    )


# This error also occurs if the hospital's ledger is older than its kit, so that another key signed the ledger.
NOT_OURS = _changed("it is signed by another key than this hospital's own, which is the kit's where there is one")


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def ledgers(book: Path | None, kit: Path | None = None) -> list[str]:
    """Return the identifiers of all data sets with a ledger. A data set also counts if its ledger file is missing, but
    the kit still has a copy of the ledger's head.
    """
    before, after = KEPT.split("{}")
    known = kit.glob(KEPT.format("*")) if kit else ()
    found = {path.name.removeprefix(before).removesuffix(after) for path in known}
    there = (book / FOLDER_NAME).glob("*.jsonl") if book else ()
    return sorted({path.stem for path in there} | found)


def ledger_of(budget: QueryBudget, data: str, kit: KitFiles | None) -> Ledger:
    """Return a hospital's ledger for one data set; if the hospital has a kit, the kit's key signs the ledger."""
    return Ledger(budget.folder, data, kit=kit.kit, files=kit) if kit else Ledger(budget.folder, data)
