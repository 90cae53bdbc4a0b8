"""Measure how much time and memory frozen layers save on a GPU, with SwinUNETR on volumes of 96 voxels a side."""

import time

import pytest
import torch
from torch import nn

from medsilo.learning.compute import Compute
from medsilo.registry import TABLES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and this machine shows none"
)
STEPS = 5


def cost(train: list[str]) -> tuple[float, int]:
    asked = {"name": "tuned", "of": {"name": "swin-unetr", "features": 48}, "train": train}
    network, compute = TABLES["network"].read(asked), Compute.choose("cuda", precision="bfloat16")
    model = network.settled(network.build(1, 3), compute).train()
    optimizer = torch.optim.Adam([own for own in model.parameters() if own.requires_grad])
    volumes, masks = torch.randn(1, 1, 96, 96, 96).cuda(), torch.zeros(1, 96, 96, 96, dtype=torch.int64).cuda()
    began = 0.0
    for step in range(STEPS + 1):  # the first step allocates memory for all later steps
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.monotonic()
        optimizer.zero_grad()
        with compute.cast():
            loss = nn.functional.cross_entropy(model(volumes), masks)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return STEPS / (time.monotonic() - began), torch.cuda.max_memory_allocated()


def test_a_frozen_swin_unetr_takes_less_of_the_card() -> None:
    torch.cuda.empty_cache()
    found = {}
    for name, train in {"all": ["all"], "norms": ["norms", "head"], "head": ["head"]}.items():
        found[name] = cost(train)
        print(f"{name}: {found[name][0]:.2f} volumes/s, {found[name][1] / 2**20:.0f} MiB")
    assert found["head"][1] < found["norms"][1] < found["all"][1]
    assert found["head"][0] > found["all"][0]
