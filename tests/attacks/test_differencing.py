"""A lead who asks many nested questions to learn one patient's values: with and without the hospital's book."""

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.package import package_facts
from medsilo.federation.inquiry import SiteOfInquiry, SumRequest
from medsilo.federation.seams import Line, Missing, Outgoing, Receive
from medsilo.privacy.accounting import epsilon
from medsilo.privacy.mechanisms import Charge, Demands, Gaussian
from medsilo.runs.messages import Parcel
from medsilo.sealing import member
from medsilo.sealing.fixed_point import as_tensor, as_words
from medsilo.sealing.signing import Unsigned
from medsilo.site.book import Book
from medsilo.site.ledger import Ledger
from medsilo_statistics import asking_hospitals
from medsilo_statistics.asked_question import MOST_STEPS, Question
from medsilo_statistics.asking_hospitals import FILE, StatisticsSite, collected
from medsilo_statistics.sums import ModelStep, SumStep, of, sensitivity, table
from tests.tables import VARIABLES, asked, drawn, settings_of

VICTIM = {"age": 71.3, "stage": "III", "score": 3, "time": 450, "dead": 1, "marker": 5.55}
KNOWN = "age > 71.2 and age < 71.4"  # what the lead knows of the patient
MARKER = {"range": [0, 10]}


def hospitals(folder: Path, **more: Any) -> Any:
    frames = drawn(3, 60)
    for own in frames.values():
        own["age"] = own.age.fillna(60.0)
        own.loc[(own.age - 71.3).abs() < 0.15, "age"] = 65.0
        own["marker"] = np.linspace(1, 4, len(own)).round(2)
    own = frames["hospital-0"]
    frames["hospital-0"] = pd.concat([own, pd.DataFrame([{"patient": "victim", **VICTIM}])], ignore_index=True)
    return settings_of(frames, folder, **more)


def hospitals_alone(folder: Path, **more: Any) -> Any:
    return dict(list(hospitals(folder, **more).items())[:1])


def questions() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield thirty pairs of questions whose patients differ in the victim alone."""
    others = [f"stage == '{level}'" for level in ("I", "II")] + [f"score >= {number}" for number in range(1, 9)]
    others += [f"time >= {number}" for number in range(50, 400, 50)] + ["dead == 'yes'", "dead == 'no'"]
    for other in others:
        yield {"where": f"{other} or {KNOWN}"}, {"where": f"({other}) and not ({KNOWN})"}
    for one, two in combinations(others[:6], 2):
        yield {"where": f"{one} or {two} or {KNOWN}"}, {"where": f"({one} or {two}) and not ({KNOWN})"}


def learned(sites: Any, folder: Path) -> list[float]:
    """Return what the differences of the answers tell of the victim's marker."""
    variables, found = VARIABLES | {"marker": MARKER}, []
    for one, other in list(questions())[:30]:
        cells = []
        for question in (one, other):
            try:
                answer = asked(sites, folder, variables=variables, table=["marker"], **question)
            except MedsiloError:
                continue
            cells.append(answer.columns[-1].cells["marker"])
        if (
            len(cells) == 2
            and None not in (cells[0].mean, cells[1].mean)
            and cells[0].known == (cells[1].known or 0) + 1
        ):
            found.append(cells[0].known * cells[0].mean - cells[1].known * cells[1].mean)
    return found


