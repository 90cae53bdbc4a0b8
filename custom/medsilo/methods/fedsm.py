"""FedSM: Xu et al., Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation, CVPR 2022.

The prediction of the super model (Algorithm 2 of the paper) is in medsilo.deploy.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules, Tensors, precision_of
from medsilo.deploy.super_model_outcome import SuperModelOutcome
from medsilo.learning.discriminant import FeatureSums, is_of_one_hospital, tell_hospitals_apart
from medsilo.learning.layers import head_layers
from medsilo.learning.loop import ObjectiveFunction, OutputLoss, TrainStep, plain_step
from medsilo.learning.steps import GradientSum, Moments
from medsilo.learning.training import Training
from medsilo.methods.apfl import APFL
from medsilo.methods.ditto import Ditto
from medsilo.methods.fine_tuning import FineTuning
from medsilo.methods.per_fedavg import PerFedAvg
from medsilo.methods.pfedme import PFedMe
from medsilo.mixing.aggregators import Aggregator, Identity, PersonalModelPool, SoftPull, aggregator_of
from medsilo.mixing.feature_sums import LastSums
from medsilo.mixing.server import FedAdam
from medsilo.models.architectures import ActivityCnn, Mlp, SmallCnn, Vgg11
from medsilo.models.network import Network, tried
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.declared import Private
from medsilo.schedule.outcome import Outcome
from medsilo.schedule.phase import (
    FURTHEST,
    Average,
    Group,
    ModelFactory,
    Phase,
    Ranges,
    ServerSide,
    network,
    sample_mean,
)
from medsilo.schedule.train_context import TrainContext
from medsilo.tasks.task import Task

STEEPEST = 1e6  # largest plausible value of a weight's mean gradient
MOST_STEPS = 1e9

PersonalMethod = Annotated[FineTuning | APFL | PerFedAvg | PFedMe | Ditto, Field(discriminator="name")]
COMPACT: Mapping[int, Network] = {  # the selector's network for each number of spatial axes
    0: Mlp(norm="none"),
    1: ActivityCnn(norm="group"),
    2: SmallCnn(width=32, norm="group"),
    3: SmallCnn(dimensions=3, width=16, norm="group"),
}


class ModelsAndSelector(Algorithm):
    """The base of the three FedSM methods: a global model, a personal model per hospital, and a selector.

    The selector chooses a model for each image, and evaluation uses the personal model, which is the network named
    "model".
    """

    paper = "Xu et al. 2022"
    # Settings of the paper's text: the selector makes one Adam step for every batch, and Adam's moments stay at the
    # site.
    literal: ClassVar[Mapping[str, Any]] = {
        "algorithm.selector": "vgg11",
        "algorithm.selector_sync": "none",
        "algorithm.selector_step": "batch",
    }
    # Settings of the released code: the selector makes one Adam step per round with the gradient of all batches, and
    # moments are averaged.
    released: ClassVar[Mapping[str, Any]] = {
        "algorithm.selector": "vgg11",
        "algorithm.selector_sync": "adam-moments",
        "algorithm.selector_step": "full-batch",
    }
    protocols = {"paper": literal}

    pull: float = Field(
        0.7,
        gt=0,
        le=1,
        description="λ of Eq. 11: the weight of a site's own model when the server updates the site's personal "
        "model. If λ is below 1 / number of sites, medsilo warns",
    )
    selector: Literal["compact", "vgg11"] = Field(
        "compact",
        description="the selector's network: `compact` is small and has group norm, `vgg11` is the paper's network "
        "with 129 million weights",
    )
    selector_sync: Literal["server-adam", "adam-moments", "none"] = Field(
        "server-adam",
        description="how selectors are averaged. `server-adam`: the sites use SGD, and the server takes steps of Adam "
        "along the sites' mean change. `adam-moments`: Adam's moments and the weights are averaged. `none`: only the "
        "weights are averaged, as in the paper's text",
    )
    selector_step: Literal["batch", "full-batch"] = Field(
        "batch",
        description="`batch`: the selector takes a step per batch. `full-batch`: the selector takes a step per round, "
        "with the sum of all batches' gradients",
    )
    selector_learning_rate: float | None = Field(
        None,
        ge=1e-8,
        le=10,
        description="learning rate of the selector's optimizer at the sites; `null` means 0.02 with `server-adam`, "
        "otherwise 0.001",
    )
    selector_server_lr: float = Field(
        0.003, gt=0, le=10, description="learning rate of the server's Adam for the selector"
    )

    @model_validator(mode="after")
    def _has_no_input_layer(self) -> Self:
        if self.amplitude:
            raise PlanError(f"algorithm.amplitude: {self.name}'s super model has no input layer; set the key to null")
        return self

    def check_task(self, task: Task) -> None:
        if not task.goal.by_case:
            other = "set task.score=accuracy, or " if task.goal.classifies else ""
            raise PlanError(
                f"algorithm.name: {self.name} chooses a model for each case, and a single case has no "
                f"{task.goal.metric}; {other}choose fedavg, or ditto for personal models"
            )

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        yield from super().conflicts(plan, networks)
        if (shape := plan.task.shape) is None:
            return
        try:
            tried(networks["selector"].eval(), shape)
        except (RuntimeError, ValueError):
            yield (
                f"algorithm.selector: the selector {self.selector} cannot read cases of shape {list(shape)}; choose "
                "a network with convolutions, or larger cases"
            )

    def warnings(self, sites: Sequence[str]) -> list[str]:
        if self.pull * len(sites) >= 1:
            return []
        return [f"algorithm.pull {self.pull:g} is below 1/{len(sites)}: other hospitals dominate each personal model"]

    def networks(self, build: ModelFactory) -> Modules:
        if "global" in build.sites:
            raise PlanError(f"participation.sites: 'global' is {self.name}'s model of all hospitals; rename that site")
        modules = self.trained_models(build)
        own = modules["model"]
        modules.setdefault("global", copy.deepcopy(own))
        modules["experts"] = nn.ModuleList(copy.deepcopy(own).requires_grad_(False) for _ in build.sites)
        selector = self.selector_network(own).build(build.channels, self.outputs(len(build.sites)))
        # the selector computes in the numerical precision of the models, because the selector and the models read the
        # same cases
        modules["selector"] = selector.to(precision_of(own))
        return modules | self.beside_selector(modules["selector"])

    def beside_selector(self, selector: nn.Module) -> Modules:
        return {"moments": Moments(selector)} if self.selector_sync == "adam-moments" else {}

    def trained_models(self, build: ModelFactory) -> Modules:
        return {"model": build()}

    def outputs(self, sites: int) -> int:
        return 1 + sites

    def selector_network(self, model: nn.Module) -> Network:
        # the selector is an additional head of a frozen network, and reads the features that the frozen network
        # computes
        if (beside := getattr(model, "beside", None)) is not None:
            return beside
        convolution = next((layer for layer in model.modules() if isinstance(layer, _ConvNd)), None)
        # the weights of a frozen network are buffers
        weights = [*convolution.parameters(), *convolution.buffers()] if convolution else []
        axes = max((weight.ndim - 2 for weight in weights), default=0)
        kinds = COMPACT if self.selector == "compact" else {2: Vgg11()}
        if axes not in kinds:
            raise PlanError(
                f"algorithm.selector: the selector {self.selector} cannot read this network's cases; choose another"
            )
        return kinds[axes]

    def make_optimizer(self, name: str, module: nn.Module, training: Training) -> Optimizer:
        if name != "selector":
            return super().make_optimizer(name, module, training)
        kind, rate = ("sgd", 0.02) if self.selector_sync == "server-adam" else ("adam", 0.001)
        own = Training(optimizer=kind, learning_rate=self.selector_learning_rate or rate)
        return own.make_optimizer(module.parameters())

    def global_group(self) -> Group:
        """Return the tensor group of the global model, which the server averages (line 15 of Algorithm 1)."""
        return Group("global", network("global"), sample_mean, title="global model")

    def personal_group(self) -> Group:
        """Return the tensor group of the personal models, which the server moves towards each other (line 16 of
        Algorithm 1, Equation 11).
        """
        return Group(
            "personal",
            network("model"),
            lambda server: SoftPull(self.pull),
            personal=True,
            title="personal model",
            fallback_group="global",
        )

    def selector_groups(self) -> tuple[Group, ...]:
        """Return the selector's tensor group (line 15 of Algorithm 1), and the tensor group of Adam's moments if the
        plan averages moments.
        """
        selector = Group("selector", network("selector"), self.selector_mean)
        if self.selector_sync != "adam-moments":
            return (selector,)
        return selector, Group("moments", network("moments"), sample_mean, ranges=_moment_ranges)

    def selector_mean(self, server: ServerSide) -> Aggregator:
        """Return the selector's aggregator: the mean of line 15 of Algorithm 1, or an Adam step at the server."""
        if self.selector_sync == "server-adam":
            return FedAdam(self.selector_server_lr, (0.9, 0.999), tau=1e-8, variant="torch")
        return aggregator_of(sample_mean, server)

    @contextmanager
    def learning_selector(self, context: TrainContext, objective: ObjectiveFunction) -> Iterator[TrainStep]:
        optimizer = context.optimizers["selector"]
        moments = cast(Moments | None, context.modules.get("moments"))
        if moments:
            moments.lend(optimizer)
        if self.selector_step == "batch":
            yield context.train_step("selector", objective, plain_step)
        else:
            total = GradientSum(optimizer)
            yield context.train_step("selector", objective, total.collect)
            total.step(optimizer)
        if moments:
            moments.take_back(optimizer)


