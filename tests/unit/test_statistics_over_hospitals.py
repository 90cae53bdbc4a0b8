"""Statistics of sums over hospitals, against lifelines and statsmodels on the pooled patients."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import medsilo
from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError
from medsilo.flare.jobs import write_job
from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.own_numbers import Column
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.sources import DataSource
from medsilo_statistics.asked_question import Question
from medsilo_statistics.found import CurveFound, StatisticsFound
from medsilo_statistics.grammar import Filter
from medsilo_statistics.newton import FittedModel, combined
from tests.conftest import make_plan, over_all
from tests.dicoms import write_series
from tests.layouts import picture, volume
from tests.tables import REAL, VARIABLES, asked, drawn, settings_of

CLOSE = 1e-6
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real sets are not beside the project")
COVARIATES = ["age", "stage", "score"]
MODELS = [
    {"kind": "cox", "time": "time", "event": "dead", "covariates": COVARIATES, "ties": "breslow"},
    {"kind": "cox", "time": "time", "event": "dead", "covariates": COVARIATES},
    {"kind": "logistic", "outcome": "dead", "covariates": COVARIATES},
    {"kind": "linear", "outcome": "time", "covariates": COVARIATES},
    {"kind": "poisson", "outcome": "score", "covariates": ["age", "stage"]},
]


def pooled(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([own.assign(hospital=name) for name, own in frames.items()], ignore_index=True)


def check_fit(fit: FittedModel, coefficients: Any, errors: Any) -> None:
    assert not fit.why
    np.testing.assert_allclose(fit.coefficients, np.asarray(coefficients), rtol=CLOSE, atol=CLOSE)
    np.testing.assert_allclose(fit.errors, np.asarray(errors), rtol=CLOSE, atol=CLOSE)


def check_curve(own: CurveFound, time: pd.Series, event: pd.Series) -> None:
    """Against statsmodels; and against lifelines, which is of no use with every pandas, where it is there."""
    duration = pytest.importorskip("statsmodels.duration.survfunc")
    wanted = duration.SurvfuncRight(time.to_numpy(float), event.to_numpy(float))
    np.testing.assert_allclose(own.times, wanted.surv_times)
    np.testing.assert_allclose(own.share, wanted.surv_prob, atol=1e-9)
    inside = (wanted.surv_prob > 0) & (wanted.surv_prob < 1)
    spread = wanted.surv_prob_se[inside] / (wanted.surv_prob[inside] * np.log(wanted.surv_prob[inside]))
    bands = [wanted.surv_prob[inside] ** np.exp(sign * 1.959963984540054 * spread) for sign in (1, -1)]
    np.testing.assert_allclose(np.stack([own.low, own.high])[:, inside], np.sort(bands, 0), atol=1e-9)
    assert own.risk == [float((time >= mark).sum()) for mark in own.marks]
    below = wanted.surv_times[wanted.surv_prob <= 0.5]
    assert own.median == (below[0] if len(below) else None)
    try:
        from lifelines import KaplanMeierFitter
    except ImportError:
        return
    fitted = KaplanMeierFitter().fit(time, event)
    with_events = (fitted.event_table.observed > 0).to_numpy()
    np.testing.assert_allclose(own.share, fitted.survival_function_.to_numpy()[with_events, 0], atol=1e-9)
    bands = np.nan_to_num(fitted.confidence_interval_.to_numpy()[with_events])
    np.testing.assert_allclose(np.stack([own.low, own.high], 1), bands, atol=1e-9)


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, dict[str, SiteSettings], Path]:
    frames, folder = drawn(), tmp_path_factory.mktemp("statistics")
    return pooled(frames), settings_of(frames, folder, public_data=True), folder


@pytest.fixture(scope="module")
def answer(patients: Any) -> StatisticsFound:
    _, sites, folder = patients
    return asked(
        sites,
        folder,
        table=["age", "stage", "score"],
        by="dead",
        curves=[{"time": "time", "event": "dead", "by": "stage"}],
        models=MODELS,
    )


def test_table_one_is_that_of_all_patients(patients: Any, answer: StatisticsFound) -> None:
    whole, _, _ = patients
    assert answer.sealed and answer.floor == 1
    for column, own in zip(answer.columns, (whole[whole.dead == 0], whole[whole.dead == 1], whole), strict=True):
        assert column.patients == len(own)
        age = column.cells["age"]
        assert age.known == own.age.count() and age.missing == own.age.isna().sum()
        np.testing.assert_allclose([age.mean, age.deviation], [own.age.mean(), own.age.std()], rtol=1e-9)
        wanted = own.age.quantile([0.25, 0.5, 0.75], interpolation="lower")
        np.testing.assert_allclose(age.quarters, wanted, atol=1.2 / 2 + 1e-6)  # half a step, as the page says
        scores = own.score.quantile([0.25, 0.5, 0.75], interpolation="lower")
        assert [round(q or 0) for q in column.cells["score"].quarters] == list(scores)
        assert column.cells["stage"].levels == [float((own.stage == level).sum()) for level in ("I", "II", "III")]
    one, other = (whole.age[whole.dead == place] for place in (0, 1))
    apart = abs(one.mean() - other.mean()) / np.sqrt((one.var() + other.var()) / 2)
    np.testing.assert_allclose(answer.apart["age"], apart, rtol=1e-9)


def test_curves_and_log_rank_are_those_of_all_patients(patients: Any, answer: StatisticsFound) -> None:
    whole, _, _ = patients
    duration = pytest.importorskip("statsmodels.duration.survfunc")
    (curves,) = answer.curves
    for own in curves.groups:
        group = whole[whole.stage == own.title]
        check_curve(own, group.time, group.dead)
    wanted = duration.survdiff(whole.time, whole.dead, whole.stage)
    np.testing.assert_allclose([curves.statistic, curves.p], wanted, rtol=1e-8)


def test_a_curve_of_all_stands_beside_a_table_by_groups(patients: Any) -> None:
    whole, sites, folder = patients
    curve = {"time": "time", "event": "dead"}
    found = asked(sites, folder, sealed=False, table=["age"], by="stage", curves=[curve])
    assert [own.title for own in found.columns] == ["I", "II", "III", "All"]
    check_curve(found.curves[0].groups[0], whole.time, whole.dead)


def test_regressions_are_those_of_all_patients(patients: Any, answer: StatisticsFound) -> None:
    sm = pytest.importorskip("statsmodels.api")
    whole = patients[0].dropna()
    columns = whole[["age"]].assign(II=whole.stage == "II", III=whole.stage == "III", score=whole.score).astype(float)
    fits = [
        sm.PHReg(whole.time, columns, whole.dead, ties="breslow", strata=whole.hospital).fit(),
        sm.PHReg(whole.time, columns, whole.dead, ties="efron", strata=whole.hospital).fit(),
        sm.Logit(whole.dead, sm.add_constant(columns)).fit(disp=0, tol=1e-13),
        sm.OLS(whole.time, sm.add_constant(columns)).fit(),
    ]
    for fit, wanted in zip(answer.fits, fits, strict=False):
        check_fit(fit, wanted.params, wanted.bse)
    poisson = sm.GLM(whole.score, sm.add_constant(columns.drop(columns="score")), family=sm.families.Poisson())
    wanted = poisson.fit(tol=1e-13)
    check_fit(answer.fits[4], wanted.params, wanted.bse)
    assert answer.fits[0].events == whole.dead.sum() and answer.fits[0].patients == len(whole)
    np.testing.assert_allclose(answer.fits[2].likelihood, fits[2].llf, rtol=1e-7)


def test_sealed_and_clear_give_the_same(patients: Any, answer: StatisticsFound) -> None:
    _, sites, folder = patients
    question = {
        key: own
        for key, own in answer.question.model_dump(mode="json").items()
        if key in ("table", "by", "curves", "models")
    }
    clear = asked(sites, folder, sealed=False, **question)
    assert not clear.sealed
    for one, other in zip(answer.fits, clear.fits, strict=True):
        np.testing.assert_allclose(one.coefficients, other.coefficients, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(one.errors, other.errors, rtol=1e-7)
    assert [own.share for own in answer.curves[0].groups] == [own.share for own in clear.curves[0].groups]
    assert answer.columns[-1].cells["stage"] == clear.columns[-1].cells["stage"]


def test_hospitals_tell_their_own_and_meta_analysis_combines_it(patients: Any) -> None:
    sm = pytest.importorskip("statsmodels.api")
    from statsmodels.stats.meta_analysis import combine_effects

    whole, sites, folder = patients
    model = {"kind": "logistic", "outcome": "dead", "covariates": ["age"], "meta": True}
    found = asked(sites, folder, by_hospital=True, table=["age"], wanted={"age": 1.0, "dead": 0.05}, models=[model])
    for site, own in whole.groupby("hospital"):
        cell = found.own[site].columns[-1].cells["age"]
        np.testing.assert_allclose([cell.mean, cell.deviation], [own.age.mean(), own.age.std()], rtol=1e-9)
        known = own.dropna()
        alone = sm.Logit(known.dead, sm.add_constant(known.age)).fit(disp=0, tol=1e-13)
        check_fit(found.own[site].fits["0"], alone.params, alone.bse)
    meta = next(own for own in found.meta if own.term == "age")
    told = np.array(list(meta.sites.values()))
    wanted = combine_effects(told[:, 0], told[:, 1] ** 2, method_re="dl", use_t=True)
    np.testing.assert_allclose(
        [own.estimate for own in meta.combined], [wanted.mean_effect_fe, *[wanted.mean_effect_re] * 2], rtol=1e-9
    )
    assert wanted.conf_int(use_t=True, alpha=0.05)[3] == pytest.approx((meta.combined[2].low, meta.combined[2].high))
    alone = asked(sites, folder, models=[model | {"meta": "only"}])
    assert alone.meta == found.meta and alone.fits[0].why and not alone.fits[0].coefficients
    spread = whole.age.std()
    assert found.wanted["age"] == np.ceil((1.959964 * spread) ** 2)
    assert found.wanted["dead"] == np.ceil(1.959964**2 * whole.dead.mean() * (1 - whole.dead.mean()) / 0.05**2)


def test_dersimonian_laird_by_hand() -> None:
    """Two estimates 0 and 2 with errors 1: Q = 2, tau² = 1, so the mean has variance (1 + 1) / 2."""
    found, inconsistency = combined([0.0, 2.0], [1.0, 1.0])
    assert [own.estimate for own in found] == [1.0, 1.0, 1.0] and inconsistency == 0.5
    assert found[1].tau2 == 1.0 and found[1].high - 1 == pytest.approx(1.959964)
    assert found[2].high - 1 == pytest.approx(12.7062, rel=1e-4)  # t with one degree, of a spread of 1


# ------------------------------------------------------------------------------------------------------ what fails
def test_what_has_no_answer_says_so_in_one_line(tmp_path: Path) -> None:
    frames = drawn(3, 40)
    for place, own in enumerate(frames.values()):
        own["twice"], own["same"], own["apart"] = 2 * own.age, 7, own.dead * 5 + np.arange(40) % 3
        if place == 1:
            own["dead"] = 0
    sites = settings_of(frames, tmp_path, public_data=True)
    numbers = {name: {"range": [0, 300]} for name in ("twice", "same", "apart")}

    def why(**model: Any) -> str:
        return asked(sites, tmp_path, sealed=False, variables=VARIABLES | numbers, models=[model]).fits[0].why

    cox = {"kind": "cox", "time": "time", "event": "dead"}
    assert "follow from each other: age, twice; leave one out" in why(**cox, covariates=["age", "twice"])
    assert "the same for all: 'same'" in why(**cox, covariates=["age", "same"])
    logistic = {"kind": "logistic", "outcome": "dead"}
    frames = {name: own.assign(dead=(own.apart > 4).astype(int)) for name, own in frames.items()}
    sites = settings_of(frames, tmp_path, public_data=True)
    assert "separates the outcome" in why(**logistic, covariates=["apart"])
    found = asked(
        settings_of(drawn(3, 40), tmp_path, public_data=True),
        tmp_path,
        where="age > 200",
        models=[{**cox, "covariates": ["age"]}],
    )
    assert "has 0 patients" in found.fits[0].why and found.remarks


def test_a_hospital_without_events_takes_part(tmp_path: Path) -> None:
    sm = pytest.importorskip("statsmodels.api")
    frames = drawn(3, 40)
    frames["hospital-1"]["dead"] = 0
    model = {"kind": "cox", "time": "time", "event": "dead", "covariates": ["age"], "meta": True}
    found = asked(settings_of(frames, tmp_path, public_data=True), tmp_path, models=[model])
    whole = pooled(frames).dropna()
    wanted = sm.PHReg(whole.time, whole[["age"]], whole.dead, ties="efron", strata=whole.hospital).fit()
    check_fit(found.fits[0], wanted.params, wanted.bse)
    assert found.remarks == ["model 1 at hospital-1 alone has no event"]


def test_filters_choose_patients_and_run_nothing(patients: Any) -> None:
    whole, sites, folder = patients
    wheres = {
        "age >= 60 and stage in ['II', 'III']": (whole.age >= 60) & whole.stage.isin(["II", "III"]),
        "not (age < 60) or missing(age)": ~(whole.age < 60),
        "dead == 'yes' and score != 2": (whole.dead == 1) & (whole.score != 2),
        "-1 < -2 or score > -1": None,
    }
    for where, wanted in wheres.items():
        if wanted is None:
            with pytest.raises(MedsiloError, match="the left side"):
                asked(sites, folder, where=where)
        else:
            assert asked(sites, folder, sealed=False, where=where).columns[-1].patients == wanted.sum()
    wrong = [
        "__import__('os')",
        "age.x == 1",
        "age > 'x'",
        "(" * 400,
        "age",
        "stage > 'I'",
        "1 < age < 3",
        "age == True",
    ]
    wrong += [
        "lambda: 1",
        "age in 3",
        "missing(age, stage)",
        "age > 10**9",
        "stage == 'IV'",
        "age > 1 " * 200,
        "f'{age}'",
    ]

    def is_refused(text: str) -> None:
        with pytest.raises(ValueError, match="the filter can't be read"):
            Filter(text, {"age": (), "stage": ("I", "II", "III")})

    over_all(wrong, is_refused)


def test_wrong_questions_say_what_to_do() -> None:
    cox = {"kind": "cox", "time": "time", "event": "dead", "covariates": ["age"]}
    wrong: dict[str, dict[str, Any]] = {
        "no variable of the question": {"table": ["weight"]},
        "has to be a number": {"models": [{**cox, "time": "stage"}]},
        "has to be two levels": {"models": [{**cox, "event": "stage"}]},
        "has to be levels": {"by": "age"},
        "cox has time and event": {"models": [{"kind": "cox", "outcome": "dead", "covariates": ["age"]}]},
        "is listed twice": {"models": [{**cox, "covariates": ["age", "age"]}]},
        "cox has no bound": {"models": [cox], "privacy": {"epsilon": 1, "delta": 1e-5}},
        "give larger steps": {"curves": [{"time": "t", "event": "dead", "by": "stage"}] * 20},
        "names a hospital twice": {"sites": ["a", "a"]},
    }
    for words, question in wrong.items():
        with pytest.raises(MedsiloError) as caught:
            Question.from_values(
                {"variables": VARIABLES | {"t": {"range": [0, 2000], "step": 0.11}}, **question}, "q.yaml"
            )
        assert words in str(caught.value), (words, caught.value)


def test_columns_levels_and_cuts_are_a_hospitals_own(tmp_path: Path) -> None:
    """Sizes in classes at one hospital, in millimetres with a comma at the other; a value out of range is missing."""
    one = pd.DataFrame({"size": ["<=20", "20-50", ">50", "20-50", "NA"], "age": [50, 60, 70, 400, 20]})
    other = pd.DataFrame({"mm": ["20", "20,5", "50,0", "51", ""], "alter": [51, 61, 71, 81, 91]})
    sites = settings_of({"a": one, "b": other}, tmp_path, public_data=True)
    data = sites["b"].data
    assert data
    sites["b"] = sites["b"].model_copy(
        update={"data": data.model_copy(update={"decimal": ",", "names": {"age": "alter"}})}
    )
    size = {"levels": ["<=20", "20-50", ">50"], "cuts": [20, 50]}
    found = asked(
        sites,
        tmp_path,
        False,
        variables={"size": size, "age": VARIABLES["age"]},
        columns={"b": {"size": "mm"}},
        table=["size", "age"],
    )
    cells = found.columns[-1].cells
    assert cells["size"].levels == [2, 4, 2] and cells["size"].missing == 2
    assert cells["age"].known == 9 and cells["age"].missing == 1


# ------------------------------------------------------------------------------------------------------ its use
def test_the_command_writes_page_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = drawn(3, 40)
    frames["hospital-0"]["stage"] = frames["hospital-0"].stage.replace("II", "<script>alert(1)</script>")
    settings_of(frames, tmp_path)
    question = {
        "title": "Stages & co_",
        "variables": VARIABLES
        | {"stage": {"levels": {"I": ["I"], "[II_&]": ["II", "<script>alert(1)</script>"], "III": ["III"]}}},
        "sites": sorted(frames),
        "by": "dead",
        "table": ["age", "stage"],
        "by_hospital": True,
        "curves": [{"time": "time", "event": "dead", "by": "stage"}],
        "models": [{"kind": "cox", "time": "time", "event": "dead", "covariates": ["age", "stage"], "meta": True}],
    }
    (tmp_path / "q.yaml").write_text(json.dumps(question))
    folders = [str(tmp_path / "data" / site) for site in frames]
    assert main(["statistics", str(tmp_path / "q.yaml"), *folders, "-o", str(tmp_path / "out")]) == 0
    assert "3 hospitals, sealed" in capsys.readouterr().out
    page = (tmp_path / "out/report.html").read_text()
    assert "<script>alert" not in page and "II_&amp;" in page and "at risk" in page and "Hartung-Knapp" in page
    assert "what left each hospital, model 1, cox: at each of Newton" in page and "Histogram of age" in page
    assert r"{[}II\_\&]" in (tmp_path / "out/tables.tex").read_text()
    assert (tmp_path / "out/table-1.csv").read_text().startswith(",no,yes,All,hospital-0,hospital-1,hospital-2,SMD\n")
    assert (tmp_path / "out/curve-1.csv").read_text().count("\n") > 50
    answer = StatisticsFound.received(json.loads((tmp_path / "out/answers.json").read_text()))
    again = medsilo.statistics(question, folders)  # type: ignore[attr-defined]
    assert again.fits == answer.fits and again.columns == answer.columns
    assert main(["statistics", str(tmp_path / "q.yaml"), "-o", str(tmp_path / "out")]) == 1
    assert "whom to ask?" in capsys.readouterr().err
    assert main(["statistics", str(tmp_path / "q.yaml"), *folders[:2], "-o", str(tmp_path / "out")]) == 1
    assert "hospital-2 lost: its data are not here" in capsys.readouterr().err


def test_a_plan_asks_who_has_how_many_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it trains: each hospital's own words for the classes, and how many an interval of five points needs."""
    frames, out = drawn(3, 40), tmp_path / "out"
    settings_of(frames, tmp_path)
    sites, folders = sorted(frames), [str(tmp_path / "data" / site) for site in frames]
    kinds = {"classification": ["task.labels=[alive,gone]", "task.target=dead"], "survival": ["task.event=dead"]}
    whole = pooled(frames).dropna()  # cases that the plan can use
    deaths = whole.dead.sum()
    for kind, changes in kinds.items():
        for folder in folders:
            words = {"label_map": {"0": "alive", "1": "gone"}} if kind == "classification" else {}
            (Path(folder) / "medsilo.yaml").write_text(json.dumps({"data": {"folder": ".", **words}}))
        named = [f"participation.sites={json.dumps(sites)}", "task.name=table", f"task.kind={kind}"]
        write_job(tmp_path / kind, make_plan("fedavg", *named, *changes, "network.name=linear"))
        assert main(["statistics", str(tmp_path / kind), *folders, "-o", str(out / kind)]) == 0
        answer = StatisticsFound.received(json.loads((out / kind / "answers.json").read_text()))
        assert answer.sealed and answer.columns[-1].cells["label"].levels == [len(whole) - deaths, deaths]
        assert [own.columns[-1].patients for own in answer.own.values()] == [35, 35, 35]
        needed = np.ceil(1.959964**2 * whole.dead.mean() * (1 - whole.dead.mean()) / 0.05**2)
        assert f"label: {needed:g} patients for an interval of ± 0.05" in capsys.readouterr().out