def test_thirty_nested_questions_about_one_patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the book each pair tells the marker; with it none does, and the first questions are answered."""
    sites = hospitals(tmp_path, smallest_metric=5)
    answered = asked(sites, tmp_path, variables=VARIABLES | {"marker": MARKER}, table=["marker"])
    assert answered.columns[-1].patients == 181
    assert learned(sites, tmp_path) == []
    with monkeypatch.context() as without:
        without.setattr(Book, "divide", lambda *_: None)
        told = learned(sites, tmp_path)
    assert len(told) >= 10 and max(abs(own - VICTIM["marker"]) for own in told) < 1e-6


def test_with_noise_thirty_questions_cost_what_is_left_and_tell_little(tmp_path: Path) -> None:
    """A hospital that allows ε = 3 answers a few questions of ε = 1; their difference is far from the marker."""
    sites = hospitals(tmp_path, privacy=Demands(epsilon=3.0, delta=1e-5))
    variables, totals, refused = VARIABLES | {"marker": MARKER}, [], 0
    for question in [one for pair in list(questions())[:15] for one in pair]:
        try:
            found = asked(sites, tmp_path, variables=variables, table=["marker"], privacy=OFFER, **question)
        except MedsiloError as error:
            assert "this hospital allows 3" in str(error)
            refused += 1
            continue
        cell = found.columns[-1].cells["marker"]
        totals.append((cell.known or 0) * (cell.mean or 0))
    assert len(totals) + refused == 30 and 3 <= len(totals) <= 9, len(totals)
    assert found.deviation * MARKER["range"][1] / 2 > 2 * VICTIM["marker"]  # of one sum, in the marker's units


def test_an_audit_finds_no_more_than_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess, along the direction in which the victim moves it, if the victim is in an answer, 400 times each: the ε
    that the guesses prove (95 % bounds) stays below the promise, and does not with a tenth of the noise."""
    from scipy.stats import beta

    frame = pd.read_csv(tmp_path / "data/hospital-0/cases.csv") if hospitals(tmp_path) else None
    assert frame is not None
    sites = settings_of({"with": frame, "without": frame.iloc[:-1]}, tmp_path, public_data=True)
    asks = {"variables": {"marker": MARKER}, "table": ["marker"], "privacy": OFFER}
    asked_of = {name: site_of(Question.from_values(asks, "q"), name, own, tmp_path) for name, own in sites.items()}

    def flat(sums: Any) -> np.ndarray:
        return np.concatenate([np.asarray(sums[name]).ravel() for name in sorted(sums)])

    exact = [flat(of(site.patients, SumStep())) for site in asked_of.values()]

    def seen(site: StatisticsSite) -> np.ndarray:
        told = []
        for _ in range(400):
            site.given = 0
            told.append(flat(site._tensors(SumStep())) @ (exact[0] - exact[1]))
        return np.array(told)

    def proven() -> float:
        one, other = map(seen, asked_of.values())
        hits = [(int((one > cut).sum()), int((other > cut).sum())) for cut in np.quantile(other, [0.5, 0.9])]
        bounds = [(beta.ppf(0.025, hit, 401 - hit), beta.ppf(0.975, false + 1, 400 - false)) for hit, false in hits]
        return max(float(np.log(max(low - 1e-5, 1e-9) / high)) for low, high in bounds)

    assert proven() <= OFFER["epsilon"]
    noise = asking_hospitals.noise_of
    monkeypatch.setattr(asking_hospitals, "noise_of", lambda own: noise(own) / 10)
    assert proven() > OFFER["epsilon"]


def test_three_questions_that_differ_in_many_two_by_two(tmp_path: Path) -> None:
    """All, those of two stages, and the third stage without one: no pair is near, the three together are."""
    sites = hospitals(tmp_path, smallest_metric=5)
    variables = VARIABLES | {"marker": MARKER}
    asked(sites, tmp_path, variables=variables, table=["marker"])
    asked(sites, tmp_path, variables=variables, table=["marker"], where="stage in ['I', 'II']")
    with pytest.raises(MedsiloError, match="with this and earlier questions, sums of .* fewer than 5 patients"):
        asked(sites, tmp_path, variables=variables, table=["marker"], where=f"stage == 'III' and not ({KNOWN})")


def test_another_name_or_range_of_the_column_is_no_way_around(tmp_path: Path) -> None:
    sites = hospitals(tmp_path, smallest_metric=5)
    asked(sites, tmp_path, variables={"marker": MARKER}, table=["marker"])
    columns = {site: {"other": "marker"} for site in sites}
    with pytest.raises(MedsiloError, match="sums of marker would tell"):  # the range leaves the victim out
        asked(sites, tmp_path, variables={"other": {"range": [0, 5.5]}}, columns=columns, table=["other"])
    again = asked(sites, tmp_path, variables={"other": MARKER}, columns=columns, table=["other"])
    assert again.columns[-1].patients == 181  # the same patients may be asked about as often as one likes


