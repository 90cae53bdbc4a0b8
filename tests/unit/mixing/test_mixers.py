"""Test aggregators: their means, their rounds, their rejections, and their use of disk and memory."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.mmap_store import stored
from medsilo.mixing import contributions
from medsilo.mixing.aggregators import Identity, PersonalModelPool, SimilarityMix, SoftPull, UniformMean, WeightedMean
from medsilo.mixing.mean_forms import MeanForm, ServerReadable
from medsilo_secagg.pairwise import form_of
from tests.mixed import result_of

WEIGHTS = torch.tensor([[0.5, 0.2, 0.3], [0.0, 1.0, 0.0], [0.1, 0.6, 0.3]], dtype=torch.float64)
MAKERS = {
    "weighted": WeightedMean,
    "uniform": UniformMean,
    "soft": lambda: SoftPull(0.7),
    "similarity": lambda: SimilarityMix(WEIGHTS),
    "identity": Identity,
}
MEANS = ["weighted", "uniform"]
PERSONAL = ["soft", "similarity", "identity"]
every_mixer = pytest.mark.parametrize("kind", MAKERS)


def model(value, steps=3, dtype=torch.float32):
    return {
        "body.weight": torch.tensor([[value, -value, 2.0 * value]], dtype=dtype),
        "norm.steps": torch.tensor(steps),
        "mask": torch.tensor([steps > 3, False]),
    }


THREE = [("a", model(1.0, 5), 1), ("b", model(2.0, 6), 2), ("c", model(10.0, 7), 5)]


def copy(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def play(aggregator, contributions, sites="abc", initial=None):
    aggregator.start(list(sites), initial)
    for site, tensors, weight in contributions:
        aggregator.add(site, copy(tensors), weight)
    results = {}
    for site in sorted(sites):
        with suppress(MedsiloError):
            results[site] = result_of(aggregator, site)
    return results


def first_of(tensors):
    """Return the model's first value, from which a test can compute all other values."""
    return tensors["body.weight"].flatten()[0].item()


def values(results):
    return [first_of(tensors) for tensors in results.values()]


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (two[name].dtype, two[name].shape)
        flat, other = tensor.reshape(-1), two[name].reshape(-1)
        assert torch.equal(flat.view(torch.uint8), other.view(torch.uint8)), name


# -- equations --------------------------------------------------------------------------------------------------------


def test_half_precision_is_summed_in_double():
    """A sum in bfloat16 that grows by 1 would stop at 256, because the next larger value is 258.

    300 contributions of the value 1 and one contribution of the value 302 have the mean 2.
    """
    sites = [f"{place:03}" for place in range(301)]
    sent = [(s, {"w": torch.tensor([302.0 if s == "300" else 1.0], dtype=torch.bfloat16)}, 1) for s in sites]
    assert play(WeightedMean(), sent, sites)["000"]["w"].item() == 2.0


@every_mixer
@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0)}, {"n": torch.tensor(7)}, {"x": torch.tensor(2.0)}])
def test_groups_with_almost_nothing(kind, tensors):
    assert_same(play(MAKERS[kind](), [("a", tensors, 1), ("b", tensors, 2)])["b"], tensors)


@every_mixer
def test_numbers_that_are_none_do_not_stop_a_round(kind):
    bad = model(float("nan"))
    results = play(MAKERS[kind](), [("a", bad, 1), ("b", model(1.0), 1), ("c", model(float("inf")), 1)])
    assert set(results) == set("abc")


# -- the order of arrival ---------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_changes_nothing(monkeypatch):
    """If the disk is full, adding a contribution raises an error, and the aggregator accepts the same contribution
    after space has become free.
    """
    sent = [(site, {"v": torch.randn(50), "w": torch.randn(300)}, w) for site, w in (("a", 1), ("b", 2), ("c", 3))]
    wanted = play(WeightedMean(), sent)["a"]
    room, write = [400], os.pwritev

    def write_what_fits(file, parts, place):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, [b"".join(parts)[: room[0]]], place)
        room[0] -= done
        return done

    monkeypatch.setattr(contributions, "MEMORY", 0)
    monkeypatch.setattr(os, "pwritev", write_what_fits)
    aggregator = WeightedMean()
    aggregator.start(list("abc"))
    for _ in range(2):
        with pytest.raises(MedsiloError, match=r"b: .*No space left on device") as raised:
            aggregator.add(*sent[1])
    assert raised.value.private == tempfile.gettempdir()
    assert tempfile.gettempdir() not in str(raised.value)
    room[0] = 100_000
    for contribution in reversed(sent):
        aggregator.add(*contribution)
    assert_same(result_of(aggregator, "a"), wanted)