@pytest.mark.slow
def test_the_simulator_gives_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = drawn(3, 40)
    settings_of(frames, tmp_path)
    question = {"variables": VARIABLES, "sites": sorted(frames), "table": ["age", "stage"], "models": MODELS[1:3]}
    question["curves"] = [{"time": "time", "event": "dead", "by": "stage"}]
    (tmp_path / "q.yaml").write_text(json.dumps(question))
    command = ["statistics", str(tmp_path / "q.yaml"), *(str(tmp_path / "data" / site) for site in frames)]
    for engine in ("inprocess", "simulator"):
        assert main([*command, "--engine", engine, "-o", str(tmp_path / engine)]) == 0
    one, other = (json.loads((tmp_path / engine / "answers.json").read_text()) for engine in ("inprocess", "simulator"))
    assert one == other
    capsys.readouterr()
    assert main([*command[:-1], "--engine", "simulator", "-o", str(tmp_path / "two")]) == 1
    assert "the question needs all hospitals: hospital-2" in capsys.readouterr().err


def test_the_leak_report_of_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "q.yaml"
    file.write_text(json.dumps({"variables": VARIABLES, "table": ["stage"], "by": "dead", "models": MODELS[1:2]}))
    assert main(["leak-report", str(file)]) == 0
    told = capsys.readouterr().out  # a step: 2 + 4 + 4 * 5 / 2
    assert "once: " in told and "model 1, cox: at each of Newton's steps, 20 at most, 16 sums, in clear" in told
    file.write_text("variables: 3")
    assert main(["leak-report", str(file)]) == 1


