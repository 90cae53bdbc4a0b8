"""Test the heart study: reading files, private training, and the real data if they are on this machine."""

import math
from pathlib import Path

import pytest
import torch

from results.heart_dp.data import HOSPITALS, Hospital, read, validation
from results.heart_dp.federation import PrivacyGuarantee, Setup, run

ROW = "{age},{sex},{pain},{pressure},{fat},0,{ecg},{rate},0,1.5,2,0,3,{level}"


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[str, Hospital]:
    draw = torch.Generator().manual_seed(3)
    for name in HOSPITALS:
        lines = []
        for case in range(40):
            level = case % 3
            numbers = torch.randint(100, 200, (3,), generator=draw).tolist()
            row = {"pressure": numbers[0], "fat": numbers[1] + 60 * (level > 0), "rate": numbers[2]}
            lines.append(ROW.format(age=40 + case, sex=case % 2, pain=1 + case % 4, ecg=case % 3, level=level, **row))
        lines[0] = lines[0].replace(lines[0].split(",")[3], "?", 1)
        lines[1] = ROW.format(age=50, sex=1, pain=1, pressure=0, fat=200, ecg=0, rate=150, level=1)
        (tmp_path / f"processed.{name}.data").write_text("\n".join(lines) + "\n", "utf-8")
    return read(tmp_path)


def test_lines_with_unknown_values_are_left_out_and_training_cases_are_scaled(hospitals: dict[str, Hospital]) -> None:
    for own in hospitals.values():
        (inputs, labels), (tests, _) = own.train.tensors, own.test.tensors
        assert len(inputs) + len(tests) == 38 and inputs.shape[1] == 13
        moving = inputs.std(0) > 0
        assert torch.allclose(inputs.mean(0), torch.zeros(13), atol=1e-5)
        assert torch.allclose(inputs.std(0)[moving], torch.ones(int(moving.sum())), atol=1e-5)
        assert set(labels.tolist()) == {0.0, 1.0}
        inner = validation(own, 0)
        assert len(inner.train) + len(inner.test) == len(own.train)


@pytest.mark.parametrize("method", ["fedavg", "mr-mtl"])
def test_a_study_keeps_its_promise_and_is_the_same_again(method: str, hospitals: dict[str, Hospital]) -> None:
    setup = Setup(method, rounds=2, steps=2, batch=None, rate=0.5, pull=0.1, start="zero")  # type: ignore[arg-type]
    one, again = (run(hospitals, setup, PrivacyGuarantee(1.0, 1e-3), 1) for _ in range(2))
    assert one == again and 0.99 < one.epsilon <= 1.0
    assert run(hospitals, setup, PrivacyGuarantee(None, None), 1).epsilon == math.inf