def test_what_waits_goes_to_the_disk_once_it_is_too_much_together(monkeypatch):
    written, write = [], os.pwritev
    monkeypatch.setattr(contributions, "MEMORY", 2 * 1200)
    monkeypatch.setattr(os, "pwritev", lambda *given: written.append(1) or write(*given))
    aggregator = WeightedMean()
    aggregator.start(list("abcd"))
    for site, times in (("d", 0), ("c", 0), ("b", 1), ("a", 1)):
        aggregator.add(site, {"w": torch.full((300,), 1.0)}, 1)
        assert len(written) == times, site


def test_rows_of_different_sizes_wait_on_the_disk_in_places_of_their_own(monkeypatch):
    """One site may give one weight for each tensor, while another site gives one weight for each element."""
    monkeypatch.setattr(contributions, "MEMORY", 0)
    rows = contributions.Contributions()
    sent = {site: {"w": torch.full((size,), float(size))} for site, size in zip("abc", (10, 5000, 20), strict=True)}
    for site, own in sent.items():
        rows.put(site, own, own)
    rows.drop("ab")  # the next row may be larger than the gap that the removed row leaves
    sent |= {site: {"w": torch.full((5000,), number)} for site, number in (("a", 1.0), ("b", 2.0))}
    for site in "ab":
        rows.put(site, sent[site], sent[site])
    for site, row in zip("abc", rows.each("abc"), strict=True):
        assert torch.equal(row["w"], sent[site]["w"]), site


def test_a_mixer_that_computes_otherwise_is_not_sealed_as_its_base_class_is():
    """A subclass that computes a different mean than its base class must declare its form of the mean for secure
    aggregation.

    If a subclass inherited the declared form of the mean, secure aggregation would silently compute the mean of the
    base class.
    """

    class Otherwise(WeightedMean):
        def _merge(self):
            super()._merge()

    class More(Otherwise):
        """An aggregator whose base class does not declare a form of the mean."""

    class SaysSo(Otherwise):
        sealed = MeanForm(weighted=False)

    assert form_of(WeightedMean()) == MeanForm(weighted=True)
    # UniformMean and its base class compute sums in the same way
    assert form_of(UniformMean()) == MeanForm(weighted=False)
    assert all(isinstance(form_of(aggregator), ServerReadable) for aggregator in (Otherwise(), More()))
    assert form_of(SaysSo()) == MeanForm(weighted=False)


def test_nobody_sends_others_models_back():
    gallery = PersonalModelPool(Identity(), WeightedMean(), frozenset)
    gallery.start(["a", "b"])
    with pytest.raises(Refused, match="a: sites send no tensors of this group"):
        gallery.add("a", {"w": torch.zeros(1)}, 1)


def test_what_lies_in_files_when_it_comes_is_not_written_again(monkeypatch):
    """NVFlare stores received tensors in files, so the aggregator does not write them again, and does not keep them in
    memory.
    """
    sent = [(site, {"v": torch.randn(50), "w": torch.randn(1 << 20)}, w) for site, w in (("a", 1), ("b", 2), ("c", 3))]
    wanted = play(WeightedMean(), sent)["a"]
    filed = [(site, dict(zip(own, stored(own.values()), strict=True)), weight) for site, own, weight in sent]
    monkeypatch.setattr(contributions, "MEMORY", 0)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("the tensors were written again"))
    aggregator = WeightedMean()
    aggregator.start(list("abc"))
    before = in_files()
    for site, tensors, weight in reversed(filed):
        assert tensors["w"].isfinite().all()  # the server reads all values before accepting a contribution
        aggregator.add(site, tensors, weight)
        assert in_files() - before < 1 << 20
    assert_same(result_of(aggregator, "a"), wanted)