# ------------------------------------------------------------------------------------------------------ ComBat
def pooled_combat(values: np.ndarray, batch: np.ndarray, covariates: np.ndarray) -> np.ndarray:
    """Return what ComBat makes of pooled features, by its formulas with a design of hospitals and covariates."""
    design = np.concatenate([batch[:, None] == np.unique(batch), covariates], 1).astype(float)
    found = np.linalg.lstsq(design, values, rcond=None)[0]
    own = design[:, : -covariates.shape[1]]
    common = own.mean(0) @ found[: own.shape[1]] + covariates @ found[own.shape[1] :]
    width = np.sqrt(np.square(values - design @ found).mean(0))
    scaled = (values - common) / width
    for column in own.T.astype(bool):
        z = scaled[column]
        gamma, delta = z.mean(0), z.var(0, ddof=1)
        m, s2 = delta.mean(), delta.var(ddof=1)
        a, b = (2 * s2 + m**2) / s2, (m * s2 + m**3) / s2
        g, d = gamma, delta
        for _ in range(500):
            tau, n = gamma.var(ddof=1), len(z)
            g = (tau * n * gamma + d * gamma.mean()) / (tau * n + d)
            d = (0.5 * np.square(z - g).sum(0) + b) / (n / 2 + a - 1)
        scaled[column] = (z - g) / np.sqrt(d)
    return scaled * width + common


