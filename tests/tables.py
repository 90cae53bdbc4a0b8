"""Tables of drawn patients, dealt to hospitals, and questions about them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medsilo.extend import DataSource
from medsilo.site.settings import SiteSettings
from medsilo_statistics.asked_question import Question
from medsilo_statistics.asking_hospitals import FILE, INQUIRY
from medsilo_statistics.found import StatisticsFound

REAL = Path(__file__).resolve().parents[2] / "shared/data"
VARIABLES: dict[str, Any] = {
    "age": {"range": [0, 120], "unit": "years"},
    "stage": {"levels": ["I", "II", "III"]},
    "score": {"range": [0, 10], "step": 1},
    "time": {"range": [0, 2000], "step": 1},
    "dead": {"levels": {"no": [0], "yes": [1]}},
}


def drawn(hospitals: int = 4, each: int = 60, seed: int = 5) -> dict[str, pd.DataFrame]:
    """Return hospitals' patients with ties, gaps and what decides over their survival."""
    numbers, found = np.random.default_rng(seed), {}
    for place in range(hospitals):
        age = numbers.normal(60 + 2 * place, 10, each).round(1)
        stage = numbers.choice(["I", "II", "III"], each)
        score = numbers.poisson(2.5, each).clip(0, 10)
        hazard = np.exp(0.03 * (age - 60) + 0.5 * (stage == "III") - 0.1 * score)
        time = (numbers.exponential(300 / hazard) // 10 * 10 + 10).clip(10, 900)
        frame = pd.DataFrame({"patient": [f"{place}-{n}" for n in range(each)], "age": age, "stage": stage})
        frame = frame.assign(score=score, time=time, dead=(time < 900).astype(int) * (numbers.random(each) < 0.8))
        frame.loc[numbers.choice(each, 5, False), "age"] = np.nan
        found[f"hospital-{place}"] = frame
    return found


def settings_of(frames: Mapping[str, pd.DataFrame], folder: Path, **more: Any) -> dict[str, SiteSettings]:
    """Write each hospital's table, and return its settings."""
    found = {}
    for site, frame in frames.items():
        place = folder / "data" / site
        place.mkdir(parents=True, exist_ok=True)
        frame.to_csv(place / "cases.csv", index=False)
        found[site] = SiteSettings(data=DataSource(folder=place), records=folder / "records", **more)
    return found


def asked(sites: Mapping[str, SiteSettings], folder: Path, sealed: bool = True, **question: Any) -> StatisticsFound:
    """Ask these hospitals in this process."""
    named = {"sites": sorted(sites)} if sealed else {}
    own = Question.from_values({"variables": VARIABLES, **named, **question}, "question.yaml")
    found = INQUIRY.here(own, sites, folder / "inquiries" / own.hash[:8])[FILE]
    assert isinstance(found, StatisticsFound)
    return found
