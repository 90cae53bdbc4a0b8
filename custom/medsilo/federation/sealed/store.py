"""Keep at the server the rounds whose result it cannot read, to give it to the sites that can."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from medsilo.core.tensors import Tensors
from medsilo.federation.sealed.what import Held

PREFIX = "@sealed"  # of keys in a checkpoint; no group has such a name


@dataclass(frozen=True)
class SealedResult:
    """One sealed result: its tensors, and what whoever opens it is told."""

    tensors: dict[str, Tensor]
    held: Held


class SealedStore:
    """Sealed results by group and site, of the last round that concerns each site."""

    def __init__(self) -> None:
        self.agreement = 0  # how often the study has agreed on keys
        self.proofs: list[dict[str, Any]] = []  # who spoilt what: each site has the keys with which it can be checked
        self._kept: dict[str, dict[str, SealedResult]] = {}

    def keep(self, group: str, site: str, kept: SealedResult) -> None:
        """Take the place of a site's earlier result."""
        self._kept.setdefault(group, {})[site] = kept

    def find(self, group: str, site: str) -> SealedResult | None:
        """Return a site's result of a group; None before the first round of it has ended."""
        return self._kept.get(group, {}).get(site)

    def told(self, groups: Mapping[str, Tensors], site: str) -> dict[str, Any]:
        """Return what a site is told of the sealed results among what it is sent."""
        found = {group: self.find(group, site) for group in groups}
        return {group: kept.held.facts() for group, kept in found.items() if kept}

    # ------------------------------------------------------------------ checkpoints
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what must outlive the process; nothing in a study that does not seal."""
        tensors: dict[str, Tensor] = {}
        facts: list[dict[str, Any]] = []
        seen: dict[int, int] = {}
        for group, by_site in sorted(self._kept.items()):
            for site, own in sorted(by_site.items()):
                place = seen.setdefault(id(own), len(facts))
                if place == len(facts):
                    facts.append({"group": group, "sites": [], "held": own.held.facts()})
                    tensors |= {f"{PREFIX}/{place}/{name}": tensor for name, tensor in own.tensors.items()}
                facts[place]["sites"].append(site)
        return tensors, {
            "sealed": {"agreement": self.agreement, "kept": facts, "proofs": self.proofs}
        } if self.agreement else {}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        sealed = facts.get("sealed", {"agreement": 0, "kept": [], "proofs": []})
        self.agreement, self._kept, self.proofs = sealed["agreement"], {}, sealed["proofs"]
        for place, told in enumerate(sealed["kept"]):
            prefix = f"{PREFIX}/{place}/"
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            kept = SealedResult(own, Held.read("the checkpoint", told["held"]))
            for site in told["sites"]:
                self.keep(told["group"], site, kept)