def test_combat_is_that_of_all_patients_and_a_table_task_reads_it(tmp_path: Path) -> None:
    numbers, frames = np.random.default_rng(2), {}
    for place in range(3):
        age, sex = numbers.uniform(40, 80, 30), numbers.choice(["f", "m"], 30)
        mixed = {
            f"f{n}": (2 + place) * numbers.normal(n + place + age / 20 + (sex == "m"), 1 + 0.2 * n) for n in range(5)
        }
        frames[f"h{place}"] = pd.DataFrame(
            {"patient": [f"{place}-{n}" for n in range(30)], "age": age, "sex": sex, **mixed}
        )
        frames[f"h{place}"]["outcome"] = numbers.integers(0, 2, 30)
    settings_of(frames, tmp_path)
    features = [f"f{n}" for n in range(5)]
    question = {
        "variables": {"age": {"range": [0, 120]}, "sex": {"levels": ["f", "m"]}}
        | {name: {"range": [-100, 200]} for name in features},
        "sites": sorted(frames),
        "harmonise": {"features": features, "covariates": ["age", "sex"]},
    }
    folders = [tmp_path / "data" / site for site in frames]
    assert medsilo.statistics(question, folders, folder=tmp_path / "out").sealed  # type: ignore[attr-defined]
    whole = pooled(frames)
    covariates = np.stack([whole.age, whole.sex == "m"], 1).astype(float)
    wanted = pooled_combat(whole[features].to_numpy(), whole.hospital.to_numpy(), covariates)
    task = PatientTable(columns=tuple(Column(name=name) for name in features), labels=("0", "1"), kind="classification")
    found = []
    for folder in folders:
        (folder / "combat.json").write_text((tmp_path / "out/combat.json").read_text())
        (folder / "cases.combat.yaml").write_text("table: cases.csv\n")
        source = DataSource(folder=folder, table="cases.combat.yaml")
        found.append(task.rows(source.table_file(folder), source).as_read.numpy())
        with pytest.raises(DataError, match="one patient changes all others"):
            task.read("h", ["h"], 0, source.for_study(each_alone=True))
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-6)
    assert np.abs(np.concatenate(found).mean(0) - whole[features].mean()).max() > 0.01  # it is not as it was
    (folders[0] / "cases.combat.yaml").write_text("table: ../h1/cases.csv\n")
    source = DataSource(folder=folders[0], table="cases.combat.yaml")
    with pytest.raises(DataError, match="not beside it"):
        task.rows(source.table_file(folders[0]), source)


