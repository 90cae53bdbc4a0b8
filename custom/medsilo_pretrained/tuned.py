"""Train some tensors of a network that starts from a checkpoint or from random weights."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, create_model
from torch import Tensor, nn

from medsilo.extend import MedsiloError, Network, Section
from medsilo.extend.methods import head_names
from medsilo.extend.networks import NETWORKS, norm_names, weight_cache
from medsilo_pretrained.checkpoint import Match, counted, is_weight, match, read_checkpoint
from medsilo_pretrained.frozen import Frozen, freeze, keep_rounded, values_of

WORDS: Mapping[str, Callable[[nn.Module], Iterable[str]]] = {
    "all": lambda network: ["*"],
    "head": head_names,
    "norms": norm_names,
    "bias": lambda network: ["bias", "*.bias"],
}

# Frozen tensors of all networks in this process; a key consists of the hash of the checkpoint, the network and the
# tensor's name.
_KNOWN: MutableMapping[tuple[str, ...], Frozen] = WeakValueDictionary()


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_several), Field(max_length=100)]


class Checkpoint(Section):
    file: str = Field(
        "",
        max_length=200,
        description="name of the file with the weights, for people; medsilo finds the file by its hash",
    )
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 hash by which the file is found")
    bytes: int = Field(ge=1, le=1 << 32, description="number of bytes in the file")
    least: float = Field(
        0.5,
        gt=0,
        le=1,
        description="minimum share of the network's weights that the file must contain with the same name and shape",
    )
    ignore: Patterns = Field(
        (),
        exclude_if=lambda value: not value,
        description="patterns of names; the network does not need the weights in the file that have these names",
    )
    initial: Patterns = Field(
        ("head",),
        exclude_if=lambda value: value == ("head",),
        description="weights that may be missing in the file; missing weights get random values from the plan's "
        "seed: `head`, "
        "`norms`, `bias`, or patterns of names of weights",
    )
    confirmed: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="confirms that the network `of` has the same activations and the same norms without weights "
        "as the network whose weights the file contains. `confirmed` is needed if the file would also fit "
        "MONAI's default network",
    )


_FROM: Any = {  # Python's keyword `from` cannot be the name of a field in a class definition.
    "from": (
        Checkpoint | None,
        Field(
            None,
            description="the file with the initial weights: the name of a file in the plan's folder, or a section with "
            "`file`, `sha256` and `bytes`. With `null`, the initial weights are random",
        ),
    )
}
_Begun: Any = create_model("_Begun", __base__=Network, **_FROM)


class Begun(_Begun):
    """Base class of networks that contain another network and may read its initial weights from a file."""

    of: Annotated[SerializeAsAny[Network], BeforeValidator(NETWORKS.read)] = Field(
        description="name and settings of the network whose weights are loaded"
    )

    @property
    def start(self) -> Checkpoint | None:
        return getattr(self, "from")

    @property
    def files(self) -> dict[str, int]:
        return {self.start.sha256: self.start.bytes} if self.start else {}

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        if (numbers := sum(own.numel() for _, own in values_of(networks["model"]))) > self.MOST_PARAMETERS:
            yield f"network.of: has {numbers} numbers, frozen or not; {self.MOST_PARAMETERS} may be"
        if isinstance(self.of, Begun):
            yield f"network.of: a {self.of.name} network in a {self.name} one; write one of them"
        yield from self.of.conflicts(plan, networks)

    def settled(self, module: nn.Module, compute: Any) -> nn.Module:
        if compute.precision == "bfloat16":
            keep_rounded(module)
        return super().settled(module, compute)

    def begin(self, network: nn.Module, channels: int, classes: int) -> dict[str, Tensor]:
        """Load the tensors of the checkpoint into a network, and return these tensors. If the plan names no checkpoint,
        return an empty dictionary.
        """
        # the tensors of a network on the meta device have no values
        if not self.start or next(network.parameters()).is_meta:
            return {}
        found = dict(self._matched(network, channels, classes).matched)
        network.load_state_dict(found, strict=False)
        return found

    def freeze(self, network: nn.Module, found: Mapping[str, Tensor], trained: Collection[str]) -> None:
        if found:
            self._check_frozen(network, found, trained)
        # all networks in this process that start from the same checkpoint share its frozen tensors
        same = bool(self.start and found)
        key = (self.start.sha256, self.of.model_dump_json()) if self.start else ()
        freeze(network, trained, _KNOWN if same else {}, key)

    def _matched(self, network: nn.Module, channels: int, classes: int) -> Match:
        assert self.start
        given = self.of.translated(read_checkpoint(weight_cache.find(self.start.sha256, self.start.bytes)))
        own = network.state_dict()
        found = match(own, given)
        if odd := [name for name, tensor in found.matched.items() if not is_weight(tensor, own[name])]:
            raise MedsiloError(
                f"network.from: {counted('tensors', odd)} of the file are no plain, finite numbers: they are sparse, "
                "quantised, complex, integers or too large; give another file"
            )
        if found.share < self.start.least:
            raise MedsiloError(
                f"network.from: the file does not fit this network: {found}; give another "
                "file, or lower network.from.least"
            )
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
                f"network.from: the file also fits {other}; set network.of to this network, or set "
                "network.from.confirmed=true if the file is not of this network"
            )
        return found

    @staticmethod
    def _patterns(word: str, network: nn.Module) -> list[str]:
        return list(WORDS[word](network)) if word in WORDS else [word]

    def _check_frozen(self, network: nn.Module, tensors: Mapping[str, Tensor], trained: Collection[str]) -> None:
        lacks = [name for name, _ in network.named_parameters() if name not in tensors and name not in trained]
        if lacks:
            shown = f"{', '.join(lacks[:3])}{', ...' if len(lacks) > 3 else ''}"
            raise MedsiloError(
                f"network.from: the file lacks {shown}, which would keep random weights; "
                "add these weights to network.train"
            )


class Tuned(Begun):
    """A network of which only some parameters are trained. In a round, only the trained parameters are saved, sent and
    averaged, and noise is added only to the trained parameters.
    """

    name: Literal["tuned"] = "tuned"
    train: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field(
        ("head",),
        min_length=1,
        max_length=100,
        description="parts of the network to train: `all`, `head` (the last layer), `norms`, `bias`, or patterns of "
        "parameter names; one or several",
    )

    @property
    def plain(self) -> Network:
        return self.of.plain

    def build(self, channels: int, classes: int) -> nn.Module:
        network = self.of.build(channels, classes)
        found = self.begin(network, channels, classes)
        trained = self._trained(network)
        if len(trained) < sum(1 for _ in network.named_parameters(remove_duplicate=False)):
            self.freeze(network, found, trained)
        return network

    def _trained(self, network: nn.Module) -> set[str]:
        every = [name for name, _ in network.named_parameters(remove_duplicate=False)]
        trained: set[str] = set()
        for word in self.train:
            patterns = self._patterns(word, network)
            own = {name for name in every if any(fnmatchcase(name, pattern) for pattern in patterns)}
            if not own:
                raise MedsiloError(
                    f"network.train: {word!r} names no parameter of this network; use {', '.join(WORDS)} or "
                    f"patterns, such as {every[0]}"
                )
            trained |= own
        return trained

    def finished(self, module: nn.Module, channels: int, classes: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            plain = self.of.build(channels, classes)
        values = dict(values_of(module))
        plain.load_state_dict({name: values[name] for name in plain.state_dict()})
        return self.of.finished(plain, channels, classes)


def _but(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    allowed = list(patterns)
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in allowed)]


def defaults_that_fit(words: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> str:
    """If the file would fit MONAI's network exactly with MONAI's default activation or normalisation, describe this
    network. If the file would not fit, return an empty text.

    A file shows neither the activations of its network nor normalisation layers that have no weights.

    Args:
        words: The plan's network as in a MONAI bundle.
        tensors: The tensors of the file.
    """
    if not words:
        return ""
    # MONAI is imported only in the functions that need MONAI, because its import takes seconds
    from monai.networks import nets

    kind = getattr(nets, str(words["_target_"]).rpartition(".")[2])
    normal = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    others = [key for key in ("act", "norm") if key in words and _layer(words[key]) != _layer(normal[key])]
    for changed in (keys for count in range(1, len(others) + 1) for keys in combinations(others, count)):
        own = {key: value for key, value in words.items() if key != "_target_" and key not in changed}
        with torch.device("meta"):
            found = match(kind(**own).state_dict(), tensors)
        if not (found.missing or found.surplus or found.other_shape):
            return f"MONAI's {kind.__name__} with its own {' and '.join(f'{key} {normal[key]}' for key in changed)}"
    return ""


def _layer(words: Any) -> Any:
    """Convert MONAI's description of a layer to the lower-case name of the layer and its arguments."""
    if words is None:
        return None
    name, given = (words, {}) if isinstance(words, str) else words
    return str(name).lower(), {key: value for key, value in given.items() if key != "inplace"}
