"""medsilo's filters are correct for each data type, and NVFlare's filters pass medsilo's messages on correctly."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.runs.messages import StudyMessage
from medsilo_lab.testing import assert_equal

FACTS = {"round": 3, "task": "round", "packages": {"medsilo": {"version": "1"}}}


def message(dtype: torch.dtype = torch.float32, samples: int = 20) -> StudyMessage:
    chance = torch.Generator().manual_seed(0)
    model = {
        "weight": torch.randn(40, 5, generator=chance).to(dtype),
        "bn.running_var": torch.rand(7, generator=chance).to(dtype),
        "bn.num_batches_tracked": torch.tensor(123_457),
    }
    groups = {"model": model, "amplitude": {"mean": torch.rand(3, 4, generator=chance).to(dtype)}}
    return StudyMessage(groups, {**FACTS, "samples": samples})


def through(sent: StudyMessage, *filters: Filter) -> StudyMessage:
    answer = to_shareable(sent)
    for one in filters:
        answer = one.process(answer, FLContext())
    return to_parcel(answer)


# ---------------------------------------------------------------------------------------------------- NVFlare's
def quantising(monkeypatch: pytest.MonkeyPatch, back: bool) -> list[Filter]:
    """Return NVFlare's filter that converts tensors to float16, and if `back` is true also the filter that restores the
    tensors.

    An empty module replaces bitsandbytes, which NVFlare imports but does not need for float16.
    """
    unused = ("QuantState", "dequantize_4bit", "dequantize_blockwise", "quantize_4bit", "quantize_blockwise")
    absent = SimpleNamespace(**dict.fromkeys(unused))
    monkeypatch.setitem(sys.modules, "bitsandbytes", absent)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", absent)
    from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
    from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

    return [ModelQuantizer("float16"), *([ModelDequantizer()] if back else [])]


FILTERS: dict[str, Callable[[pytest.MonkeyPatch], list[Filter]]] = {
    "percentile": lambda patch: [PercentilePrivacy(10, 0.5)],
    "sparse vector": lambda patch: [SVTPrivacy(fraction=0.5, epsilon=1.0)],
    "both": lambda patch: [PercentilePrivacy(10, 0.5), SVTPrivacy(fraction=0.5, epsilon=1.0)],
    "quantised": lambda patch: quantising(patch, back=False),
    "quantised and back": lambda patch: quantising(patch, back=True),
    "exclude": lambda patch: [ExcludeVars("nothing-of-this-name")],
}


@pytest.mark.parametrize("make", FILTERS.values(), ids=FILTERS)
def test_a_parcel_stays_a_parcel_under_nvflares_filters(
    make: Callable[[pytest.MonkeyPatch], list[Filter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make(monkeypatch)
    sent = message()
    # ModelQuantizer raises an error for integer tensors
    if any(type(one).__name__ == "ModelQuantizer" for one in theirs):
        del sent.groups["model"]["bn.num_batches_tracked"]
    before = {name: tensor.clone() for name, tensor in sent.groups["model"].items()}
    got = through(sent, *theirs)
    assert got.facts == sent.facts
    assert got.groups.keys() == sent.groups.keys()
    for group, tensors in sent.groups.items():
        assert got.groups[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (got.groups[group][name].dtype, got.groups[group][name].shape) == (tensor.dtype, tensor.shape)
            assert torch.isfinite(got.groups[group][name]).all()
    assert_equal(sent.groups["model"], before)


def test_percentile_privacy_changes_values_as_it_says() -> None:
    sent = message()
    got = through(sent, PercentilePrivacy(30, 0.5)).groups["amplitude"]["mean"].numpy()
    values = sent.groups["amplitude"]["mean"].numpy()
    cut = np.percentile(values, 30)
    assert np.allclose(got, np.where(values < cut, 0, np.minimum(values, 0.5)))


def test_what_is_excluded_is_missing_and_the_sites_own_copy_is_not() -> None:
    sent = message()
    got = through(sent, ExcludeVars("bn"))
    assert list(got.groups["model"]) == ["weight"] and len(sent.groups["model"]) == 3


def test_what_came_as_no_number_is_not_made_one() -> None:
    answer = to_shareable(message())
    from_shareable(answer).data["model"].data["bn.num_batches_tracked"] = torch.tensor(float("nan"))
    assert to_parcel(answer).groups["model"]["bn.num_batches_tracked"].isnan()
