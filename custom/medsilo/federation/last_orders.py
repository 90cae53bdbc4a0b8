"""The orders that sites were sent last, on the server's disk, so that the next one goes as differences to it.

Each content lies there once, for all sites that were given it. A site gets differences to what it was itself given in
this round or in the one before: so that it learns nothing by saying that it holds what others were given.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import make_folder
from medsilo.core.spill import bytes_of
from medsilo.core.tensors import Groups
from medsilo.core.text import plain
from medsilo.federation.difference import FiledTensors
from medsilo.federation.known import SPARED, Marks, kept_in, mark_of, may_differ
from medsilo.runs.paths import ORDERS

Pair = tuple[str, str]  # the marks of a tensor's base and of the tensor


class LastOrders:
    """The server's side of differences; nothing where the plan has none."""

    def __init__(self, run: Path, used: bool) -> None:
        """run: the study's folder."""
        self.folder, self.used = run / ORDERS, used
        self.given: dict[str, set[str]] = {}  # by site, the marks of its order in this exchange
        self.before: dict[str, set[str]] = {}  # and in the one before
        self.packed: dict[Pair, Tensor | None] = {}  # of this exchange; None where a difference spares nothing

    def begin(self) -> None:
        """Begin another exchange; keep what was given in the last one that had tensors."""
        self.packed = {}
        if not self.given:
            return
        self.before, self.given = self.given, {}
        wanted = set().union(*self.before.values())
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name not in wanted:
                    path.unlink()

    def shorten(self, site: str, groups: Groups, marks: Marks, held: Marks) -> tuple[Groups, dict[str, dict[str, str]]]:
        """Return what is sent of an order with differences in the place of tensors, and the marks of their bases.

        groups: what is sent at all; marks: of the whole order; held: what the site says that it has.
        """
        if not self.used or not any(marks.values()):
            return groups, {}
        packed, known = self.packed, self.before.get(site, set()) | self.given.get(site, set())
        wanted = {
            (group, name): (base, marks[group][name])
            for group, tensors in groups.items()
            for name in tensors
            if name in marks.get(group, {}) and (base := held.get(group, {}).get(name, "")) in known
        }
        self.given[site] = {mark for own in marks.values() for mark in own.values()}
        packed |= self._pack(
            {pair: groups[group][name] for (group, name), pair in wanted.items() if pair not in packed}
        )
        sent = {group: dict(tensors) for group, tensors in groups.items()}
        bases: dict[str, dict[str, str]] = {}
        for (group, name), pair in wanted.items():
            if (difference := packed[pair]) is not None:
                sent[group][name] = difference
                bases.setdefault(group, {})[name] = pair[0]
        for group, named in marks.items():
            for name, mark in named.items():
                if name in groups.get(group, {}):
                    self._keep(mark, groups[group][name])
        return sent, bases

    def _pack(self, wanted: Mapping[Pair, Tensor]) -> dict[Pair, Tensor | None]:
        """Return the differences; None for those that spare nothing or can't be made."""
        packed: dict[Pair, Tensor | None] = dict.fromkeys(wanted)
        filed = FiledTensors(self.folder)
        with suppress(MedsiloError):
            for (base, mark), tensor in wanted.items():
                before = kept_in(self.folder / base, base, tensor.dtype, tensor.shape) if may_differ(tensor) else None
                if before is not None:
                    filed.put_packed(base, mark, before, tensor, SPARED)
        with suppress(MedsiloError):
            for base, own in filed.tensors().items():
                packed |= {(base, mark): difference for mark, difference in own.items()}
        return packed

    def _keep(self, mark: str, tensor: Tensor) -> None:
        """Keep a tensor that was sent; a disk that does not take it costs the bytes of the next order, and no more."""
        path = self.folder / mark
        if not may_differ(tensor) or path.exists():
            return
        try:
            make_folder(self.folder)
            path.write_bytes(bytes_of(tensor))
        except OSError:
            with suppress(OSError):
                path.unlink()

    def whole(self, groups: Groups, differences: Marks, told: Marks, order: Groups) -> Groups:
        """Return an answer with its tensors in the place of differences; raises Refused unless they are as it says.

        told: the marks that stood in the site's order; order: its tensors, which the server has anyway.
        """
        if not differences:
            return groups
        filed = FiledTensors()
        for group, named in differences.items():
            for name in named:
                what = plain(f"{group}/{name}", 80)
                if not self.used or name not in told.get(group, {}) or not may_differ(order[group][name]):
                    raise Refused(f"it sends {what} as a difference to what it was not given in this round")
                try:
                    filed.put(group, name, order[group][name], groups.get(group, {}).get(name))
                except Refused as error:
                    raise Refused(f"its difference of {what}: {error}") from error
        filled = {group: dict(tensors) for group, tensors in groups.items()}
        for group, tensors in filed.tensors().items():
            for name, tensor in tensors.items():
                if mark_of(tensor) != differences[group][name]:
                    raise Refused(f"its difference of {plain(f'{group}/{name}', 80)} makes another tensor than it says")
                filled[group][name] = tensor
        return filled

    def forget(self) -> None:
        """Remove what was kept: the study is over."""
        self.packed = {}
        shutil.rmtree(self.folder, ignore_errors=True)