def test_other_hospitals_do_not_leave_one_alone(tmp_path: Path) -> None:
    sites = settings_of(drawn(4, 40), tmp_path, smallest_metric=5)
    asked(sites, tmp_path, table=["score"])
    three = {site: own for site, own in sites.items() if site != "hospital-3"}
    with pytest.raises(MedsiloError, match="differ in one hospital alone"):
        asked(three, tmp_path, table=["score"])


def test_few_patients_are_not_told(tmp_path: Path) -> None:
    """A hospital with too few refuses; a cell with too few over all is told as such; in clear each tells its own."""
    frames = drawn(3, 40)
    for own in frames.values():
        own["stage"] = "I"
    frames["hospital-0"].loc[:2, "stage"] = "III"
    sites = settings_of(frames, tmp_path, smallest_metric=5)
    found = asked(sites, tmp_path, table=["stage"], by_hospital=True)
    assert found.floor == 5 and found.columns[-1].cells["stage"].levels == [117, 0, None]
    assert found.own["hospital-0"].columns[-1].cells["stage"].levels == [35, 0, None]
    clear = asked(dict(list(sites.items())[:2]), tmp_path, sealed=False, table=["stage"])
    assert clear.columns[-1].cells["stage"].levels == [77, 0, None]
    with pytest.raises(
        MedsiloError, match="hospital-0 refused: this hospital has fewer than 5 patients of the question"
    ):
        asked(sites, tmp_path, table=["stage"], where="stage == 'III'")
    with pytest.raises(MedsiloError, match="curves of fewer than three hospitals"):
        two = dict(list(sites.items())[:2])
        asked(two, tmp_path, sealed=False, curves=[{"time": "time", "event": "dead"}])


def test_answers_are_counted(tmp_path: Path) -> None:
    sites = settings_of(drawn(3, 40), tmp_path, smallest_metric=5, limits={"train_answers": 2})
    asked(sites, tmp_path, table=["score"])
    asked(sites, tmp_path, table=["score", "stage"])
    with pytest.raises(MedsiloError, match="limits.train_answers"):
        asked(sites, tmp_path, table=["stage"])


# ------------------------------------------------------------------------------------------------------ noise
OFFER = {"epsilon": 1.0, "delta": 1e-5}


def test_noise_costs_what_the_ledger_says_and_no_more_is_answered(tmp_path: Path) -> None:
    demands = Demands(epsilon=50.5, delta=1e-5)
    sites = settings_of(drawn(3, 600), tmp_path, privacy=demands)
    question = {"table": ["age", "stage"], "models": [{"kind": "logistic", "outcome": "dead", "covariates": ["score"]}]}
    with pytest.raises(MedsiloError, match="answers only with noise"):
        asked(sites, tmp_path, **question)
    found = asked(sites, tmp_path, privacy={**OFFER, "epsilon": 50.0}, **question)
    exact = asked(
        {site: own.model_copy(update={"privacy": None, "public_data": True}) for site, own in sites.items()},
        tmp_path,
        **question,
    )
    noisy, bare = found.fits[0], exact.fits[0]
    assert abs(noisy.coefficients[1] - bare.coefficients[1]) < 4 * noisy.errors[1]
    (file,) = (tmp_path / "records/hospital-0/ledger").glob("*[0-9a-f].jsonl")
    ledger = Ledger(file.parents[1], file.stem)
    entries = [entry for entry in ledger.standing().entries if entry.kind == "charged"]
    assert len(entries) == 5 and 49 < ledger.standing().epsilon(1e-5) <= 50
    with pytest.raises(MedsiloError, match="this hospital allows 50.5"):
        asked(sites, tmp_path, privacy={**OFFER, "epsilon": 50.0}, where="age > 20", **question)


