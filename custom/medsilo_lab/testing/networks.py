"""Tests that the author of a network runs with pytest, in a class derived from NetworkTester."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medsilo.plan import Plan, parse_plan
from medsilo.runs.reading import read_summary
from medsilo.site.settings import ALL_MINE, make_settings
from medsilo_lab.engines import inprocess
from medsilo_lab.testing.methods import SITES, TINY, TRAINING, assert_equal, assert_read_again


class NetworkTester:
    """Tests for a network of medsilo. The author of the network derives a class, and pytest runs all tests in the
    derived class.

    The derived class may define these attributes:
        network: the network's section of a plan, with the name first
        task: the task's section of a plan; the default is a small synthetic task with activity data
        changes: changes KEY=VALUE to the default values
        unused: parts of the names of weights that do not affect the output

    >>> class TestCnn(NetworkTester):
    ...     network = {"name": "activity-cnn"}
    >>> TestCnn().plan().network.name
    'activity-cnn'
    """

    network: ClassVar[Mapping[str, Any]]
    task: ClassVar[Mapping[str, Any]] = TINY
    changes: ClassVar[Sequence[str]] = ()
    unused: ClassVar[Sequence[str]] = ()

    def plan(self, *changes: str) -> Plan:
        """Return a plan with which small hospitals train the network."""
        values = {
            "algorithm": {"name": "fedavg"},
            "task": dict(self.task),
            "network": dict(self.network),
            "training": {**TRAINING, "rounds": 1, "batch_size": 4},
            "participation": {"sites": SITES[:2], "timeout": 120},
        }
        return parse_plan(values, [*self.changes, *changes])

    def module(self) -> nn.Module:
        built: nn.Module = self.plan().build_networks()["model"]
        return built

    def cases(self, count: int = 4) -> tuple[Tensor, Tensor]:
        plan = self.plan()
        data = plan.task.load(SITES[0], SITES[:2], plan.seed, None).train
        inputs, targets = zip(*(data[place][:2] for place in range(count)), strict=True)
        return torch.stack([torch.as_tensor(own) for own in inputs]), torch.stack(
            [torch.as_tensor(target) for target in targets]
        )

    # ------------------------------------------------------------------ the tests
    def test_its_plan_is_the_same_when_it_was_written(self, tmp_path: Path) -> None:
        assert_read_again(self.plan(), tmp_path)

    def test_all_sites_begin_with_the_same_weights(self) -> None:
        """The plan's seed alone determines the initial weights, even if the random generator was used before."""
        random, first = torch.get_rng_state(), self.module().state_dict()
        torch.rand(3)
        assert_equal(first, self.module().state_dict(), "the first model")
        torch.set_rng_state(random)
        other = self.plan("seed=1").build_networks()["model"].state_dict()
        assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items()), (
            "the initial weights do not depend on the seed"
        )
        assert torch.equal(random, torch.get_rng_state()), (
            "building the network changes torch's global random generator"
        )

    def test_an_output_is_one_case_s(self) -> None:
        """In evaluation mode, the output for a case does not depend on the other cases in the batch.

        Evaluation changes no weights and no counters.
        """
        module, (inputs, _) = self.module().eval(), self.cases()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with torch.no_grad():
            together, alone = module(inputs), torch.cat([module(own[None]) for own in inputs])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
        assert_equal(before, module.state_dict(), "evaluated")

    def test_its_loss_reaches_every_weight(self) -> None:
        """The loss is finite, and every trainable weight has a finite gradient."""
        plan, (inputs, targets) = self.plan(), self.cases()
        module = self.module().train()
        loss = plan.task.goal.loss(module(inputs), targets)
        assert loss.isfinite(), f"the loss is {float(loss)}"
        loss.backward()
        for name, weight in module.named_parameters():
            if weight.requires_grad and not any(part in name for part in self.unused):
                assert weight.grad is not None, f"{name} has no gradient: freeze it, or use it"
                assert weight.grad.isfinite().all(), f"the gradient of {name} is not finite"

    def test_its_tensors_travel(self) -> None:
        """Two networks are built from one plan. The second network can load all tensors of the first network, and then
        gives the same output.
        """
        module, (inputs, _) = self.module(), self.cases()
        with torch.no_grad():
            for tensor in module.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(0.01)
            other = self.module()
            other.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()})
            assert torch.equal(module.eval()(inputs), other.eval()(inputs)), (
                "the network's state dict lacks a tensor that affects the output"
            )

    def test_hospitals_train_it(self, tmp_path: Path) -> None:
        settings = make_settings({**ALL_MINE, "device": "cpu"}, "the tests' settings")
        inprocess.run(self.plan(), folder=tmp_path / "run", settings=settings)
        summary = read_summary(tmp_path / "run")
        assert summary.status == "finished" and all(site.test for site in summary.sites.values())
