"""Tensors that a site has already are not sent again: a mark stands for each, both to the site and back.

A mark is the beginning of a tensor's bytes and the SHA-256 of its form and all its bytes. The site keeps the tensors of
the last order on its disk and says their marks; the server sends a mark alone where its own tensor has the same. What
training left as it was given goes back by its name. So the server keeps marks, and no tensors. Where the plan says so,
what has changed goes both ways as its difference to what the site was given: `last_orders` is the server's part of it.

Nobody is believed. The site compares the hash of what it puts in a mark's place, and a site that says what is not so
gets marks for tensors that it lacks. It can only name what it was itself given in the same round.
"""

import hashlib
import json
import shutil
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medsilo.core.errors import Lacks, MedsiloError, Refused
from medsilo.core.files import make_folder, write_text
from medsilo.core.spill import TYPES, bytes_of
from medsilo.core.tensors import Groups
from medsilo.core.text import plain
from medsilo.federation.difference import FiledTensors
from medsilo.runs.messages import MARK, MOST_MARKS, Parcel, held
from medsilo.runs.paths import RECEIVED

SMALLEST = 4096  # bytes of a tensor; a smaller one is sent as fast as its mark
BEGINNING = 8  # bytes of a tensor that stand in its mark
INDEX = "index.json"
ORDERS = ("round", "deliver", "try", "test")  # requests whose tensors are kept
KINDS = {name: kind for kind, name in TYPES.items()}
NO_BASE = "what came as a difference does not make the tensor that was meant; it has to be sent whole"
SPARED = 2 * MARK  # bytes that a difference has to spare: it is told with two marks

Marks = Mapping[str, Mapping[str, str]]  # by group and tensor


def mark_of(tensor: Tensor) -> str:
    """Return the mark of a tensor on the CPU."""
    content = bytes_of(tensor)
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(content)
    return content[:BEGINNING].hex() + found.hexdigest()


def kept_in(path: Path, mark: str, kind: torch.dtype, shape: Sequence[int]) -> Tensor | None:
    """Return the tensor of a mark from its file; None where that is gone or is another one."""
    with suppress(OSError, ValueError, RuntimeError, TypeError):
        content = bytearray(path.stat().st_size)
        with path.open("rb") as file:
            file.readinto(content)
        tensor = torch.frombuffer(content, dtype=kind).reshape(shape)
        if mark_of(tensor) == mark:
            return tensor
    return None


def may_differ(tensor: Any) -> bool:
    """Return whether a tensor may be sent as a difference: whatever its bits are, they are a number."""
    return may_be_named(tensor) and tensor.dtype is not torch.bool


def may_be_named(tensor: Any) -> bool:
    """Return whether a mark may stand for a tensor."""
    return (
        isinstance(tensor, Tensor)
        and tensor.nbytes >= SMALLEST
        and tensor.dtype in TYPES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )


# ---------------------------------------------------------------------------------------------------- at the server
class KnownTensors:
    """The marks of what each site has, and those that stood in the last order to it."""

    def __init__(self, sealed: bool = False, all_marked: bool = False) -> None:
        """sealed: what sites send is, and never named; all_marked: what has changed has a mark, too."""
        self.sealed, self.all_marked = sealed, all_marked
        self.held: dict[str, Marks] = {}  # by site, as it says; only of sites that keep copies
        self.told: dict[str, Marks] = {}
        self._marks: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # of tensors that several sites get

    def confirm(self, site: str, holds: Marks | None) -> None:
        """Note what a site says that it has."""
        if holds is None:
            self.held.pop(site, None)
            return
        self.held[site] = {
            group: {name: sys.intern(mark) for name, mark in own.items()} for group, own in holds.items()
        }

    def may_lack(self, site: str) -> None:
        """Send a site all tensors again in its next order."""
        if site in self.held:
            self.held[site] = {}

    def shorten(self, site: str, groups: Groups) -> tuple[Groups, dict[str, dict[str, str]]]:
        """Return what has to be sent of an order to a site, and the marks of what it may keep or has."""
        held, left = self.held.get(site), MOST_MARKS
        told: dict[str, dict[str, str]] = {}
        if held is None:
            self.told.pop(site, None)
            return groups, told
        self._marks = {key: value for key, value in self._marks.items() if value[0]() is not None}
        sent: Groups = {}
        for group, tensors in groups.items():
            has = held.get(group, {})
            marks = {name: self._mark(tensor, has.get(name)) for name, tensor in tensors.items()}
            named = dict(list({name: mark for name, mark in marks.items() if mark}.items())[:left])
            left -= len(named)
            sent[group] = {name: tensor for name, tensor in tensors.items() if named.get(name, "") != has.get(name)}
            if named:
                told[group] = named
        self.told[site] = told
        return sent, told

    def _mark(self, tensor: Tensor, has: str | None) -> str:
        """Return a tensor's mark; none for one that is not worth it, or, unless all are marked, begins in another way
        than what a site has: training has changed it."""
        if not may_be_named(tensor):
            return ""
        if has is not None and not self.all_marked and bytes_of(tensor)[:BEGINNING].hex() != has[: 2 * BEGINNING]:
            return ""
        known = self._marks.get(id(tensor))
        if known and known[0]() is tensor:
            return known[1]
        mark = sys.intern(mark_of(tensor))
        self._marks[id(tensor)] = weakref.ref(tensor), mark
        return mark

    def whole(self, site: str, groups: Groups, same: Mapping[str, list[str]], order: Groups) -> Groups:
        """Return an answer with what it names in its place; raises Refused for what was not named to it in this round.

        order: that round's tensors, which the server has anyway.
        """
        if not same:
            return groups
        told = self.told.get(site, {})
        filled = {group: dict(tensors) for group, tensors in groups.items()}
        for group, names in same.items():
            for name in names:
                what = plain(f"{group}/{name}", 80)
                if self.sealed or group not in filled or name not in told.get(group, {}):
                    raise Refused(f"it names {what}, which it was not given by its mark in this round")
                if name in filled[group]:
                    raise Refused(f"it names {what} and sends it, or names it twice")
                filled[group][name] = order[group][name]
        return filled


