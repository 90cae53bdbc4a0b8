"""The super model that people use, and its folder: safetensors, the plan, a card and a manifest; all hashed."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from operator import not_
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from medsilo.core import shelf
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors, write_json, write_text
from medsilo.core.package import package_facts
from medsilo.core.section import Section
from medsilo.core.text import is_safe_name
from medsilo.deploy.card import card
from medsilo.deploy.model import Experts, Rule
from medsilo.deploy.origin import Origin, Spacing
from medsilo.deploy.tuning import Tuning
from medsilo.models.network import Network
from medsilo.plan import load_plan
from medsilo.registry import NETWORKS

MANIFEST, PLAN, CARD = "supermodel.json", "plan.yaml", "card.md"
GLOBAL_FILE, SELECTOR_FILE, PERSONAL = "global.safetensors", "selector.safetensors", "personal"
Tensors = Mapping[str, Tensor]


class FileFacts(Section):
    """One file of the folder."""

    sha256: str
    bytes: int


class Manifest(Section):
    """supermodel.json."""

    format: Literal[1] = 1
    rule: Rule
    threshold: float | None = Field(ge=0, le=1)
    sites: tuple[str, ...]
    agreed: tuple[str, ...]
    selector: dict[str, Any]
    spacing: Spacing | None
    absent: dict[str, tuple[str, ...]] = Field({}, exclude_if=not_)
    tuning: tuple[tuple[float, int, float], ...] | None  # (gamma, cases, mean score) for each gamma tried
    plan_hash: str
    package: dict[str, str]
    files: dict[str, FileFacts]


class SuperModel(Experts):
    """A super model that knows where it comes from, so that it can be saved for other hospitals and loaded there.

    `origin` is needed for saving only; `Experts` says what the other arguments do.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> shared, own, selector = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
    >>> model = SuperModel(shared, {"a": own}, selector, threshold=0.9)
    >>> output, experts, confidence = model.answer(torch.ones(3, 4))
    >>> output.shape, experts
    (torch.Size([3, 2]), ['a', 'a', 'a'])
    """

    def __init__(
        self,
        global_model: nn.Module,
        personal: dict[str, nn.Module],
        selector: nn.Module,
        threshold: float | None = None,
        *,
        sites: Sequence[str] | None = None,
        rule: Rule = "threshold",
        origin: Origin | None = None,
    ) -> None:
        super().__init__(global_model, personal, selector, threshold, sites=sites, rule=rule)
        self.origin = origin

    def save(self, folder: Path) -> None:
        """Write everything that another hospital needs into a folder; needs `origin`.

        The manifest is written last, so that a folder with a manifest is whole.
        """
        origin = self.origin
        if origin is None:
            raise MedsiloError("this super model does not know its plan; give it `origin`, or make it with assemble()")
        (folder / MANIFEST).unlink(missing_ok=True)
        for old in (folder / PERSONAL).glob("*.safetensors"):  # of a hospital that no longer agrees
            old.unlink()
        networks = {GLOBAL_FILE: self.global_model, SELECTOR_FILE: self.selector}
        networks |= {_personal_file(site): self.expert(site) for site in self.agreed}
        for name, network in networks.items():
            save_tensors(folder / name, network.state_dict(), {"plan_hash": origin.plan.hash})
        shelf.keep_beside(origin.plan.network.files, folder / shelf.FOLDER)
        write_text(folder / PLAN, origin.plan.to_yaml())
        write_text(folder / CARD, card(self, origin))
        manifest = Manifest(
            rule=self.rule,
            threshold=self.threshold,
            sites=self.sites,
            agreed=self.agreed,
            selector=origin.selector.model_dump(mode="json"),
            spacing=origin.spacing,
            absent=dict(origin.absent),
            tuning=origin.tuning and origin.tuning.curve,
            plan_hash=origin.plan.hash,
            package=package_facts(),
            files={name: _facts(folder / name) for name in _files(self.agreed)},
        )
        write_json(folder / MANIFEST, manifest.model_dump(mode="json"))

    @staticmethod
    def load(folder: Path) -> "SuperModel":
        """Return the super model of a folder, ready to answer; refuses a file that was changed."""
        manifest = read_manifest(folder)
        for name in _files(manifest.agreed):
            _check(folder / name, name, manifest.files.get(name))
        tuning = Tuning(manifest.tuning) if manifest.tuning else None
        origin = Origin(
            load_plan(folder / PLAN), _network(manifest.selector), tuning, manifest.spacing, manifest.absent
        )
        tensors = {name: load_tensors(folder / name)[0] for name in _files(manifest.agreed) if name.endswith("tensors")}
        return assemble(
            origin,
            tensors[GLOBAL_FILE],
            {site: tensors[_personal_file(site)] for site in manifest.agreed},
            tensors[SELECTOR_FILE],
            manifest.threshold,
            sites=manifest.sites,
            rule=manifest.rule,
        )


def assemble(
    origin: Origin,
    global_model: Tensors,
    personal: Mapping[str, Tensors],
    selector: Tensors,
    threshold: float | None = None,
    *,
    sites: Iterable[str],
    rule: Rule = "threshold",
) -> SuperModel:
    """A super model from the tensors of its networks, in evaluation mode; `personal` holds the sites that agreed."""
    sites, plan = sorted(sites), origin.plan
    outputs = len(sites) + (rule != "threshold")

    def expert(name: str, tensors: Tensors) -> nn.Module:
        return _filled(plan.network.build(plan.task.channels, plan.task.goal.outputs), name, tensors)

    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, only to be replaced
        model = SuperModel(
            expert("the global model", global_model),
            {site: expert(f"the personal model of {site}", tensors) for site, tensors in personal.items()},
            _filled(origin.selector.build(plan.task.channels, outputs), "the selector", selector),
            threshold,
            sites=sites,
            rule=rule,
            origin=origin,
        )
    return model.eval()


def _filled(network: nn.Module, name: str, tensors: Tensors) -> nn.Module:
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        message = f"{name} has other tensors than the plan's network; use the plan it was trained with"
        raise MedsiloError(message, private=str(error)) from error
    return network


def read_manifest(folder: Path) -> Manifest:
    """The checked supermodel.json of a folder."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise MedsiloError(f"no {MANIFEST} in this folder; give the folder of a super model", str(folder)) from error
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(map(str, detail["loc"])) or "the file"
        raise MedsiloError(f"{MANIFEST}: {where}: {detail['msg']}; fetch the super model again") from error
    for site in (*manifest.sites, *manifest.agreed):
        if not is_safe_name(site):
            raise MedsiloError(f"{MANIFEST}: site name {site!r} has odd characters; fetch the super model again")
    return manifest


def _files(agreed: Iterable[str]) -> list[str]:
    """Every file of the folder beside the manifest."""
    return [PLAN, CARD, GLOBAL_FILE, SELECTOR_FILE, *map(_personal_file, agreed)]


def _personal_file(site: str) -> str:
    return f"{PERSONAL}/{site}.safetensors"


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return FileFacts(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=path.stat().st_size)


def _check(path: Path, name: str, expected: FileFacts | None) -> None:
    if expected is None or not path.is_file():
        raise MedsiloError(f"{name} is missing from the super model; fetch it again", private=str(path))
    if _facts(path) != expected:
        message = f"{name} is not the file that {MANIFEST} was written for (its SHA-256 differs); fetch it again"
        raise MedsiloError(message, private=str(path))


def _network(section: dict[str, Any]) -> Network:
    try:
        return NETWORKS[section["name"]].model_validate(section)
    except (KeyError, TypeError, ValidationError) as error:
        message = f"{MANIFEST}: selector: this medsilo has no such network; install the version that wrote it"
        raise MedsiloError(message, private=str(section)) from error