def test_one_patient_moves_an_answer_by_no_more_than_the_noise_is_made_for() -> None:
    """Two hospitals' tables that differ in one patient, of the most extreme values there may be."""
    from medsilo_statistics.patients import Patients

    models: list[dict[str, Any]] = [
        {"kind": "logistic", "outcome": "dead", "covariates": ["age", "stage", "score"]},
        {"kind": "linear", "outcome": "time", "covariates": ["age", "stage", "score"]},
    ]
    curve = {"time": "time", "event": "dead", "by": "stage"}
    question = Question.from_values(
        {
            "variables": VARIABLES,
            "table": [*VARIABLES],
            "by": "stage",
            "models": models,
            "curves": [curve],
            "privacy": OFFER,
        },
        "q",
    )
    rng = np.random.default_rng(3)
    worst = dict.fromkeys(("table", 0, 1), 0.0)
    steps = {"table": SumStep(), **{n: SumStep(steps=[ModelStep(model=n, at=[0.1] * 5)]) for n in (0, 1)}}
    for _ in range(60):
        extreme = {"age": [0, 120], "stage": [0, 1, 2], "score": [0, 10], "time": [0, 2000], "dead": [0, 1]}
        values = {name: rng.choice(own, 8).astype(float) for name, own in extreme.items()}
        whole = Patients(question, tuple("abcdefgh"), values)
        fewer = whole.only(np.arange(8) > 0)
        for name, step in steps.items():
            one, other = (of(own, step) for own in (whole, fewer))
            moved = np.sqrt(sum(float(np.square(one[key] - other[key]).sum()) for key in one))
            worst[name] = max(worst[name], moved / sensitivity(question, step))
    assert all(0.3 < share <= 1 for share in worst.values()), worst
    assert table(whole)["patients"].sum() == 8


def test_intervals_include_the_noise_and_an_audit_stays_below_epsilon(tmp_path: Path) -> None:
    """The interval of a mean holds the true one as often as it says; counts of worlds with and without a patient can't
    be told apart better than ε allows."""
    sites = settings_of(drawn(3, 60), tmp_path, public_data=True)
    exact = asked(sites, tmp_path, table=["score"]).columns[-1]
    held, widths, counts = 0, [], []
    for _ in range(40):
        noisy = asked(sites, tmp_path, sealed=False, table=["score"], privacy=OFFER)
        cell = noisy.columns[-1].cells["score"]
        assert cell.low is not None and cell.high is not None and exact.cells["score"].mean is not None
        held += cell.low <= exact.cells["score"].mean <= cell.high
        widths.append(cell.high - cell.low)
        counts.append(noisy.columns[-1].patients)
    bare = exact.cells["score"]
    assert held >= 30 and np.mean(widths) > (bare.high or 0) - (bare.low or 0)
    spread = float(np.std(np.array(counts)))
    assert 0.6 < spread / noisy.deviation < 1.6
    # The noise that was seen on the number of patients, which one patient moves by 1.
    seen = Charge(what="a count", of=Gaussian(noise=spread / np.sqrt(3)))
    assert epsilon([seen], 1e-5) <= 1.0


def site_of(question: Any, site: str, settings: Any, folder: Path) -> StatisticsSite:
    return StatisticsSite(question, SiteOfInquiry(site, settings, folder / f"run/sites/{site}", Unsigned))


def server_of(question: Any, site: str, settings: Any, folder: Path) -> Any:
    """Return what a server that says anything asks one hospital with, in this process."""
    own = site_of(question, site, settings, folder)
    base = {"question": question.hash, "package": package_facts(), "study": "0" * 32}
    return lambda **facts: own.answer(Parcel(facts={**base, **facts}))


def test_a_lying_server_gets_no_sums_in_clear(tmp_path: Path) -> None:
    sites = settings_of(drawn(3, 40), tmp_path, smallest_metric=5)
    question = Question.from_values({"variables": VARIABLES, "sites": sorted(sites), "table": ["age"]}, "q")
    ask = server_of(question, "hospital-0", sites["hospital-0"], tmp_path)
    for facts, words in {
        '{"task": "sum"}': "sealed",
        '{"task": "own"}': "nothing of their own",
        '{"task": "seal"}': "begin again",
        '{"task": "seal", "step": {"bits": 99}}': "bits",
        '{"task": "sum", "question": "%s"}' % ("1" * 64): "differs",
        '{"task": "rows"}': "task",
    }.items():
        with pytest.raises(Refused, match=words):
            ask(**json.loads(facts))


