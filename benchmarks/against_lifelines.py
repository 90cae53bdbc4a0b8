"""Compare an answer of `medsilo statistics` with lifelines on the pooled tables: Cox (Efron), curves, log-rank.

Runs alone, in an environment with lifelines, which needs an older pandas than medsilo:
    python benchmarks/against_lifelines.py answer/answers.json north/ south/ west/
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test


def read(question: dict[str, Any], folders: list[Path]) -> pd.DataFrame:
    """Return all hospitals' patients: numbers, and of categories the places of their levels."""
    found = []
    for folder in folders:
        table, own = pd.read_csv(folder / "cases.csv", dtype=str), question["columns"].get(folder.name, {})
        values = {name: column(table[own.get(name, name)], one) for name, one in question["variables"].items()}
        found.append(pd.DataFrame(values).assign(hospital=folder.name))
    return pd.concat(found, ignore_index=True)


def column(cells: pd.Series, variable: dict[str, Any]) -> pd.Series:
    """Return a column as numbers, NaN where it has none."""
    numbers = pd.to_numeric(cells, errors="coerce")
    if variable["range"]:
        return numbers.where(numbers.between(*variable["range"]))
    names = {cell: place for place, (level, own) in enumerate(variable["levels"].items()) for cell in (level, *own)}
    known = cells.map(lambda cell: names.get(cell, names.get(str(cell).removesuffix(".0"), np.nan)))
    if variable["cuts"]:
        cut = pd.Series(np.searchsorted(variable["cuts"], numbers), cells.index).where(numbers.notna())
        return known.fillna(cut)
    return known


def main() -> None:
    """Print the greatest differences: of Cox's relative, of curves absolute."""
    answer = json.loads(Path(sys.argv[1]).read_text())
    question = answer["question"]
    whole = read(question, sorted(map(Path, sys.argv[2:])))
    for model, fit in zip(question["models"], answer["fits"], strict=True):
        if model["kind"] != "cox" or model["ties"] != "efron" or fit["why"]:
            continue
        known = whole[[*model["covariates"], model["time"], model["event"], "hospital"]].dropna()
        for name in model["covariates"]:
            for place in range(1, len(question["variables"][name]["levels"])):
                known[f"{name} {place}"] = (known[name] == place).astype(float)
        plain = [name for name in model["covariates"] if question["variables"][name]["levels"]]
        order = [
            own for name in model["covariates"] for own in ([c for c in known if c.startswith(f"{name} ")] or [name])
        ]
        used = known.drop(columns=plain)[[*order, model["time"], model["event"], "hospital"]]
        theirs = CoxPHFitter().fit(
            used, model["time"], model["event"], strata=["hospital"], fit_options={"precision": 1e-12, "step_size": 1.0}
        )
        errors = np.sqrt(np.diag(fit["covariance"]))
        apart = np.abs(np.array(fit["coefficients"]) / theirs.params_.to_numpy() - 1).max()
        wide = np.abs(errors / theirs.standard_errors_.to_numpy() - 1).max()
        print(f"cox of {len(used)} patients: coefficients {apart:.1e}, standard errors {wide:.1e}")
    for curve, own in zip(question["curves"], answer["curves"], strict=True):
        known = whole[[curve["time"], curve["event"], *([curve["by"]] if curve["by"] else [])]].dropna()
        worst = 0.0
        for place, group in enumerate(own["groups"]):
            mine = known[known[curve["by"]] == place] if curve["by"] else known
            fitted = KaplanMeierFitter().fit(mine[curve["time"]], mine[curve["event"]])
            rows = (fitted.event_table.observed > 0).to_numpy()
            wanted = np.stack(
                [fitted.survival_function_.to_numpy()[rows, 0], *fitted.confidence_interval_.to_numpy()[rows].T]
            )
            told = np.array([group["share"], group["low"], group["high"]])[:, wanted[0] > 0]
            worst = max(worst, float(np.abs(told - wanted[:, wanted[0] > 0]).max()))
        print(f"curves of {len(known)} patients with their bands: {worst:.1e}")
        if own["p"] is not None:
            test = multivariate_logrank_test(known[curve["time"]], known[curve["by"]], known[curve["event"]])
            print(f"log-rank: {abs(own['statistic'] / test.test_statistic - 1):.1e}")


if __name__ == "__main__":
    main()