# ------------------------------------------------------------------------------------------------------ images
def test_images_are_counted_by_spacing_size_intensity_and_scanner(tmp_path: Path) -> None:
    """Of volumes, of DICOM series with the scanner's elements, of flat images: by the same question as of tables."""
    pytest.importorskip("pydicom")
    numbers = np.random.default_rng(1)
    for place in range(3):
        for patient in range(4 + place):
            values = numbers.integers(0, 900, (6 + place, 8, 10))
            volume(tmp_path / f"nifti/h{place}/images/p{patient}.nii.gz", values)
            volume(tmp_path / f"nifti/h{place}/labels/p{patient}.nii.gz", (values > 500).astype(np.uint8))
            picture(tmp_path / f"flat/h{place}/{'ab'[patient % 2]}/p{patient}.png", values[0].astype(np.uint8))
            scanner = {"Manufacturer": ("A", "B", "unknown")[patient % 3]}
            for again in range(1 + (patient == 0)):  # the first patient has two series, and counts once
                folder = tmp_path / f"dicom/h{place}/c/p{patient}/{again}"
                write_series(folder, values, np.diag((0.5, 0.5, 2.0 + place, 1.0)), patient=f"p{patient}", **scanner)
    axes = {f"size_{axis}": {"range": [0, 20], "step": 1} for axis in "xyz"}
    asked_of = {
        "nifti": {"name": "nifti-folder"},
        "dicom": {"name": "dicom-folder", "kind": "classification", "labels": ["c", "d"]},
        "flat": {"name": "image-folder", "kind": "classification", "labels": ["a", "b"], "size": [8, 8]},
    }
    classes = {"label": {"levels": ["a", "b"]}}
    more: dict[str, dict[str, Any]] = {
        "nifti": {"intensity_high": {"range": [0, 1000], "step": 10}},
        "dicom": {"spacing_z": {"range": [0, 10], "step": 1}, "Manufacturer": {"levels": ["A", "B"]}},
        "flat": classes,
    }
    sites = {kind: [tmp_path / kind / f"h{place}" for place in range(3)] for kind in asked_of}
    for folder in sites["nifti"]:
        data = {"folder": str(folder), "images": "images/*.nii.gz", "labels": "labels/*.nii.gz"}
        (folder / "medsilo.yaml").write_text(json.dumps({"data": data, "public_data": True}))
    found = {}
    for kind, task in asked_of.items():
        own = {name: each for name, each in axes.items() if kind != "flat" or name != "size_z"} | more[kind]
        question = {"task": task, "variables": own, "table": list(own), "sites": ["h0", "h1", "h2"]}
        (found[kind],) = medsilo.statistics(question, sites[kind]).columns  # type: ignore[attr-defined]
        assert found[kind].patients == 15
        assert found[kind].cells["size_x"].mean == pytest.approx(10)
    assert found["flat"].cells["label"].levels == [8, 7]
    assert found["nifti"].cells["size_z"].bins[4:9] == [0, 4, 5, 6, 0]
    assert 800 < found["nifti"].cells["intensity_high"].mean < 900
    assert found["dicom"].cells["spacing_z"].mean == pytest.approx((4 * 2 + 5 * 3 + 6 * 4) / 15)
    assert found["dicom"].cells["Manufacturer"].levels == [6, 5] and found["dicom"].cells["Manufacturer"].missing == 4


