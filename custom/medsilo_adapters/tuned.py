"""A partly trained network: from a checkpoint or from initial weights, with or without adapters."""

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, create_model
from torch import Tensor, nn

from medsilo.extend import MedsiloError, Network, Section
from medsilo.extend.methods import head_layers, head_names
from medsilo.extend.networks import NETWORKS, norm_names, weight_cache
from medsilo_adapters.checkpoint import Match, counted, is_weight, match, read_checkpoint
from medsilo_adapters.frozen import Frozen, freeze, keep_rounded, values_of
from medsilo_adapters.low_rank import Adapters, adapt, merged_weight

WORDS: Mapping[str, Callable[[nn.Module], Iterable[str]]] = {
    "all": lambda network: ["*"],
    "head": head_names,
    "norms": norm_names,
    "bias": lambda network: ["bias", "*.bias"],
}
ADAPTERS = "adapters"

# Frozen tensors of this process's networks, by all that decides over them
_KNOWN: MutableMapping[tuple[str, ...], Frozen] = WeakValueDictionary()


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_several), Field(max_length=100)]


class Checkpoint(Section):
    """The file that a network begins with."""

    file: str = Field("", max_length=200, description="its name, by which people know it")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its bytes, which decides")
    bytes: int = Field(ge=1, le=1 << 32, description="how many it has")
    least: float = Field(
        0.5, gt=0, le=1, description="the share of the network's numbers that must be found in it, by name and shape"
    )
    ignore: Patterns = Field(
        (), exclude_if=lambda value: not value, description="patterns of the file's names that the network has not"
    )
    initial: Patterns = Field(
        ("head",),
        exclude_if=lambda value: value == ("head",),
        description="what begins from the plan's seed where the file lacks it, or has another shape: `head`, `norms`, "
        "`bias`, or patterns of the network's names",
    )
    confirmed: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="that activations and norms without weights are those of the file's network. Needed where the file "
        "would fit MONAI's own defaults as well, which are others",
    )


_FROM: Any = {  # `from` is no name that Python lets a class write
    "from": (
        Checkpoint | None,
        Field(
            None,
            description="the file that it begins with: the name of one beside the plan, which becomes `file`, "
            "`sha256` and `bytes`; or a section with it as `file`. `null`: the plan's seed alone decides",
        ),
    )
}
_Begun: Any = create_model("_Begun", __base__=Network, **_FROM)


