"""A copy of a tensor reuses memory, but only if no object still uses this memory."""

import pytest
import torch

from medsilo.core import reused_memory
from medsilo.core.reused_memory import LEAST, copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (LEAST, 3)])
def test_a_copy_has_the_same_numbers_and_is_nobody_else_s(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    own = torch.randn(shape).to(dtype)
    copy = copied(own)
    assert copy.dtype == dtype and copy.shape == own.shape and torch.equal(copy, own)
    before = copy.clone()
    own.fill_(1)
    assert torch.equal(copy, before)


def test_a_view_a_parameter_and_channels_last_are_copied_as_they_read() -> None:
    whole = torch.randn(4, 600, 600)
    assert torch.equal(copied(whole.transpose(1, 2)), whole.transpose(1, 2))
    channels_last = torch.randn(2, 8, 200, 200).to(memory_format=torch.channels_last)
    assert torch.equal(copied(channels_last), channels_last) and copied(channels_last).is_contiguous()
    weight = torch.nn.Linear(700, 700).weight
    assert torch.equal(copied(weight), weight) and not copied(weight).requires_grad


def test_memory_is_used_again_when_nobody_holds_any_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reused_memory, "_spare", {})
    own = torch.arange(LEAST, dtype=torch.float32)
    first = copied(own)
    place, part = first.data_ptr(), first[100:200]
    del first
    second = copied(own + 1)
    assert second.data_ptr() != place and torch.equal(part, own[100:200])
    numbers = part.numpy()
    del part
    assert copied(own).data_ptr() != place and numbers[0] == 100
    del numbers
    assert copied(own).data_ptr() == place


def test_no_more_than_so_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reused_memory, "_spare", {})
    monkeypatch.setattr(reused_memory, "MOST_SPARE", 3 * 4 * LEAST)
    held = [copied(torch.ones(LEAST)) for _ in range(5)]
    del held
    assert [len(blocks) for blocks in reused_memory._spare.values()] == [3]