# ------------------------------------------------------------------------------------------------------ real sets
@real
@pytest.mark.slow
def test_lung_cancer_of_18_institutions(tmp_path: Path) -> None:
    """With missing values, and hospitals of two patients."""
    sm = pytest.importorskip("statsmodels.api")
    whole = pd.read_csv(REAL / "lung_18/lung.csv").dropna(subset="inst")
    whole = whole.rename(columns={"ph.ecog": "ecog", "wt.loss": "loss"}).assign(dead=whole.status - 1)
    sites = settings_of({f"i{int(name)}": own for name, own in whole.groupby("inst")}, tmp_path, public_data=True)
    variables = {key: VARIABLES[key] for key in ("age", "time", "dead")} | {
        "sex": {"levels": {"m": [1], "f": [2]}},
        "ecog": {"range": [0, 4]},
        "loss": {"range": [-50, 100]},
    }
    cox = {"kind": "cox", "time": "time", "event": "dead", "covariates": ["age", "sex", "ecog", "loss"]}
    models = [cox, {**cox, "ties": "breslow"}]
    found = asked(
        sites, tmp_path, variables=variables, models=models, curves=[{"time": "time", "event": "dead", "by": "sex"}]
    )
    assert len(found.sites) == 18 and found.sealed
    known = whole.dropna(subset=["age", "ecog", "loss"])
    columns = known[["age", "sex", "ecog", "loss"]].astype(float)
    for fit, ties in zip(found.fits, ("efron", "breslow"), strict=True):
        wanted = sm.PHReg(known.time, columns, known.dead, ties=ties, strata=known.inst).fit()
        check_fit(fit, wanted.params, wanted.bse)
    for place, own in enumerate(found.curves[0].groups, 1):
        check_curve(own, whole.time[whole.sex == place], whole.dead[whole.sex == place])