def own_expert(modules: Modules, index: int | None) -> None:
    """Copy this site's personal model into the site's own expert, and the global model into the experts of all other
    sites.
    """
    for number, expert in enumerate(modules["experts"].children()):
        expert.load_state_dict(modules["model" if number == index else "global"].state_dict())


def experts() -> Group:
    return Group(
        "experts",
        network("experts"),
        lambda server: PersonalModelPool(server.aggregators["personal"], server.aggregators["global"], server.sharing),
        travels="down",
        personal=True,
        apply_locally=own_expert,
    )


def _moment_ranges(modules: Modules, task: Task) -> Ranges:
    of = {"first": (-STEEPEST, STEEPEST), "second": (0.0, STEEPEST**2), "steps": (0.0, MOST_STEPS)}
    return {name: of[name.partition("_")[0]] for name in modules["moments"].state_dict()}


def _feature_ranges(modules: Modules, task: Task) -> Ranges:
    furthest = FURTHEST * max(1.0, task.largest_input)
    return {"present": (0.0, 1.0), "means": (-furthest, furthest), "products": (-(furthest**2), furthest**2)}


def _says_of_sums(tensors: Tensors) -> Sequence[str]:
    return [
        f"sums: means over all training cases of {len(tensors['products'])} features, which a network with random "
        "weights computes for each case, and means of their products",
        "sums: means over few cases come close to single cases' features; with one case they are its own",
    ]


