"""Further names for a method that needs more than `Algorithm`, `Group` and `Phase`.

Each is here once, and is loaded when it is first used. `medsilo_zoo` shows them in use.
"""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.core.errors import PlanError
    from medsilo.core.tensors import Modules, Tensors
    from medsilo.course.algorithm import BY_ITSELF, require
    from medsilo.course.declared import Private
    from medsilo.course.outcome import Outcome, OwnModels
    from medsilo.course.phase import Average, Blueprint, Ranges, ServerSide, network, site_mean
    from medsilo.course.workbench import Workbench
    from medsilo.learning.class_weights import balanced_softmax
    from medsilo.learning.layers import (
        batch_norm_buffer_names,
        called_with,
        head_layers,
        head_names,
        keeping_statistics,
        learning_only,
        names_of_last_layers,
    )
    from medsilo.learning.loop import Lesson, OutputLoss
    from medsilo.learning.seeds import generator_for, seed_for
    from medsilo.learning.statistics import adapt_batch_norm
    from medsilo.learning.steps import correcting, pull_back, pull_towards
    from medsilo.learning.training import Training, uncompiled
    from medsilo.learning.undrawn import absent_in, labels_in, marks_in
    from medsilo.methods.bases import (
        MeanOfOwn,
        Numbers,
        ServerStep,
        SharedAndOwn,
        WeighingMethod,
        copy_into,
        learning_weights,
        zeros_like,
    )
    from medsilo.methods.fedavg import Averaging, FedAvg, Weighting
    from medsilo.methods.fedper import FedPer, has_body_and_head
    from medsilo.methods.fine_tuning import FineTuning
    from medsilo.mixing.forms import Unsealable
    from medsilo.mixing.late import LateMean, SharedNumbers, Shares
    from medsilo.mixing.mixers import Identity, Mixer, UniformMean
    from medsilo.mixing.server import DynamicStep

NAMES = places_in(__file__)
__all__ = [*NAMES]
__getattr__ = lazily(__name__, __file__)
