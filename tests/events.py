"""Read TensorBoard's event files, and compute the numbers that these files must have for a run."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean

from pytest import approx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medsilo.runs.reading import read_rounds, read_summary

Curves = dict[str, dict[str, dict[int, float]]]  # site → tag → step → number


def curves_in(folder: Path) -> Curves:
    """Return the curves in a folder that has a subfolder for each site. It is an error if a curve has two values for
    one step.
    """
    curves: Curves = {}
    for place in sorted(folder.iterdir()):
        events = EventAccumulator(str(place))
        events.Reload()
        points = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        curves[place.name] = {tag: dict(own) for tag, own in points.items()}
        assert all(len(curves[place.name][tag]) == len(own) for tag, own in points.items())
    return curves


def curves_of(run: Path) -> Curves:
    """Return the curves of a run whose sites all disclose exact scores: each site's numbers, and the means over the
    sites.
    """
    summary, rounds = read_summary(run), read_rounds(run)
    own: Curves = defaultdict(lambda: defaultdict(dict))
    for line in rounds:
        for site, numbers in line.sites.items():
            own[site][summary.metric][line.round - 1] = numbers.validation
            own[site]["train_loss"][line.round - 1] = numbers.train_loss
            own[site]["validation_loss"][line.round - 1] = numbers.validation_loss
    for site, result in summary.sites.items():
        own[site][summary.metric][len(rounds)] = result.validation[len(rounds)]
    means = {
        f"mean/{tag}": {step: fmean(one[tag][step] for one in own.values()) for step in points}
        for tag, points in next(iter(own.values())).items()
    }
    return {site: {f"site/{tag}": points for tag, points in tags.items()} | means for site, tags in own.items()}


def assert_same_curves(found: Curves, told: Curves) -> None:
    """Assert that curves are equal up to the precision of event files, which have 32-bit numbers."""
    assert found.keys() == told.keys()
    for site, tags in told.items():
        assert found[site].keys() == tags.keys()
        for tag, points in tags.items():
            assert found[site][tag].keys() == points.keys(), f"{site}: {tag}"
            assert all(found[site][tag][step] == approx(value, rel=1e-6) for step, value in points.items())