# ---------------------------------------------------------------------------------------------------- at a site
class ReceivedTensors:
    """Copies of the tensors of the last order, on a site's disk, each in a file that its mark names."""

    def __init__(self, folder: Path, differences: bool = False) -> None:
        """folder: the site's, of the study; differences: whether the plan lets tensors travel as such."""
        self.folder, self.differences = folder / RECEIVED, differences
        self.holds: dict[str, dict[str, str]] = {}
        self.forms: dict[str, tuple[str, list[int]]] = {}  # by mark: type and shape
        self.given: Groups = {}  # of the order that is worked at: what may go back by its name
        self.based: dict[str, dict[str, str]] = {}  # or its marks, where the server knows differences to it
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads((self.folder / INDEX).read_text())
            self.forms = {mark: (str(kind), list(shape)) for mark, (kind, shape) in found["forms"].items()}
            self.holds = held(found["holds"]) or {}

    def open(self, order: Parcel) -> Parcel:
        """Return an order with all its tensors; raises Lacks where one that it names is not here any more."""
        facts = {key: value for key, value in order.facts.items() if key not in ("marks", "bases")}
        marks, bases = (held(order.facts.get(key, {})) for key in ("marks", "bases"))
        if marks is None or bases is None or (bases and not self.differences):
            raise Refused("the server's order names tensors in a form that is not known")
        groups = {group: dict(tensors) for group, tensors in order.groups.items()}
        for group, tensors in self._unpacked(groups, bases, marks).items():
            groups[group] |= tensors
        for group, named in marks.items():
            own = groups.setdefault(group, {})
            own |= {name: self._kept(mark) for name, mark in named.items() if name not in own}
        if groups and facts.get("task") in ORDERS:
            self._take(_worth_keeping(groups), marks)
        return Parcel(groups, facts, order.samples, order.metrics)

    def _take(self, order: Mapping[str, Mapping[str, tuple[str, Tensor]]], marks: Marks) -> None:
        """Keep an order, and note what of it is as the server told it."""
        self._keep(order)
        given = {
            group: {name: tensor for name, (mark, tensor) in own.items() if marks.get(group, {}).get(name) == mark}
            for group, own in order.items()
        }
        if self.differences:  # from the disk, so that they are not in memory while the site trains
            self.based = {group: {name: order[group][name][0] for name in own} for group, own in given.items()}
        else:
            self.given = given

    def _unpacked(self, groups: Groups, bases: Marks, marks: Marks) -> Groups:
        """Return the tensors that were sent as differences to what is here; raises Lacks where they are not so."""
        filed = FiledTensors(self.folder)
        try:
            for group, named in bases.items():
                for name, mark in named.items():
                    filed.put(group, name, self._kept(mark), groups[group][name])
            found = filed.tensors()
        except (MedsiloError, KeyError) as error:
            raise Lacks(NO_BASE) from error
        for group, tensors in found.items():
            if any(mark_of(tensor) != marks.get(group, {}).get(name) for name, tensor in tensors.items()):
                raise Lacks(NO_BASE)
        return found

    def close(self, answer: Parcel, names: bool) -> Parcel:
        """Return an answer as it leaves: it says what is held, and, if it may, names what is as it was given and sends
        differences."""
        groups, told = self._shortened(answer.groups) if names else (answer.groups, {})
        self.given, self.based = {}, {}
        return Parcel(groups, {**answer.facts, "holds": self.holds, **told}, answer.samples, answer.metrics)

    def _shortened(self, groups: Groups) -> tuple[Groups, dict[str, Any]]:
        """Return what has to be sent of an answer, and what is told of the rest."""
        same: dict[str, list[str]] = {}
        sent: Groups = {}
        filed = FiledTensors(self.folder)
        for group, tensors in groups.items():
            left = sent[group] = dict(tensors)
            for name, tensor in sorted(tensors.items()):
                base = self._base(group, name)
                if base is None:
                    continue
                if _are_alike(tensor, base):
                    same.setdefault(group, []).append(name)
                    del left[name]
                elif self.differences:
                    _pack_into(filed, group, name, base, tensor)
        differences: dict[str, dict[str, str]] = {}
        with suppress(MedsiloError):
            for group, packed in filed.tensors().items():
                sent[group] |= packed
                differences[group] = {name: mark_of(groups[group][name]) for name in packed}
        told = {"same": same, "differences": differences}
        return sent, {key: own for key, own in told.items() if own}

    def _base(self, group: str, name: str) -> Tensor | None:
        """Return what was given in this round, where it is here."""
        if (given := self.given.get(group, {}).get(name)) is not None:
            return given
        with suppress(Lacks):
            return self._kept(self.based[group][name]) if name in self.based.get(group, {}) else None
        return None

    def forget(self) -> None:
        """Remove all copies: the study is over here."""
        self.given, self.based = {}, {}
        self._remove()

    def _kept(self, mark: str) -> Tensor:
        """Return a kept tensor, whose bytes are those of its mark."""
        kind, shape = self.forms.get(mark, ("", []))
        tensor = kept_in(self.folder / mark, mark, KINDS[kind], shape) if kind in KINDS else None
        if tensor is None:
            raise Lacks("what this hospital received before is not on its disk any more; it has to be sent again")
        return tensor

    def _keep(self, order: Mapping[str, Mapping[str, tuple[str, Tensor]]]) -> None:
        """Keep an order in the place of the last one.

        A disk that does not take it costs the bytes that are sent again, and no more.
        """
        tensors = {mark: tensor for own in order.values() for mark, tensor in own.values()}
        holds = {group: {name: mark for name, (mark, _) in own.items()} for group, own in order.items() if own}
        forms = {mark: (TYPES[tensor.dtype], list(tensor.shape)) for mark, tensor in tensors.items()}
        if (holds, forms) == (self.holds, self.forms):
            return
        try:
            make_folder(self.folder)
            for mark in forms.keys() - self.forms.keys():
                (self.folder / mark).write_bytes(bytes_of(tensors[mark]))
            write_text(self.folder / INDEX, json.dumps({"holds": holds, "forms": forms}))
            for path in self.folder.iterdir():
                if path.name not in forms and path.name != INDEX:
                    path.unlink()
            self.holds, self.forms = holds, forms
        except (OSError, MedsiloError):
            self._remove()

    def _remove(self) -> None:
        self.holds, self.forms = {}, {}
        shutil.rmtree(self.folder, ignore_errors=True)


def _worth_keeping(groups: Groups) -> dict[str, dict[str, tuple[str, Tensor]]]:
    """Return those tensors of an order for which marks may stand, with their marks."""
    kept: dict[str, dict[str, tuple[str, Tensor]]] = {}
    left = MOST_MARKS
    for group, tensors in groups.items():
        names = [name for name, tensor in tensors.items() if may_be_named(tensor)][:left]
        kept[group] = {name: (mark_of(tensors[name]), tensors[name]) for name in names}
        left -= len(names)
    return kept


def _are_alike(one: Any, other: Tensor) -> bool:
    """Return whether two tensors are the same, byte for byte: zeros of both signs are not."""
    if not may_be_named(one) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _pack_into(filed: FiledTensors, group: str, name: str, base: Tensor, tensor: Tensor) -> None:
    """Write a tensor as its difference, where that is smaller; a disk that does not take it costs bytes only."""
    if may_differ(tensor) and tensor.dtype == base.dtype and tensor.shape == base.shape:
        with suppress(MedsiloError):
            filed.put_packed(group, name, base, tensor, SPARED)
