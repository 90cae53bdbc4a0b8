"""Tensors that go as differences: the same bits at the other end, and nothing to gain for who lies."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medsilo.core.errors import Aborted, Lacks, PlanError, Refused
from medsilo.core.files import load_tensors
from medsilo.core.spill import TYPES, bytes_of
from medsilo.federation.asking import Missing
from medsilo.federation.difference import BLOCK, FiledTensors, pack, unpack
from medsilo.federation.known import ReceivedTensors, mark_of
from medsilo.federation.last_orders import LastOrders
from medsilo.runs.messages import Parcel
from medsilo.runs.paths import ORDERS, RECEIVED
from tests.conftest import SITES, make_plan
from tests.unit.test_coordinator import GO_ON, SMALL, Answers, Study, assert_equal
from tests.unit.test_known import LARGE, keeping

A, B, C = SITES
DELTA = "transport.delta=true"
ROUNDS = [*SMALL, "training.rounds=3"]


def bits(tensor: Tensor) -> bytes:
    return bytes(bytes_of(tensor.contiguous()))


def packed(base: Tensor, tensor: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(pack(base, tensor))), dtype=torch.uint8)


def unpacked(base: Tensor, difference: Any) -> bytes:
    return b"".join(map(bits, unpack(base, difference)))


# ---------------------------------------------------------------------------------------------------- one tensor
@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors of any type and one shape, whatever their bits say: NaN of any kind, zeros of both signs."""
    dtype, count = draw(st.sampled_from(sorted(TYPES, key=str))), draw(st.integers(0, 40))
    size = count * dtype.itemsize
    one, other = (bytearray(draw(st.binary(min_size=size, max_size=size))) for _ in range(2))
    shape = draw(st.sampled_from([(count,), (1, count), ()] if count == 1 else [(count,), (count, 1)]))
    empty = torch.empty(0, dtype=torch.uint8)
    both = [torch.frombuffer(own, dtype=torch.uint8) if own else empty for own in (one, other)]
    first, second = (own.view(dtype).reshape(shape) for own in both)
    return first, second


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_a_difference_gives_the_same_bits(both: tuple[Tensor, Tensor]) -> None:
    base, tensor = both
    assert unpacked(base, packed(base, tensor)) == bits(tensor)


