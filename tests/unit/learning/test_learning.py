"""Training equals separate loops, the proximal step equals numpy's, and a site chooses the right device."""

import math
from collections.abc import Iterator, Sequence
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import is_finite
from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, batches, evaluate, plain_step, train_epoch, train_step
from medsilo.learning.optimizers import begin_round
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.learning.steps import correcting, pull_back
from medsilo.learning.training import Training
from medsilo.site.settings import SiteSettings

CPU = Compute()


class Listed(Dataset):
    """A data set that returns single cases; from a TensorDataset, the loader would read whole batches."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tensors[index]


def cases(number: int) -> TensorDataset:
    random = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(number, 3, generator=random), torch.randint(4, (number,), generator=random))


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def one_epoch(model, data, loss, optimizer, compute=CPU, **others) -> float:
    return train_epoch(data, [train_step(model, OutputLoss(loss), optimizer, compute)], compute, **others)


def states_equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---------------------------------------------------------------------------------------------------- FedProx
MU, RATE, MOMENTUM, DECAY = 0.3, 0.1, 0.9, 0.01


def test_frozen_and_unused_parameters_feel_no_penalty() -> None:
    used, frozen, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    pull = pull_back([used, frozen, unused], 1.0)
    with torch.no_grad():
        for parameter in (used, frozen, unused):
            parameter.add_(1.0)
    optimizer = torch.optim.SGD([used, unused], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (used * frozen).sum()
        loss.backward()
        return loss.detach()

    with correcting(optimizer, pull):
        plain_step(optimizer, closure)
    assert used.tolist() == [-1.0, -1.0]  # 2 − (2 + 1·(2 − 1))
    assert frozen.tolist() == unused.tolist() == [2.0, 2.0]


# ---------------------------------------------------------------------------------------------------- the loop
@pytest.mark.parametrize(
    "training",
    [
        Training(learning_rate=0.1, momentum=0.9, weight_decay=0.01),
        Training(optimizer="adam", learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.01),
        Training(optimizer="adamw", learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    ],
    ids=["sgd", "adam", "adamw"],
)
@pytest.mark.parametrize("kind", [lambda data: data, Listed], ids=["in memory", "one by one"])
def test_the_loop_equals_one_written_by_hand(training: Training, kind: type) -> None:
    data = cases(19)
    model, mine = network(), network()
    optimizer = training.make_optimizer(model.parameters())
    for epoch in range(2):
        order = generator_for(0, "shuffle", epoch)
        loader = batches(kind(data), 6, CPU, order)
        mean_loss = one_epoch(model, loader, functional.cross_entropy, optimizer)

    if training.optimizer == "sgd":
        own = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    elif training.optimizer == "adam":
        own = torch.optim.Adam(mine.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.01)
    else:
        own = torch.optim.AdamW(mine.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    mine.train()
    total = torch.zeros((), dtype=torch.float64)
    for epoch in range(2):
        order = torch.randperm(19, generator=generator_for(0, "shuffle", epoch))
        total.zero_()
        # training leaves out the 19th case, because it would be the only case of its batch
        for start in (0, 6, 12):
            inputs, targets = data[order[start : start + 6]]
            own.zero_grad()
            loss = functional.cross_entropy(mine(inputs), targets)
            loss.backward()
            own.step()
            total += loss.detach() * 6
    assert states_equal(model, mine)
    assert mean_loss == float(total / 18)


def test_stop_is_asked_before_every_batch() -> None:
    asked = []

    def stop() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            raise KeyboardInterrupt

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = cases(20)
    with pytest.raises(KeyboardInterrupt):
        one_epoch(model, batches(data, 4, CPU), functional.cross_entropy, optimizer, stop=stop)
    assert len(asked) == 3
    assert int(model[1].num_batches_tracked) == 2
    asked[:] = []
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, batches(data, 4, CPU), functional.cross_entropy, correct, CPU, stop)
    assert len(asked) == 3


# ---------------------------------------------------------------------------------------------------- batches
def numbered(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size), torch.arange(size))


def order_of(data: Iterator[tuple[Tensor, Tensor]]) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in data]


def seen_in(data: Iterator[tuple[Tensor, Tensor]]) -> list[int]:
    return [case for batch in order_of(data) for case in batch]


@pytest.mark.parametrize("kind", [lambda data: data, Listed], ids=["in memory", "one by one"])
def test_a_last_batch_of_one_is_left_out_only_in_training(kind: type) -> None:
    for size, sizes in ((9, [4, 4]), (10, [4, 4, 2]), (8, [4, 4]), (1, [1]), (4, [4]), (5, [4])):
        data = kind(numbered(size))
        assert [len(batch) for batch in order_of(batches(data, 4, CPU, generator_for(0)))] == sizes
        seen = seen_in(batches(data, 4, CPU, generator_for(0)))
        assert len(set(seen)) == len(seen)
        assert seen_in(batches(data, 4, CPU)) == list(range(size))


def test_with_batches_of_one_no_case_is_left_out() -> None:
    assert sorted(seen_in(batches(numbered(5), 1, CPU, generator_for(0)))) == list(range(5))


def test_seeds_are_the_same_on_every_machine() -> None:
    """The expected seeds were computed by `printf '0\\x1finitial weights' | sha256sum`.

    A change of the expected seeds would change all published results.
    """
    assert seed_for(0, "initial weights") == 5343337840799183452
    assert seed_for(7, "hospital-a", "shuffle", 3, 0) == 4985410627636056251


def test_seeds_keep_purposes_apart() -> None:
    purposes = [(0, "a", 1), (0, "a1"), (0, "a", "1", ""), (0, 1, "a"), (1, "a"), (10, "a"), (1, "0a"), (0,), (0, "")]
    seeds = [seed_for(seed, *purpose) for seed, *purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------------------------------------------- evaluation
def correct(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"right": (output.argmax(1) == target).float()}


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 100])
def test_evaluation_is_a_mean_over_cases_whatever_the_batches(batch_size: int) -> None:
    data = cases(10)
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss, measured = evaluate(model, batches(data, batch_size, CPU), functional.cross_entropy, correct, CPU)
    with torch.no_grad():
        output = model.eval()(data.tensors[0]).double()
    chances = torch.log_softmax(output, 1)[range(10), data.tensors[1]]
    assert loss == pytest.approx(-float(chances.mean()), rel=1e-6)
    right = [row.index(max(row)) == label for row, label in zip(output.tolist(), data.tensors[1].tolist(), strict=True)]
    assert measured["right"].tolist() == right
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_mixed_precision_trains_in_it_and_scores_in_single() -> None:
    compute = Compute(precision="bfloat16")
    model, seen = nn.Linear(3, 4), []

    def loss_function(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return functional.cross_entropy(output, target)

    data = cases(4)
    one_epoch(model, batches(data, 4, compute), loss_function, torch.optim.SGD(model.parameters(), lr=0.1), compute)
    evaluate(model, batches(data, 4, compute), loss_function, correct, compute)
    assert seen == [torch.bfloat16, torch.float32]
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 1000, 70_001):
        for place in {0, size // 2, size - 1}:
            tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
            assert is_finite(tensor)
            tensor[place] = bad
            assert not is_finite(tensor)
            assert not is_finite(tensor.view(1, -1).t())


def test_what_is_finite_without_a_number() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.tensor([2**62, -(2**62)]))
    assert is_finite(torch.full((4,), torch.finfo(torch.float32).max))


# ---------------------------------------------------------------------------------------------------- Compute
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", "cuda:127"])
def test_a_gpu_that_is_not_there(device: str) -> None:
    with pytest.raises(MedsiloError) as caught:
        SiteSettings(device=device).compute()
    text = str(caught.value)
    assert device in text
    assert "0 CUDA devices" in text
    assert "give cpu or auto (--device, medsilo.yaml)" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("device", ["cuda:128", "cuda:99999999999"])
def test_a_gpu_number_that_torch_cannot_hold(device: str) -> None:
    with pytest.raises(MedsiloError, match=f"device {device}: this machine has"):
        SiteSettings(device=device).compute()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_takes_what_is_there() -> None:
    settings = SiteSettings(threads=3, precision="bfloat16")
    assert settings.compute() == Compute(torch.device("cpu"), "bfloat16", 3, 0)


def test_reproducible_gives_the_same_numbers_and_puts_everything_back() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    threads, deterministic = torch.get_num_threads(), torch.backends.cudnn.deterministic
    drawn = []
    for _ in range(2):
        with Compute(threads=threads + 1).reproducible(8):
            assert torch.get_num_threads() == threads + 1
            assert torch.backends.cudnn.deterministic
            drawn.append(torch.rand(3))
    with pytest.raises(KeyboardInterrupt), Compute(threads=threads + 1).reproducible(9):
        drawn.append(torch.rand(3))
        raise KeyboardInterrupt
    assert torch.get_num_threads() == threads
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_every_lesson_learns_from_the_same_batches_which_are_loaded_once() -> None:
    served: list[Tensor] = []
    together, alone = [network(), network()], network()
    data = list(batches(cases(12), 4, CPU))

    def once() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in data:
            served.append(inputs)
            yield inputs, targets

    def lesson_for(model: nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return train_step(model, OutputLoss(functional.cross_entropy), optimizer, CPU)

    loss = train_epoch(once(), [lesson_for(model) for model in together], CPU)
    assert len(served) == 3
    assert loss == train_epoch(iter(data), [lesson_for(alone)], CPU)
    assert states_equal(together[0], alone) and states_equal(together[1], alone)


# ---------------------------------------------------------------------------------------------------- the plan's steps
def test_a_large_gradient_is_scaled_down_to_its_bound() -> None:
    weights = nn.Parameter(torch.zeros(2))
    optimizer = Training(learning_rate=0.5, clip=2.0).make_optimizer([weights])
    for gradient, moved in (([3.0, 4.0], [-0.6, -0.8]), ([0.3, 0.4], [-0.15, -0.2])):
        weights.data.zero_()
        weights.grad = torch.tensor(gradient)
        optimizer.step()
        torch.testing.assert_close(weights.data, torch.tensor(moved), rtol=1e-5, atol=0)


def test_the_learning_rate_of_a_round_does_not_depend_on_those_before() -> None:
    training = Training(rounds=4, learning_rate=0.2, schedule="poly")

    def rate(*rounds: int) -> float:
        optimizer = training.make_optimizer([nn.Parameter(torch.zeros(1))])
        for number in rounds:
            begin_round(training, optimizer, number, 4)
        return float(optimizer.param_groups[0]["lr"])

    assert rate(1) == 0.2
    assert rate(1, 2, 3) == rate(3, 3) == rate(3) == pytest.approx(0.2 * 0.5**0.9)


def rates(training: Training, order: Sequence[int]) -> dict[int, float]:
    optimizer, found = training.make_optimizer([nn.Parameter(torch.zeros(1))]), {}
    for number in order:
        begin_round(training, optimizer, number, training.rounds)
        found[number] = float(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["constant", "poly", "cosine"])
def test_schedules_are_torchs(schedule: str, warmup: int) -> None:
    rounds, rate = 8, 0.2
    training = Training(rounds=rounds, learning_rate=rate, schedule=schedule, warmup=warmup)
    with catch_warnings():
        simplefilter("ignore")  # torch warns about a scheduler that steps without its optimizer
        own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
        after = {
            "constant": lambda: torch.optim.lr_scheduler.ConstantLR(own, 1.0),
            "poly": lambda: torch.optim.lr_scheduler.PolynomialLR(own, rounds - warmup, power=0.9),
            "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(own, rounds - warmup),
        }[schedule]()
        scheduler = after
        if warmup:
            first = torch.optim.lr_scheduler.LinearLR(own, 1 / (warmup + 1), 1.0, warmup)
            scheduler = torch.optim.lr_scheduler.SequentialLR(own, [first, after], [warmup])
        expected = []
        for _ in range(rounds):
            expected.append(scheduler.get_last_lr()[0])
            scheduler.step()
    found = rates(training, range(1, rounds + 1))
    assert [found[number] for number in range(1, rounds + 1)] == pytest.approx(expected)
    # a round has the same learning rate, whatever the order of the calls
    assert rates(training, [5, 2, 8, 1]).items() <= found.items()


def test_nesterovs_momentum_is_torchs() -> None:
    with pytest.raises(ValueError, match="nesterov is a kind of momentum"):
        Training(nesterov=True)
    assert Training(momentum=0.9, nesterov=True).make_optimizer([nn.Parameter(torch.zeros(1))]).defaults["nesterov"]
