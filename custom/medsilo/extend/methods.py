"""Further names for a method that needs more than `Algorithm`, `Group` and `Phase`.

Each is here once, and is loaded when it is first used. `medsilo_zoo` shows them in use.
"""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
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
    from medsilo.methods.fedavg import Averaging, FedAvg, Weighting
    from medsilo.methods.fedper import FedPer, has_body_and_head
    from medsilo.methods.fine_tuning import FineTuning
    from medsilo.mixing.forms import ServerReadable
    from medsilo.mixing.late import SharedNumbers, Shares, StalenessWeightedMean
    from medsilo.mixing.mixers import Aggregator, UniformMean
    from medsilo.mixing.personal import Identity
    from medsilo.mixing.server import DynamicStep
    from medsilo.schedule.algorithm import BY_ITSELF
    from medsilo.schedule.declared import Private
    from medsilo.schedule.outcome import Outcome, OwnModels
    from medsilo.schedule.phase import Average, ModelFactory, Ranges, ServerSide, network, site_mean
    from medsilo.schedule.structures import names_of_last_layers
    from medsilo.schedule.train_context import TrainContext

NAMES = places_in(__file__)
__all__ = [*NAMES]
__getattr__ = lazily(__name__, __file__)