def test_what_training_changes_is_smaller_whatever_its_size() -> None:
    """More numbers than are worked at together; odd ones among them."""
    torch.manual_seed(0)
    base = torch.randn(BLOCK + 5) / 30
    tensor = base + 1e-4 * torch.randn(BLOCK + 5)
    tensor[:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    difference = packed(base, tensor)
    assert unpacked(base, difference) == bits(tensor)
    assert len(difference) < 0.7 * tensor.nbytes < len(zlib.compress(bits(tensor)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_damaged_makes_as_many_bytes_or_is_refused(data: st.DataObject) -> None:
    base = torch.arange(300, dtype=torch.float32)
    content = bytearray(bytes_of(packed(base, base + 1)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    try:
        assert len(unpacked(base, torch.tensor(content[:cut], dtype=torch.uint8))) == base.nbytes
    except Refused as error:
        assert str(error)


def raw(content: bytes) -> Tensor:
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    return torch.frombuffer(bytearray(stream.compress(content) + stream.flush()), dtype=torch.uint8)


LIES: dict[str, tuple[Any, str]] = {
    "a bomb": (raw(bytes(300_000_000)), "it makes more bytes than the tensor has"),
    "one byte more": (raw(bytes(4001)), "it makes more bytes than the tensor has"),
    "one byte less": (raw(bytes(3999)), "it makes fewer bytes than the tensor has"),
    "nothing": (torch.empty(0, dtype=torch.uint8), "it makes fewer bytes than the tensor has"),
    "no end": (raw(bytes(4000))[:-1], "it was cut short"),
    "more behind": (torch.cat([raw(bytes(4000)), torch.zeros(1, dtype=torch.uint8)]), "something stands behind it"),
    "much behind": (torch.cat([raw(bytes(4000)), torch.zeros(1 << 19, dtype=torch.uint8)]), "something stands behind"),
    "no deflate": (torch.full((9,), 255, dtype=torch.uint8), "it can't be unpacked"),
    "numbers": (torch.zeros(9), "it is none"),
    "a table": (torch.zeros(3, 3, dtype=torch.uint8), "it is none"),
    "a text": ("packed", "it is none"),
    "no tensor": (None, "it is none"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_unpacked_no_further_than_the_tensor(lie: str) -> None:
    difference, reason = LIES[lie]
    made: list[int] = []
    with pytest.raises(Refused, match=reason):
        made.extend(block.nbytes for block in unpack(torch.zeros(1000), difference))
    assert sum(made) <= 4000


def test_tensors_in_a_file_are_those_that_were_put_there(tmp_path: Path) -> None:
    """A difference that spares too little, or can't be unpacked, leaves no trace."""
    torch.manual_seed(0)
    base, double = torch.randn(2, 3000), torch.randn(501, dtype=torch.float64)
    filed = FiledTensors(tmp_path)
    assert filed.tensors() == {}
    assert not filed.put_packed("a", "noise", base, torch.randn(2, 3000), 4000)
    with pytest.raises(Refused):
        filed.put("a", "lie", base, raw(bytes(9)))
    filed.put("a", "double", double, packed(double, -double))
    filed.put("b", "single", base, packed(base, base * 2))
    assert filed.put_packed("b", "packed", base, base + 1e-5, 1)
    found = filed.tensors()
    assert {group: sorted(own) for group, own in found.items()} == {"a": ["double"], "b": ["packed", "single"]}
    assert torch.equal(found["a"]["double"], -double) and torch.equal(found["b"]["single"], base * 2)
    assert unpacked(base, found["b"]["packed"]) == bits(base + 1e-5)


# ---------------------------------------------------------------------------------------------------- studies
def sizes(study: Study, task: str = "round") -> dict[tuple[str, int], set[str]]:
    """Return by site and round the large tensors that were sent whole, in the first order of the round."""
    return {
        (site, order.facts["round"]): {
            name
            for name, tensor in order.groups.get("model", {}).items()
            if name in LARGE and tensor.dtype is not torch.uint8
        }
        for site, order in reversed(study.transport.sent)
        if order.facts["task"] == task
    }


def states(study: Study) -> Any:
    return load_tensors(study.folder / "checkpoints/round-3.safetensors")[0]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", []),
        ("fedavg", ["transport.precision=bfloat16"]),
        pytest.param("fedsm", [], marks=pytest.mark.slow),
        pytest.param("scaffold", [], marks=pytest.mark.slow),
    ],
)
def test_a_study_of_differences_ends_with_the_same_bits(method: str, changes: list[str], tmp_path: Path) -> None:
    studies = [Study(make_plan(method, *ROUNDS, *changes, *more), tmp_path / str(len(more))) for more in ([], [DELTA])]
    whole, delta = studies[0], keeping(studies[1])
    whole.run()
    delta.run()
    assert_equal(*map(states, (whole, delta)))
    for site in SITES:
        assert_equal(*(study.model(f"sites/{site}/best") for study in (whole, delta)))
    for before, after in zip(whole.rounds, delta.rounds, strict=True):
        for site in SITES:
            one, other = before.sites[site], after.sites[site]
            assert other.updates == one.updates
            assert other.bytes_up < 0.95 * one.bytes_up
            assert other.bytes_down <= one.bytes_down * (1 if after.round == 1 else 0.95)
    assert not (delta.folder / ORDERS).exists()


def test_a_site_that_comes_back_is_sent_whole_tensors_once(tmp_path: Path) -> None:
    """C misses round 2: what it holds in round 3 is older than what the server keeps."""

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if (site, asked.facts["task"], asked.facts["round"]) == (C, "round", 2):
            return Missing("lost", "no answer")
        if asked.facts["task"] == "deliver":  # those of the last exchange, and of this one
            kept.append(len(list((study.folder / ORDERS).iterdir())))
        return [(site, work())]

    kept: list[int] = []
    study = keeping(Study(make_plan("fedavg", *ROUNDS, *GO_ON, DELTA), tmp_path / "run", script))
    study.run()
    whole = {key for key, names in sizes(study).items() if names}
    assert whole == {(A, 1), (B, 1), (C, 1), (C, 3)}
    assert max(kept) == 2 * len(LARGE)
    assert not any(sizes(study, "deliver").values())


def test_a_study_that_goes_on_begins_with_whole_tensors(tmp_path: Path) -> None:
    """The server is killed in round 3: what it holds then was never given to these sites by this process."""
    plan = make_plan("fedavg", *ROUNDS, DELTA)

    def killed(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if site == B and asked.facts["round"] == 3:
            raise Aborted("the server was killed")
        return [(site, work())]

    with pytest.raises(Aborted):
        keeping(Study(plan, tmp_path / "run", killed)).run()
    again, whole = keeping(Study(plan, tmp_path / "run")), Study(plan, tmp_path / "whole")
    again.coordinator.run(resume=True)
    whole.run()
    assert_equal(*map(states, (again, whole)))
    assert {key for key, names in sizes(again).items() if names} == {(B, 3), (C, 3)}  # A has round 3's order already


@pytest.mark.parametrize("harm", ["a site's", "the server's"])
def test_a_copy_that_is_wrong_costs_bytes_and_no_round(harm: str, tmp_path: Path) -> None:
    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if (site, asked.facts["task"], asked.facts["round"]) == (A, "join", 0):
            return [(site, work())]
        try:
            reply = work()
        except Lacks as error:
            return Missing.refused(error)
        if asked.facts["task"] == "round" and asked.facts["round"] == 1:
            for path in (folder[harm] if site == B else tmp_path / "none").glob("*"):
                path.write_bytes(b"x" + path.read_bytes()[1:])
        return [(site, reply)]

    study = keeping(Study(make_plan("fedavg", *ROUNDS, DELTA), tmp_path / "run", script))
    folder = {"a site's": study.folder / "sites" / B / RECEIVED, "the server's": study.folder / ORDERS}
    study.run()
    whole = [
        (site, order.facts["round"])
        for site, order in study.transport.sent
        if order.facts["task"] == "round" and order.groups["model"]["4.weight"].dtype is torch.float32
    ]
    again = [(B, 2)] if harm == "a site's" else [(site, 2) for site in SITES]
    assert whole == [*((site, 1) for site in SITES), *again]
    assert all(line.answered == SITES for line in study.rounds)


def test_a_site_that_lies_pays_alone(tmp_path: Path) -> None:
    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        reply = work()
        if site == C and asked.facts["task"] == "round":
            reply.facts["differences"]["model"]["4.weight"] = "0" * 80
        return [(site, reply)]

    study = keeping(Study(make_plan("fedavg", *SMALL, *GO_ON, "training.rounds=1", DELTA), tmp_path / "run", script))
    study.run()
    assert study.rounds[0].answered == [A, B]
    assert study.rounds[0].refused == {C: "its difference of model/4.weight makes another tensor than it says"}


# What a site sends as its difference of which tensor, and why that is refused.
ANSWERS: dict[str, tuple[str, str, Any, str]] = {
    "a bomb": ("model", "w", raw(bytes(50_000_000)), "its difference of model/w: it makes more bytes than"),
    "whole": ("model", "w", torch.zeros(64, 64), "its difference of model/w: it is none"),
    "another": ("model", "w", raw(bytes(4 * 4096)), "its difference of model/w makes another tensor than it says"),
    "never told": ("model", "short", raw(bytes(16)), "it sends model/short as a difference to what it was not given"),
    "no number": ("model", "truths", raw(bytes(5000)), "it sends model/truths as a difference to what it was not"),
    "no group": ("head", "w", raw(bytes(4 * 4096)), "it sends head/w as a difference to what it was not given"),
}


@pytest.mark.parametrize("lie", ANSWERS)
def test_an_answer_of_wrong_differences_is_refused(lie: str, tmp_path: Path) -> None:
    group, name, sent, reason = ANSWERS[lie]
    order = {"model": {"w": torch.ones(64, 64), "short": torch.ones(4), "truths": torch.ones(5000) > 0}}
    told = {"model": {name: mark_of(order["model"][name]) for name in ("w", "truths")}}
    server = LastOrders(tmp_path, True)
    with pytest.raises(Refused, match=reason):
        server.whole({group: {name: sent}}, {group: {name: "0" * 80}}, told, order)
    with pytest.raises(Refused, match=f"{group}/{name}"):  # it tells a difference and sends none
        server.whole({group: {}}, {group: {name: "0" * 80}}, told, order)


# ---------------------------------------------------------------------------------------------------- the parts
def test_differences_are_refused_where_the_plan_has_none(tmp_path: Path) -> None:
    order = {"model": {"w": torch.randn(64, 64)}}
    marks = {"model": {"w": mark_of(order["model"]["w"])}}
    with pytest.raises(Refused, match="it sends model/w as a difference"):
        LastOrders(tmp_path, False).whole({"model": {"w": raw(bytes(9))}}, marks, marks, order)
    with pytest.raises(Refused, match="in a form that is not known"):
        ReceivedTensors(tmp_path).open(Parcel(order, {"task": "round", "marks": marks, "bases": marks}))
    with pytest.raises(PlanError, match=r"transport\.delta: .* transport\.sealing=none$"):
        make_plan("fedavg", "transport.sealing=group", DELTA)


def test_a_site_learns_nothing_of_what_others_were_given(tmp_path: Path) -> None:
    """B says that it holds A's personal model, whose mark it has heard of."""
    torch.manual_seed(0)
    server = LastOrders(tmp_path, True)
    theirs = {site: {"personal": {"w": torch.randn(64, 64)}} for site in (A, B)}
    marks = {site: {"personal": {"w": mark_of(own["personal"]["w"])}} for site, own in theirs.items()}
    for site in (A, B):
        assert server.shorten(site, theirs[site], marks[site], {}) == (theirs[site], {})
    server.begin()
    later = {"personal": {"w": theirs[A]["personal"]["w"] + 1e-5}}
    told = {"personal": {"w": mark_of(later["personal"]["w"])}}
    sent, bases = server.shorten(A, later, told, marks[A])
    assert bases == marks[A] and sent["personal"]["w"].nbytes < 0.8 * later["personal"]["w"].nbytes
    assert server.shorten(B, later, told, marks[A]) == (later, {})


def test_a_server_whose_disk_takes_nothing_sends_whole_tensors(tmp_path: Path) -> None:
    (tmp_path / ORDERS).write_text("a file in the folder's place")
    server, order = LastOrders(tmp_path, True), {"model": {"w": torch.zeros(64, 64)}}
    for step in range(2):
        following = {"model": {"w": order["model"]["w"] + step}}
        holds, told = ({"model": {"w": mark_of(own["model"]["w"])}} for own in (order, following))
        server.begin()
        assert server.shorten(A, following, told, holds) == (following, {})
        order = following
    server.forget()


def test_a_difference_is_made_once_for_all_sites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[int] = []
    monkeypatch.setattr("medsilo.federation.difference.pack", lambda base, tensor: made.append(1) or pack(base, tensor))
    torch.manual_seed(0)
    server, order = LastOrders(tmp_path, True), {"model": {"w": torch.randn(64, 64)}}
    for step in range(3):
        following = {"model": {"w": order["model"]["w"] + 1e-5 * step}}
        holds, told = ({"model": {"w": mark_of(own["model"]["w"])}} for own in (order, following))
        server.begin()
        places = {server.shorten(site, following, told, holds)[0]["model"]["w"].data_ptr() for site in SITES}
        assert len(places) == 1
        order = following
    assert len(made) == 2
    assert len(list((tmp_path / ORDERS).iterdir())) == 2
