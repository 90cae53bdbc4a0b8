"""Draw the scores and the validation curves of a run or a comparison with matplotlib, as figures for a paper."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import make_folder
from medsilo_lab.report.differences import DifferenceLine, difference_lines
from medsilo_lab.report.read import RunResult
from medsilo_lab.study.verdict_file import PairedDifference, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("pdf", "svg", "png")
WIDTH, ROW = 5.0, 0.34  # in inches: the width of one and a half journal columns, and the height of a row
BLUE, INK, SOFT, GREY = "#0072b2", "#1d2125", "#5a626b", "#b5b9bd"
STYLE: Any = {"font.size": 8, "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "medsilo"}


class Figures(Mapping[str, "Figure"]):
    """A mapping from names to matplotlib figures. A figure is drawn when it is looked up by its name, as in
    `figures["scores"]`.
    """

    def __init__(self, drawn: Mapping[str, Callable[[], "Figure"]]) -> None:
        self._drawn = drawn

    def __getitem__(self, name: str) -> "Figure":
        return self._drawn[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._drawn)

    def __len__(self) -> int:
        return len(self._drawn)

    def save(self, folder: Path | str, form: str = "pdf") -> list[Path]:
        """Write each figure into a folder as NAME.pdf, NAME.svg or NAME.png, depending on `form`, and return the paths
        of the files.
        """
        if form not in FORMS:
            raise MedsiloError(f"form {form!r} is not known; choose {', '.join(FORMS)}")
        make_folder(Path(folder))
        found = []
        for name, figure in self.items():
            path = Path(folder) / f"{name}.{form}"
            day = {"CreationDate": None} if form == "pdf" else {"Date": None} if form == "svg" else {}
            with _styled():
                figure.savefig(path, dpi=300, metadata=day, bbox_inches="tight")
            found.append(path)
        return found

    def __repr__(self) -> str:
        return f"<Figures: {', '.join(self)}>"


def of_run(run: RunResult) -> Figures:
    """Return two figures of a run. The figure `scores` shows each site's test score with its confidence interval, and
    `learning` shows the validation curves.
    """
    return Figures({"scores": lambda: _run_scores(run), "learning": lambda: _run_learning(run)})


def of_comparison(verdict: Verdict, runs: Mapping[str, Sequence[RunResult]]) -> Figures:
    """Return the figures of a comparison.

    The figure `scores` shows the single-site, federated and centralised scores of each hospital. Without single-site
    training, there is no figure `scores`. `differences` shows the difference between each method and the baseline.
    `learning` shows the validation curves.

    Args:
        runs: the finished runs of each configuration, by the title of the configuration
    """
    lines, differences = difference_lines(verdict), _differences(verdict)
    drawn: dict[str, Callable[[], Figure]] = {}
    if lines and all(line.together for line in lines):
        drawn["scores"] = lambda: _scores(verdict, lines)
    if differences:
        drawn["differences"] = lambda: _drawn_differences(verdict, differences)
    drawn["learning"] = lambda: _learning(verdict, runs)
    return Figures(drawn)


def _styled() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MedsiloError("figures need the Python package matplotlib: pip install matplotlib") from None
    return matplotlib.rc_context(STYLE)


def _blank(height: float) -> "tuple[Figure, Axes]":
    with _styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _rows(names: Sequence[str], label: str) -> "tuple[Figure, Axes]":
    figure, axes = _blank(0.7 + ROW * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.spines[["top", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=GREY, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.set_xlabel(label)
    return figure, axes


def _scores(verdict: Verdict, lines: Sequence[DifferenceLine]) -> "Figure":
    names = [f"{line.name} (n = {line.difference.patients or 'not disclosed'})" for line in lines]
    figure, axes = _rows(names, f"test {verdict.metric}")
    for place, line in enumerate(lines):
        found = line.difference
        assert line.together and line.alone
        shift = line.together.mean - found.mean
        if not found.open:
            axes.plot([shift + end for end in found.interval], [place] * 2, color=BLUE, linewidth=2.4, alpha=0.5)
        named = {} if place else {"alone": "single-site", "together": "federated", "pooled": "centralised"}
        axes.plot(line.alone.mean, place, "o", mfc="white", mec=INK, label=named.get("alone"))
        axes.plot(line.together.mean, place, "o", color=BLUE, label=named.get("together"))
        if line.pooled:
            axes.plot(line.pooled.mean, place, "D", mfc="white", mec=SOFT, markersize=5, label=named.get("pooled"))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _differences(verdict: Verdict) -> list[tuple[str, PairedDifference]]:
    return [(row.title, row.difference.mean) for row in verdict.rows if row.baseline and row.difference.mean]


def _drawn_differences(verdict: Verdict, found: Sequence[tuple[str, PairedDifference]]) -> "Figure":
    names = [f"{title} (n = {one.patients or 'not disclosed'})" for title, one in found]
    figure, axes = _rows(names, f"difference in test {verdict.metric} from {verdict.baseline}, in points")
    axes.axvline(0, color=SOFT, linewidth=0.8)
    for place, (_, one) in enumerate(found):
        if not one.open:
            axes.plot([100 * end for end in one.interval], [place] * 2, color=BLUE, linewidth=2.4, alpha=0.5)
        axes.plot(100 * one.mean, place, "o", color=BLUE, mfc=BLUE if one.sure else "white")
    return figure


def _learning(verdict: Verdict, runs: Mapping[str, Sequence[RunResult]]) -> "Figure":
    figure, axes = _blank(2.6)
    asked = verdict.declared or verdict.baseline
    # grey lines are drawn first, so that all other lines cover the grey lines
    rows = sorted(verdict.rows, key=lambda row: row.title == asked or row.method == "local")
    for row in rows:
        curves = [run.mean_curve for run in runs.get(row.title, ())]
        means = [statistics.fmean(own) if None not in own else None for own in zip(*curves, strict=False)]
        colour = BLUE if row.title == asked else INK if row.method == "local" else GREY
        _line(axes, row.title, means, colour, 0.8 if colour == GREY else 1.6)
    _finish(figure, axes, verdict.metric)
    return figure


def _run_scores(run: RunResult) -> "Figure":
    figure, axes = _rows([f"{site} ({run.tested_in_words(site)})" for site in run.sites], f"test {run.summary.metric}")
    for place, site in enumerate(run.sites):
        score, interval = run.score_at(site), run.intervals.get(site)
        if interval:
            axes.plot(list(interval), [place] * 2, color=BLUE, linewidth=2.4, alpha=0.5)
        if score.middle is not None:
            axes.plot(score.middle, place, "o", color=BLUE)
    return figure


def _run_learning(run: RunResult) -> "Figure":
    figure, axes = _blank(2.6)
    for site in run.sites:
        _line(axes, site, run.site(site).validation, None, 1.4)
    _finish(figure, axes, run.summary.metric)
    return figure


def _line(axes: "Axes", name: str, values: Sequence[float | None], colour: str | None, width: float) -> None:
    known = [(number, value) for number, value in enumerate(values) if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=colour, linewidth=width, label=name)


def _finish(figure: "Figure", axes: "Axes", metric: str) -> None:
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"validation {metric}")
    if axes.lines:
        figure.legend(loc="outside right upper", frameon=False)
