"""What the methods have in common whose server makes a step of its own with the trained weights."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from medsilo.methods.base import Groups, Modules, without
from medsilo.methods.fedavg import Averaging
from medsilo.mixing.mixers import Mixer, WeightedMean


class Stepping(Averaging):
    """The server steps with the trained weights; all other tensors, such as running statistics, are averaged."""

    travels = "model"

    def shared(self, modules: Modules, phase: str) -> Groups:
        model = modules["model"]
        trained = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        everything = model.state_dict()
        buffers = without(everything, trained)
        groups = {"model": {name: everything[name] for name in trained}}
        return groups | {"buffers": buffers} if buffers else groups

    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        return self.server_step() if group == "model" else super().mixer(group, earlier, sites)

    @abstractmethod
    def server_step(self) -> WeightedMean:
        """The server's step with the trained weights."""