@real
@pytest.mark.slow
def test_breast_cancer_of_two_countries(tmp_path: Path) -> None:
    sm = pytest.importorskip("statsmodels.api")
    one, other = (pd.read_csv(REAL / f"breast_survival/{name}.csv") for name in ("rotterdam", "gbsg"))
    sites = settings_of({"rotterdam": one, "gbsg": other}, tmp_path, public_data=True)
    size = {"levels": ["<=20", "20-50", ">50"], "cuts": [20, 50]}
    variables = {
        "age": VARIABLES["age"],
        "size": size,
        "nodes": {"range": [0, 60]},
        "t": {"range": [0, 8000], "step": 1},
    }
    variables["event"] = VARIABLES["dead"]
    columns = {"rotterdam": {"t": "rtime", "event": "recur"}, "gbsg": {"t": "rfstime", "event": "status"}}
    cox = {"kind": "cox", "time": "t", "event": "event", "covariates": ["age", "size", "nodes"]}
    models = [cox, {**cox, "ties": "breslow"}]
    found = asked(
        sites,
        tmp_path,
        False,
        variables=variables,
        columns=columns,
        models=models,
        curves=[{"time": "t", "event": "event"}],
    )
    other = other.assign(size=pd.cut(other["size"], [0, 20, 50, 999], labels=["<=20", "20-50", ">50"]).astype(str))
    one, other = one.assign(t=one.rtime, event=one.recur), other.assign(t=other.rfstime, event=other.status)
    whole = pooled({"rotterdam": one, "gbsg": other})
    matrix = (
        whole[["age"]].assign(II=whole["size"] == "20-50", III=whole["size"] == ">50", nodes=whole.nodes).astype(float)
    )
    for fit, ties in zip(found.fits, ("efron", "breslow"), strict=True):
        wanted = sm.PHReg(whole.t, matrix, whole.event, ties=ties, strata=whole.hospital).fit()
        check_fit(fit, wanted.params, wanted.bse)
    check_curve(found.curves[0].groups[0], whole.t, whole.event)