def in_files():
    """Return the number of bytes in this process's memory that are mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def test_a_folder_for_temporary_files_that_does_not_exist_is_an_error(monkeypatch, tmp_path, fresh_spills):
    monkeypatch.setattr(contributions, "MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    aggregator = WeightedMean()
    aggregator.start(["a", "b"])
    with pytest.raises(MedsiloError, match="No such file"):
        aggregator.add("b", model(1.0), 1)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_an_absent_site_gets_the_mean_but_keeps_a_personal_model():
    second = [("a", model(4.0), 1), ("b", model(8.0), 3)]
    expected = {
        "weighted": [7.0, 7.0, 7.0],
        "uniform": [6.0, 6.0, 6.0],
        "soft": [0.7 * 4 + 0.3 * 8, 0.7 * 8 + 0.3 * 4, 7.45],
        "similarity": [(0.5 * 4 + 0.2 * 8) / 0.7, 8.0, 4.3],
        "identity": [4.0, 8.0, 10.0],
    }
    for kind, make in MAKERS.items():
        aggregator = make()
        play(aggregator, THREE)
        assert values(play(aggregator, second)) == pytest.approx(expected[kind], rel=1e-6), kind


@every_mixer
def test_a_round_without_answers_changes_nothing(kind):
    aggregator = MAKERS[kind]()
    before = play(aggregator, THREE)
    after = play(aggregator, [])
    assert aggregator.shares == {}
    for site in "abc":
        assert_same(after[site], before[site])
    aggregator.start(list("abc"))
    aggregator.finish()
    assert_same(aggregator.current("b"), before["b"])


@every_mixer
def test_current_is_the_round_start_until_the_round_closes(kind):
    aggregator, initial = MAKERS[kind](), model(-7.0)
    aggregator.start(list("abc"), initial)
    for site in "abc":
        assert all(aggregator.current(site)[name] is tensor for name, tensor in initial.items())
    before = play(aggregator, THREE)
    aggregator.start(list("abc"))
    assert_same(aggregator.current("c"), before["c"])
    aggregator.add("a", model(3.0), 1)
    aggregator.add("b", model(5.0), 1)
    assert_same(aggregator.current("c"), before["c"])
    if kind in MEANS:
        assert_same(aggregator.current("a"), before["a"])
    else:
        with pytest.raises(MedsiloError, match="a: the site has answered"):
            aggregator.current("a")
    aggregator.finish()
    for site in "abc":
        assert_same(aggregator.current(site), result_of(aggregator, site))
    assert first_of(result_of(aggregator, "b")) != first_of(before["b"])


@every_mixer
def test_initial_is_only_for_who_has_nothing(kind):
    aggregator = MAKERS[kind]()
    play(aggregator, THREE[:2])
    aggregator.start(list("abc"), model(-3.0))
    assert aggregator.current("a")["body.weight"][0, 0] > 0
    assert (first_of(aggregator.current("c")) == -3.0) == (kind in PERSONAL)


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "similarity"])
def test_sites_may_come_and_go_between_rounds(kind):
    aggregator = MAKERS[kind]()
    before = play(aggregator, THREE)
    results = play(aggregator, [("d", model(6.0), 1)], "bd", initial=model(0.0))
    assert first_of(results["d"]) == 6.0
    assert first_of(results["b"]) == (6.0 if kind in MEANS else first_of(before["b"]))
    assert first_of(play(aggregator, [("a", model(9.0), 1)])["a"]) == 9.0


@every_mixer
def test_neither_what_came_in_nor_what_was_given_out_ever_changes(kind):
    aggregator, initial = MAKERS[kind](), model(0.5)
    kept = [(initial, copy(initial))]
    for turn in range(4):
        aggregator.start(list("abc"), initial)
        kept += [(tensors, copy(tensors)) for tensors in map(aggregator.current, "abc")]
        for site, tensors, weight in THREE[: 1 + turn % 3]:
            sent = {name: tensor + turn if tensor.dtype != torch.bool else tensor for name, tensor in tensors.items()}
            kept.append((sent, copy(sent)))
            aggregator.add(site, sent, weight)
        kept += [(tensors, copy(tensors)) for tensors in (result_of(aggregator, site) for site in "abc")]
    for tensors, snapshot in kept:
        assert_same(tensors, snapshot)


@every_mixer
def test_results_do_not_hang_together(kind):
    """Returned tensors share no memory, because the server may send each tensor separately."""
    aggregator = MAKERS[kind]()
    results = play(aggregator, THREE)
    for tensors in results.values():
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())
    results["a"].clear()
    assert result_of(aggregator, "a").keys() == THREE[0][1].keys()
    assert all(result_of(aggregator, "a")[name] is tensor for name, tensor in result_of(aggregator, "a").items())


@every_mixer
def test_views_gradients_and_strides_are_taken_as_they_are(kind):
    base = torch.arange(24.0)
    sent = {
        "transposed": base.view(4, 6).t(),
        "every second": base[::2],
        "parameter": torch.nn.Parameter(base.clone()),
        "channels last": base.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }
    aggregator = MAKERS[kind]()
    aggregator.start(list("abc"))
    aggregator.add("b", sent, 2)
    aggregator.add("a", dict(reversed(sent.items())), 3)
    for name, tensor in result_of(aggregator, "a").items():
        assert torch.equal(tensor, sent[name].detach())
        assert not tensor.requires_grad


@every_mixer
def test_a_site_without_tensors_is_an_error_that_names_it(kind):
    aggregator = MAKERS[kind]()
    aggregator.start(list("abc"))
    for site in "az":
        with pytest.raises(MedsiloError, match=f"^{site}: the site has no tensors"):
            aggregator.current(site)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@every_mixer
def test_a_state_before_the_first_round_is_empty(kind):
    tensors, facts = MAKERS[kind]().state()
    assert tensors == {}
    aggregator = MAKERS[kind]()
    aggregator.load_state({}, json.loads(json.dumps(facts)))
    aggregator.start(list("abc"))
    with pytest.raises(MedsiloError, match="a: the site has no tensors"):
        aggregator.current("a")


def test_the_state_holds_one_mean_and_every_shared_model_once():
    initial = model(0.5)
    for kind, make in MAKERS.items():
        aggregator = make()
        play(aggregator, THREE[:1], initial=initial)
        tensors, _ = aggregator.state()
        groups = [""] if kind in MEANS else ["a/", "b/"]
        assert sorted(tensors) == sorted(group + name for group in groups for name in initial)


# -- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import sys, torch
from pathlib import Path
from medsilo.core.parent_watch import most_held
from medsilo.mixing import contributions
from medsilo.mixing.mean_forms import MeanForm, ServerReadable
from medsilo.mixing.aggregators import *
from medsilo.mixing.server import *

PARCEL = 24_000_000
contributions.MEMORY = 4 << 20

def parcel(value):
    sizes = {"long": PARCEL // 6, **{f"short {place}": PARCEL // 192 for place in range(16)}}
    return {name: torch.full((size,), float(value)) for name, size in sizes.items()}

def play(mixer, sites, order):
    mixer.start(sites)
    for site in order:
        mixer.add(site, parcel(int(site)), 1)
    mixer.finish()
    for site in order:
        mixer.current(site)

kind, count = sys.argv[1], int(sys.argv[2])
sites = [f"{place:03}" for place in range(count)]
weights = torch.full((count, count), 1 / count)
make = {"SoftPull": lambda: SoftPull(0.7), "SimilarityMix": lambda: SimilarityMix(weights)}
mixer = make.get(kind, globals()[kind])()
small = make.get(kind, globals()[kind])()
small.start(sites)
small.add(sites[0], {"w": torch.ones(5)}, 1)
small.finish()
before = most_held()
play(mixer, sites, sites[::2])  # tensors of an earlier round are held, too
play(mixer, sites, sites[::-1])
print((most_held() - before) / PARCEL)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize(
    ("kind", "sites", "parcels"),
    [
        pytest.param(
            "WeightedMean", 12, 1 + 1 + 1, marks=pytest.mark.long
        ),  # memory for three models: the last mean, the running mean and the arriving message
        # the optimizer's two vectors are on the disk
        pytest.param("FedAdam", 12, 1 + 1 + 1, marks=pytest.mark.long),
        pytest.param(
            "SoftPull", 8, 8 + 1 + 1, marks=pytest.mark.long
        ),  # memory for each site's model, the arriving message and a copy of the message
        ("SimilarityMix", 8, 8 + 1 + 1),
        ("Identity", 8, 8 + 1),
    ],
)
def test_peak_memory(kind, sites, parcels):
    """The process returns freed memory to the system at once, so that fragmentation does not change the peak."""
    command = [sys.executable, "-c", PEAK, kind, str(sites)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    # the limit includes the memory of 0.6 models for code that Python loads during the test
    assert float(done.stdout) <= parcels + 0.6


# ----------------------------------------------------------------------------------------------- the server's step size
@pytest.mark.parametrize("kind", [WeightedMean, UniformMean])
@pytest.mark.parametrize("rate", [0.25, 1.0, 1.5])
def test_the_server_steps_towards_the_mean(kind: type[WeightedMean], rate: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> dict[str, torch.Tensor]:
        made = {name: torch.rand(3, 4, generator=generator) for name in ("a", "norm.running_var")}
        return {**made, "count": torch.tensor(count)}

    theta, sent = drawn(3), {site: drawn(5) for site in "xyz"}
    weights = dict(zip("xyz", (1.0, 2.0, 5.0), strict=True)) if kind is WeightedMean else dict.fromkeys("xyz", 1.0)
    stepping, plain = kind(rate=rate), kind()
    for aggregator in (stepping, plain):
        aggregator.start(["x", "y", "z"], theta)
        for site in "zyx":
            aggregator.add(site, sent[site], weights[site])
    result = result_of(stepping, "y")
    # batch-norm statistics take the whole step, because a step beyond the mean could make a variance negative
    for name, step in (("a", rate), ("norm.running_var", 1.0)):
        mean = sum(weights[site] * sent[site][name].double() for site in "xyz") / sum(weights.values())
        expected = theta[name].double() + step * (mean - theta[name].double())
        torch.testing.assert_close(result[name].double(), expected, rtol=0, atol=1e-6)
    assert result["count"] == 5
    if rate == 1.0:
        assert torch.equal(result["a"], result_of(plain, "y")["a"])