class Tuned(_Begun):
    """Another network that trains only in part. Only that part is kept between rounds, mixed, noised and sent."""

    name: Literal["tuned"] = "tuned"
    of: Annotated[SerializeAsAny[Network], BeforeValidator(NETWORKS.read)] = Field(
        description="the network: its name, and its numbers"
    )
    train: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field(
        (ADAPTERS, "head"),
        min_length=1,
        max_length=100,
        description="what trains: `all`, `head` (the last layer), `norms`, `bias`, `adapters`, or patterns of "
        "parameters' names; one or several",
    )
    adapters: Adapters = Field(Adapters(), description="low-rank adapters, where they train")

    @property
    def start(self) -> Checkpoint | None:
        """The file that it begins with."""
        return getattr(self, "from")

    @property
    def files(self) -> dict[str, int]:
        return {self.start.sha256: self.start.bytes} if self.start else {}

    @property
    def plain(self) -> Network:
        return self.of.plain

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        """The whole network is one that a site can hold, and it suits the plan."""
        if (numbers := sum(own.numel() for _, own in values_of(networks["model"]))) > self.MOST_PARAMETERS:
            yield f"network.of: has {numbers} numbers, frozen or not; {self.MOST_PARAMETERS} may be"
        if isinstance(self.of, Tuned):
            yield "network.of: a tuned network in a tuned one; write one of them"
        yield from self.of.conflicts(plan, networks)

    def build(self, channels: int, classes: int) -> nn.Module:
        network = self.of.build(channels, classes)
        found: dict[str, Tensor] = {}
        if self.start and not next(network.parameters()).is_meta:  # which has shapes only
            found = dict(self._matched(network, channels, classes).matched)
            network.load_state_dict(found, strict=False)
        trained = self._trained(network)
        if len(trained) == sum(1 for _ in network.named_parameters(remove_duplicate=False)):
            return network
        if found:
            self._check_frozen(network, found, trained)
        if ADAPTERS in self.train:
            trained |= set(adapt(network, self.adapters, head_layers(network)))
        same = bool(self.start and found)  # as any network of this process that begins with the file
        key = (self.start.sha256, self.of.model_dump_json()) if self.start else ()
        freeze(network, trained, _KNOWN if same else {}, key)
        return network

    def _matched(self, network: nn.Module, channels: int, classes: int) -> Match:
        assert self.start
        given = read_checkpoint(weight_cache.find(self.start.sha256, self.start.bytes))
        own = network.state_dict()
        found = match(own, given)
        if odd := [name for name, tensor in found.matched.items() if not is_weight(tensor, own[name])]:
            raise MedsiloError(
                f"network.from: {counted('tensors', odd)} of the file are no plain, finite numbers: they are sparse, "
                "quantised, complex, whole or too large; give another file"
            )
        if found.share < self.start.least:
            raise MedsiloError(f"network.from: the file is not of this network: {found}; give another, or lower least")
        begins = [pattern for word in self.start.initial for pattern in self._patterns(word, network)]
        strange = {
            "missing": _but(found.missing, [*begins, "num_batches_tracked", "*.num_batches_tracked"]),
            "of another shape": _but(found.other_shape, begins),
            "surplus": _but(found.surplus, self.start.ignore),
        }
        if any(strange.values()):
            told = ", ".join(counted(what, names) for what, names in strange.items() if names)
            raise MedsiloError(
                f"network.from: the file belongs to another network: {told}. Set network.of to it, or list surplus "
                f"tensors in network.from.ignore, missing ones in network.from.initial"
            )
        if not self.start.confirmed and (other := defaults_that_fit(self.of.monai(channels, classes), given)):
            raise MedsiloError(
                f"network.from: the file may be of another network: it fits {other}, too; make network.of that one, or "
                "say that it is none (network.from.confirmed=true)"
            )
        return found

    @staticmethod
    def _patterns(word: str, network: nn.Module) -> list[str]:
        return list(WORDS[word](network)) if word in WORDS else [word]

    def _trained(self, network: nn.Module) -> set[str]:
        every = [name for name, _ in network.named_parameters(remove_duplicate=False)]
        trained: set[str] = set()
        for word in self.train:
            if word == ADAPTERS:
                continue
            patterns = self._patterns(word, network)
            own = {name for name in every if any(fnmatchcase(name, pattern) for pattern in patterns)}
            if not own:
                raise MedsiloError(
                    f"network.train: {word!r} names no parameter of this network; use {', '.join(WORDS)}, {ADAPTERS} "
                    f"or patterns, such as {every[0]}"
                )
            trained |= own
        return trained

    def _check_frozen(self, network: nn.Module, found: Mapping[str, Tensor], trained: set[str]) -> None:
        lacks = [name for name, _ in network.named_parameters() if name not in found and name not in trained]
        if lacks:
            shown = f"{', '.join(lacks[:3])}{', ...' if len(lacks) > 3 else ''}"
            raise MedsiloError(
                f"network.from: the file lacks {shown}, which would keep random weights; add to network.train"
            )

    def settled(self, module: nn.Module, compute: Any) -> nn.Module:
        if compute.precision == "bfloat16":
            keep_rounded(module)
        return super().settled(module, compute)

    def finished(self, module: nn.Module, channels: int, classes: int) -> nn.Module:
        """Return the plain network with all values, adapters merged."""
        with torch.random.fork_rng(devices=[]):
            plain = self.of.build(channels, classes)
        values = dict(values_of(module))
        for prefix, layer in module.named_modules():
            if (weight := merged_weight(layer)) is not None:
                values[f"{prefix}.weight"] = weight
        plain.load_state_dict({name: values[name] for name in plain.state_dict()})
        return self.of.finished(plain, channels, classes)


def _but(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that none of the patterns names."""
    allowed = list(patterns)
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in allowed)]


def defaults_that_fit(words: Mapping[str, Any] | None, given: Mapping[str, Tensor]) -> str:
    """Return which of MONAI's own activations and norms, where a network has others, a file would fit as well; else "".

    words: the network in a MONAI bundle's words. ReLU and norms without weights leave nothing in a file.
    """
    if not words:
        return ""
    from monai.networks import nets  # here, because importing MONAI takes seconds

    kind = getattr(nets, str(words["_target_"]).rpartition(".")[2])
    normal = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    others = [key for key in ("act", "norm") if key in words and _layer(words[key]) != _layer(normal[key])]
    for changed in (keys for count in range(1, len(others) + 1) for keys in combinations(others, count)):
        own = {key: value for key, value in words.items() if key != "_target_" and key not in changed}
        with torch.device("meta"):
            found = match(kind(**own).state_dict(), given)
        if not (found.missing or found.surplus or found.other_shape):
            return f"MONAI's {kind.__name__} with its own {' and '.join(f'{key} {normal[key]}' for key in changed)}"
    return ""


def _layer(words: Any) -> Any:
    """Return a layer of MONAI's, its name and arguments, in one form."""
    if words is None:
        return None
    name, given = (words, {}) if isinstance(words, str) else words
    return str(name).lower(), {key: value for key, value in given.items() if key != "inplace"}