@real
@pytest.mark.slow
def test_breast_cancer_of_tcga_and_hearts_of_four_hospitals(tmp_path: Path) -> None:
    sm = pytest.importorskip("statsmodels.api")
    whole = pd.read_csv(REAL / "tcga_brca/brca.csv").rename(columns={"age_at_index": "age", "T": "time", "E": "dead"})
    whole["dead"] = whole.dead.astype(int)
    regions = pd.read_csv(REAL / "tcga_brca/train_test_split.csv").set_index("pid").fold2
    sites = settings_of(
        {str(name).replace("_", "-"): own for name, own in whole.groupby(whole.pid.map(regions).fillna("train_0"))},
        tmp_path,
        public_data=True,
    )
    cox = {"kind": "cox", "time": "time", "event": "dead", "covariates": ["age"]}
    variables = {key: VARIABLES[key] for key in ("age", "dead")} | {"time": {"range": [0, 10_000], "step": 1}}
    found = asked(sites, tmp_path, variables=variables, models=[cox])
    strata = whole.pid.map(regions).fillna("train_0")
    wanted = sm.PHReg(whole.time, whole[["age"]], whole.dead, ties="efron", strata=strata).fit()
    check_fit(found.fits[0], wanted.params, wanted.bse)

    names = ["age", "sex", "pain", "pressure", "cholesterol", "sugar", "ecg", "rate", *"abcde", "target"]
    files = {
        name: REAL / f"heart_uci/processed.{name}.data" for name in ("cleveland", "hungarian", "switzerland", "va")
    }
    frames = {name: pd.read_csv(file, names=names[:12] + names[12:], na_values="?") for name, file in files.items()}
    hearts = {"age": VARIABLES["age"], "sex": {"levels": [0, 1]}, "rate": {"range": [0, 250]}}
    hearts["target"] = {"levels": {"no": [0], "yes": [1, 2, 3, 4]}}
    found = asked(
        settings_of(frames, tmp_path, public_data=True),
        tmp_path,
        variables=hearts,
        models=[{"kind": "logistic", "outcome": "target", "covariates": ["age", "sex", "rate"]}],
    )
    known = pooled(frames).dropna(subset=["age", "sex", "rate", "target"])
    fitted = sm.Logit(known.target > 0, sm.add_constant(known[["age", "sex", "rate"]])).fit(disp=0, tol=1e-13)
    check_fit(found.fits[0], fitted.params, fitted.bse)
    assert found.fits[0].patients == len(known)