def test_a_server_that_never_begins_gets_round_nothing(tmp_path: Path) -> None:
    """Neither round the noise that a hospital demands, nor round its book."""
    (own,) = hospitals_alone(tmp_path / "a", privacy=Demands(epsilon=3.0, delta=1e-5)).values()
    question: dict[str, Any] = {"variables": VARIABLES, "table": ["age"], "by_hospital": True}
    for task in ("sum", "own"):
        with pytest.raises(Refused, match="answers only with noise"):
            server_of(Question.from_values(question, "q"), "hospital-0", own, tmp_path / "a")(task=task)
    (own,) = hospitals_alone(tmp_path / "b", smallest_metric=5).values()
    for where, refused in {"": False, f"not ({KNOWN})": True}.items():
        ask = server_of(Question.from_values({**question, "where": where}, "q"), "hospital-0", own, tmp_path / "b")
        for task in ("sum", "own"):
            if not refused:
                ask(task=task)
                continue
            with pytest.raises(Refused, match="fewer than 5 patients"):
                ask(task=task)


def test_a_server_gets_no_step_where_a_hospital_shares_its_estimates_alone(tmp_path: Path) -> None:
    model = {"kind": "logistic", "outcome": "dead", "covariates": ["age"]}
    (own,) = hospitals_alone(tmp_path, public_data=True).values()
    for meta in (True, "only"):
        question = Question.from_values({"variables": VARIABLES, "models": [model | {"meta": meta}]}, "q")
        ask, step = server_of(question, "hospital-0", own, tmp_path), SumStep(steps=[ModelStep(model=0, at=[0.0, 0.0])])
        assert ask(task="own").facts
        if meta is True:
            assert ask(task="sum", step=step.model_dump()).groups
            continue
        with pytest.raises(Refused, match="which has hospitals' own alone"):
            ask(task="sum", step=step.model_dump())


class CuriousServer(Line):
    """Keeps what it asked each hospital, and the words that came."""

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        self.asked: dict[str, Parcel] = {}
        self.words: dict[str, Any] = getattr(self, "words", {})

        def asked(site: str) -> Parcel:
            self.asked[site] = outgoing(site)
            return self.asked[site]

        def heard(site: str, reply: Parcel) -> None:
            if reply.groups:
                self.words.setdefault(site, reply.groups["statistics"]["counts"].clone())  # of the first sum
            receive(site, reply)

        return super().ask(sites, asked, heard, timeout)


@pytest.mark.parametrize("masked", [True, False], ids=["sealed", "without masks"])
def test_what_the_server_sees_of_a_hospital_is_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    """No word is that of the hospital's sums, the words of two do not open, and no sum is sealed twice."""
    if not masked:  # as it would look if nothing was hidden: so the test can tell
        monkeypatch.setattr(member, "add_streams", lambda words, streams: None)
    sites = settings_of(drawn(3, 60), tmp_path, public_data=True)
    question = Question.from_values({"variables": VARIABLES, "sites": sorted(sites), "table": ["age", "stage"]}, "q")
    asked_of = {name: site_of(question, name, own, tmp_path) for name, own in sites.items()}
    line = CuriousServer(asked_of)
    assert collected(question, line, sorted(sites), 60)[FILE].columns[-1].patients == 180
    for name, site in asked_of.items():
        assert site.summed
        block = site.summed.blocks[1]
        clear = as_tensor(block.flat.encode(site._tensors(SumStep(bits=24)), block.fixed))
        assert float((line.words[name] == clear).double().mean()) == (0 if masked else 1)
    two = as_words("both", line.words["hospital-0"] + line.words["hospital-1"], block.flat.words)
    if masked:
        with pytest.raises(Refused, match="does not open"):
            block.read(two)
    with pytest.raises(Refused, match="asks for a sum twice"):
        asked_of["hospital-0"].answer(line.asked["hospital-0"])
    begun = asked_of["hospital-0"].answer(Parcel(facts={**line.asked["hospital-0"].facts, "task": "begin"}))
    assert begun.facts["introduction"]
    other = {**line.asked["hospital-0"].facts, "letter": {"introductions": [begun.facts["introduction"]]}}
    with pytest.raises(Refused, match="the sites whose keys it relays are not those of the study"):
        asked_of["hospital-0"].answer(Parcel(facts=other))


