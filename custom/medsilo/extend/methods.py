"""Names for plug-ins whose method needs more than `Algorithm`, `Group` and `Phase`.

The package `medsilo_zoo` contains examples of methods that use the names of this module.
"""

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.class_weights import balanced_softmax
from medsilo.learning.compute import labels_in, marks_in
from medsilo.learning.layers import batch_norm_buffer_names, head_layers, head_names
from medsilo.learning.loop import OutputLoss, TrainStep
from medsilo.learning.optimizers import uncompiled
from medsilo.learning.partial_labels import absent_in
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.learning.statistics import adapt_batch_norm
from medsilo.learning.steps import (
    called_with,
    correcting,
    keeping_statistics,
    learning_only,
    pull_back,
    pull_towards,
)
from medsilo.learning.training import Training
from medsilo.methods.bases import (
    MeanOfOwn,
    Numbers,
    ServerStep,
    SharedAndOwn,
    WeighingMethod,
    copy_into,
    learning_weights,
    require,
    zeros_like,
)
from medsilo.methods.fedavg import Averaging, FedAvg
from medsilo.methods.fedper import FedPer, has_body_and_head
from medsilo.methods.fine_tuning import FineTuning
from medsilo.mixing.aggregators import Aggregator, Identity, UniformMean
from medsilo.mixing.mean_forms import ServerReadable
from medsilo.mixing.server import DynamicStep
from medsilo.mixing.staleness import SharedNumbers, Shares, StalenessWeightedMean, at_most
from medsilo.schedule.algorithm import BY_ITSELF
from medsilo.schedule.declared import Private
from medsilo.schedule.outcome import Outcome, OwnModels
from medsilo.schedule.phase import Average, ModelFactory, Ranges, ServerSide, network, site_mean
from medsilo.schedule.structures import names_of_last_layers
from medsilo.schedule.train_context import TrainContext
from medsilo.schedule.weighting import Weighting

__all__ = [
    "BY_ITSELF",
    "Aggregator",
    "Average",
    "Averaging",
    "DynamicStep",
    "FedAvg",
    "FedPer",
    "FineTuning",
    "Identity",
    "MeanOfOwn",
    "ModelFactory",
    "Modules",
    "Numbers",
    "Outcome",
    "OutputLoss",
    "OwnModels",
    "PlanError",
    "Private",
    "Ranges",
    "ServerReadable",
    "ServerSide",
    "ServerStep",
    "SharedAndOwn",
    "SharedNumbers",
    "Shares",
    "StalenessWeightedMean",
    "Tensors",
    "TrainContext",
    "TrainStep",
    "Training",
    "UniformMean",
    "WeighingMethod",
    "Weighting",
    "absent_in",
    "adapt_batch_norm",
    "at_most",
    "balanced_softmax",
    "batch_norm_buffer_names",
    "called_with",
    "copy_into",
    "correcting",
    "generator_for",
    "has_body_and_head",
    "head_layers",
    "head_names",
    "keeping_statistics",
    "labels_in",
    "learning_only",
    "learning_weights",
    "marks_in",
    "names_of_last_layers",
    "network",
    "pull_back",
    "pull_towards",
    "require",
    "seed_for",
    "site_mean",
    "uncompiled",
    "zeros_like",
]