class FedSM(ModelsAndSelector):
    """FedSM trains three kinds of models together (Algorithm 1): a global model, personal models that SoftPull mixes,
    and a selector.

    At the end, the server combines all networks to one super model (Algorithm 2). If the selector is confident that an
    image resembles a hospital's images, this hospital's personal model predicts; otherwise the global model predicts.
    """

    title = "FedSM"
    sends = (
        "global model, personal model, selector, sums over features; at the end, hospitals that agreed receive each "
        "other's personal models"
    )
    bytes_sent = "two models and the selector: 5.9 times FedAvg's bytes"
    extra_work = "two networks learn, and a third one processes each batch without learning"
    suits = "hospitals that differ from each other, and predictions for patients of hospitals outside the study"
    made_anew = frozenset({"experts"})
    protocols = {
        "paper": {**ModelsAndSelector.literal, "algorithm.personal_method": None},
        "released-code": {**ModelsAndSelector.released, "algorithm.personal_method": None},
    }

    name: Literal["fedsm"] = "fedsm"
    selector_sync: Literal["closed-form", "server-adam", "adam-moments", "none"] = Field(  # type: ignore[assignment]
        "closed-form",
        description="how the selector is trained. `closed-form` needs one round: the selector's last layer becomes a "
        "linear discriminant of the hospitals, computed from means over each hospital's cases. The "
        "selector's other layers keep their initial weights. All hospitals have the same weight in the "
        "discriminant. All values "
        "except `closed-form` train the selector by gradient steps, although all cases of a hospital have "
        "the same label. `server-adam`: the sites use SGD, and the server takes steps of Adam along the "
        "sites' mean change. `adam-moments`: Adam's moments and the weights are averaged. `none`: only the "
        "weights are averaged, as in the paper's text",
    )
    personal_method: PersonalMethod | None = Field(
        None,
        description="name and keys of the method that trains the personal models instead of SoftPull. If a "
        "method is given here, the sites send their personal models only in one more round, at the end of the "
        "study (Table 6)",
    )
    selector_least: float = Field(
        0.9,
        ge=0,
        le=1,
        description="the selector's minimum accuracy: the share of validation cases that the selector assigns to the "
        "right hospital, averaged over hospitals. If the selector's accuracy is below `selector_least`, the global "
        "model predicts every image, and the summary has a warning",
    )

    @model_validator(mode="after")
    def _numbers_that_do_nothing(self) -> Self:
        steps = ("selector_step", "selector_learning_rate", "selector_server_lr")
        changed = [name for name in steps if getattr(self, name) != type(self).model_fields[name].default]
        if changed and self.selector_sync == "closed-form":
            raise PlanError(
                f"algorithm.{changed[0]}: a selector in closed form takes no steps; remove this key, or set "
                "algorithm.selector_sync=server-adam"
            )
        return self

    def phases(self, rounds: int) -> Sequence[Phase]:
        selector = self.selector_groups()  # the selector's tensor groups (lines 7, 10 and 15 of Algorithm 1)
        if self.personal_method is None:
            groups = (self.global_group(), self.personal_group(), *selector)
            return [Phase("train", rounds, groups, self.train_all_three)]
        common = Group("global", network("global"), self.personal_method.mean, title="global model")
        personal = Group(
            "personal",
            network("model"),
            lambda server: Identity(),
            "up",
            True,
            "personal model",
            fallback_group="global",
        )
        kept = tuple(group.given_only() for group in (common, *selector))
        return [
            Phase("train", rounds, (common, *selector), self.train_all_three),
            Phase("collect", 1, (*kept, personal), lambda context: math.nan),
        ]

    @property
    def outcome(self) -> Outcome:
        closed = self.selector_sync == "closed-form"
        advice = "" if closed else "; try algorithm.selector_sync=closed-form or more rounds"
        return SuperModelOutcome(
            "threshold",
            self.selector_network,
            (experts(),),
            advice=advice,
            least=self.selector_least,
            finish=tell_hospitals_apart if closed else None,
        )

    def outputs(self, sites: int) -> int:
        return sites

    def trained_models(self, build: ModelFactory) -> Modules:
        return self.personal_method.networks(build) if self.personal_method else super().trained_models(build)

    def beside_selector(self, selector: nn.Module) -> Modules:
        if self.selector_sync != "closed-form":
            return super().beside_selector(selector)
        selector.requires_grad_(False)
        (head,) = cast(list[nn.Linear], head_layers(selector))
        return {"sums": FeatureSums(head.out_features, head.in_features)}

    def selector_groups(self) -> tuple[Group, ...]:
        if self.selector_sync != "closed-form":
            return super().selector_groups()
        return Group("selector", network("selector"), sample_mean), Group(
            "sums",
            network("sums"),
            lambda server: LastSums(),
            title="sums over features",
            undefended="mixing: no robust rule covers FedSM's selector in closed form, since only a hospital knows "
            "its features; set algorithm.selector_sync=server-adam",
            ranges=_feature_ranges,
            check=is_of_one_hospital,
            disclosure_notes=_says_of_sums,
            average=Average(
                "means of features and of their products over a site's training cases", lambda images, training: images
            ),
        )

    def private(self) -> Private:
        if self.selector_sync == "closed-form":
            raise PlanError(
                "algorithm.selector_sync: sums over a hospital's features leave without noise; set "
                "algorithm.selector_sync=server-adam"
            )
        if self.personal_method:
            raise PlanError(
                f"algorithm.personal_method: {self.personal_method.name} sends personal models in the last round, "
                f"without noise; set the key to null"
            )
        return Private(
            ("model", "global", "selector"),
            disclosure_notes="each batch has three noisy gradients, which count together",
        )

    def train_all_three(self, context: TrainContext) -> float:
        """Train the personal model, the global model and the selector on each batch (lines 6 to 12 of Algorithm 1)."""
        label = context.sites.index(context.site)

        def tell_apart(scores: Tensor, targets: Tensor) -> Tensor:
            """Return the selector's loss (Equation 2), in which every image of hospital k has the label k."""
            return functional.cross_entropy(scores, torch.full((len(scores),), label, device=scores.device))

        chosen = OutputLoss(tell_apart)
        with self.learning_models(context) as models, self.learning_selector(context, chosen) as selector:
            return context.train(*models, selector)

    @contextmanager
    def learning_selector(self, context: TrainContext, objective: ObjectiveFunction) -> Iterator[TrainStep]:
        if self.selector_sync != "closed-form":
            with super().learning_selector(context, objective) as train_step:
                yield train_step
            return
        selector, sums = context.modules["selector"], cast(FeatureSums, context.modules["sums"])
        with sums.collecting(selector, context.sites.index(context.site)) as train_step:
            yield train_step

    def learning_models(self, context: TrainContext) -> AbstractContextManager[Sequence[TrainStep]]:
        """Return the training steps of the personal and the global model (lines 8 and 9 of Algorithm 1)."""
        if self.personal_method:
            return self.personal_method.learning(context)
        return nullcontext([context.train_step("model"), context.train_step("global")])

    def personalise(self, context: TrainContext) -> None:
        if self.personal_method:
            self.personal_method.personalise(context)