class LyingServer(Line):
    """Asks one hospital for a step at other coefficients than the others."""

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        def changed(site: str) -> Parcel:
            asked = outgoing(site)
            for step in asked.facts["step"]["steps"] if site == "hospital-1" else ():
                step["at"] = [own + 0.25 for own in step["at"]]
            return asked

        return super().ask(sites, changed, receive, timeout)


def test_a_server_that_asks_one_hospital_for_something_else_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two sums that differ in one hospital's step would tell its part alone."""
    sites = settings_of(drawn(3, 60), tmp_path, public_data=True)
    model = {"kind": "logistic", "outcome": "dead", "covariates": ["age"]}
    question = Question.from_values({"variables": VARIABLES, "sites": sorted(sites), "models": [model]}, "q")

    def lied() -> Any:
        line = LyingServer({name: site_of(question, name, own, tmp_path) for name, own in sites.items()})
        return collected(question, line, sorted(sites), 60)[FILE]

    with pytest.raises(MedsiloError, match="a sum does not open"):
        lied()
    monkeypatch.setattr(SumRequest, "digest", b"nothing")
    assert lied().fits[0].steps  # without that it opens


def test_a_hospital_that_tells_nonsense_ends_the_question_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"kind": "cox", "time": "time", "event": "dead", "covariates": ["age"]}
    question: dict[str, Any] = {
        "table": ["age", "stage"],
        "models": [model],
        "harmonise": {"features": ["age", "score"]},
    }
    honest = StatisticsSite._tensors

    def changed(how: Any) -> None:
        def lying(self: StatisticsSite, step: SumStep) -> Any:
            told = honest(self, step)
            return how(told) if self.own.name == "hospital-1" else told

        monkeypatch.setattr(StatisticsSite, "_tensors", lying)

    nonsense = {
        "NaN": lambda told: {name: own * float("nan") for name, own in told.items()},
        "infinite": lambda told: {name: own / 0 for name, own in told.items()},
        "huge": lambda told: {name: own * 1e300 for name, own in told.items()},
        "negative": lambda told: {name: -own for name, own in told.items()},
        "negative and large": lambda told: {name: -100 * own for name, own in told.items()},
        "short": lambda told: {name: own[:-1] for name, own in told.items()},
        "other names": lambda told: {name + "x": own for name, own in told.items()},
        "half as precise": lambda told: {name: own.half() for name, own in told.items()},
        "complex": lambda told: {name: own * 1j for name, own in told.items()},
        "sparse": lambda told: {name: own.to_sparse() for name, own in told.items()},
        "nothing": lambda told: {},
    }
    told = 0
    for count, sealed in ((2, False), (3, True)):
        sites = settings_of(drawn(count, 40), tmp_path / str(count), public_data=True)
        for name, how in nonsense.items():
            if sealed and name in ("complex", "sparse", "half as precise"):
                continue  # its own program turns these into words, or fails at home
            changed(how)
            try:
                answer = asked(sites, tmp_path, sealed, **question)
                answer.model_dump_json()
                assert name in ("NaN", "negative", "negative and large"), (sealed, name)
                told += 1  # of a sum that others' patients may make nobody can tell
            except MedsiloError as error:
                words = ("hospital-1 refused", "do not fit together", "a sum does not open")
                assert any(own in str(error) for own in words), (name, error)
    assert told <= 5


def test_a_model_of_few_events_is_withheld_in_clear(tmp_path: Path) -> None:
    frames = drawn(2, 40)
    frames["hospital-1"]["dead"] = [1, 1] + [0] * 38
    model = {"kind": "logistic", "outcome": "dead", "covariates": ["age"]}
    found = asked(settings_of(frames, tmp_path, smallest_metric=5), tmp_path, False, models=[model])
    assert found.fits[0].why == "is withheld: a hospital has too few patients or events for it"
    assert found.fits[0].patients == 0 and found.fits[0].events == 0


def test_steps_that_a_lying_server_chooses(tmp_path: Path) -> None:
    """Steep coefficients single out the oldest patient; many points add up to all. Both are refused at a floor of 5."""
    numbers = np.random.default_rng(4)
    own = pd.DataFrame(
        {"age": [*range(40, 60), 80], "score": numbers.poisson(3, 21), "dead": numbers.integers(0, 2, 21)}
    )
    model = {"kind": "logistic", "outcome": "dead", "covariates": ["age", "score"]}
    question = Question.from_values({"variables": {k: VARIABLES[k] for k in own}, "models": [model]}, "q")

    def told(ask: Any, at: list[float]) -> Any:
        reply = ask(task="sum", step={"steps": [{"model": 0, "at": at}]})
        return reply.groups["statistics"]["model 0"].numpy()

    aimed = [-200 * (80 - 60) / 60, 200.0, 0.0]
    (public,) = settings_of({"a": own}, tmp_path / "public", public_data=True).values()
    (careful,) = settings_of({"a": own}, tmp_path / "own", smallest_metric=5).values()
    sums = told(server_of(question, "a", public, tmp_path), aimed)
    assert sums[7] / sums[5] == pytest.approx((own.score[20] - 5) / 5, abs=1e-9)  # of x'wx, over w
    ask = server_of(question, "a", careful, tmp_path)
    with pytest.raises(Refused, match="rests on fewer than 5 patients"):
        told(ask, aimed)
    asked_at = [numbers.normal(0, 0.1, 3).tolist() for _ in range(MOST_STEPS + 1)]
    for at in asked_at[:MOST_STEPS]:
        told(ask, at)
    again = Question.from_values({**question.model_dump(), "title": "again"}, "q")
    for one in (ask, server_of(again, "a", careful, tmp_path)):
        one(task="begin")
        with pytest.raises(Refused, match="points of the same patients"):
            told(one, asked_at[-1])
    assert len(told(ask, asked_at[0])) == 11  # what was told may be told again


def test_intervals_of_curves_and_rates_include_the_noise() -> None:
    """Over drawn patients and drawn noise, 95 % intervals hold the truth that they were drawn by."""
    from medsilo_statistics.describing import moments, survival_curve
    from medsilo_statistics.newton import PRIVATE_STEPS, Climb
    from medsilo_statistics.patients import Patients
    from medsilo_statistics.sums import regression

    numbers, count, deviation = np.random.default_rng(6), 2000, 8.0
    variables = {"age": {"range": [-1, 1]}, "visits": {"range": [0, 20]}, "time": {"range": [0, 49], "step": 1}}
    model = {"kind": "poisson", "outcome": "visits", "covariates": ["age"]}
    question = Question.from_values({"variables": variables, "models": [model], "privacy": OFFER}, "q")
    held, bare = np.zeros(6), 0
    for _ in range(150):
        x = numbers.uniform(-1, 1, count)
        values = {"age": x, "visits": numbers.poisson(np.exp(1 + 0.5 * x)).clip(0, 20).astype(float)}
        patients = Patients(question, tuple(map(str, range(count))), values)
        start = np.array([count, values["visits"].sum() / 20, 0])
        climb = Climb(question, question.models[0], start + numbers.normal(0, deviation, 3), deviation**2)
        for _ in range(PRIVATE_STEPS):
            sums = regression(patients, question.models[0], climb.at)
            climb.take(sums + numbers.normal(0, deviation, len(sums)))
        fit = climb.fit()
        held[:2] += np.abs(np.array(fit.coefficients) - [1, 0.5]) < 1.96 * np.array(fit.errors)
        died, left = numbers.geometric(0.02, count) - 1, numbers.integers(10, 50, count)
        seen, event = np.minimum(np.minimum(died, left), 49), (died <= np.minimum(left, 49))
        counts = np.stack([np.bincount(seen[own], minlength=50) for own in (event, ~event)], 1).astype(float)
        _, _, low, high, _ = survival_curve(counts + numbers.normal(0, deviation, (50, 2)), deviation**2)
        held[2:5] += [low[t] <= 0.98 ** (t + 1) <= high[t] for t in (5, 15, 30)]
        _, _, least, most, _ = survival_curve(counts)
        bare += high[15] - low[15] > most[15] - least[15]
        row = np.array([count, x.sum(), np.square(x).sum()]) + numbers.normal(0, 4 * deviation, 3)
        *_, low, high = moments(question.variables["age"], row, 16 * deviation**2)
        held[5] += low <= 0 <= high
    assert (held >= 150 * 0.9).all() and bare == 150, (held, bare)
