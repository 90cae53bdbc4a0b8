"""Run each example, draw the pictures of README.md, and print the times of README.md.

python examples/pictures.py                      # the examples that need no data
python examples/pictures.py --table impact.csv   # all examples
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

os.environ["MPLBACKEND"] = "agg"
import matplotlib.pyplot as plt

from medsilo.runs.reading import read_rounds

HERE = Path(__file__).resolve().parent
SCORES = {"hello-fedbn": "accuracy", "monai-segmentation": "Dice", "tabular": "AUC", "lightning": "accuracy"}
IN_THE_DARK = "@media (prefers-color-scheme: dark) {svg{filter: invert(1) hue-rotate(180deg)}}"
STYLE = {"svg.hashsalt": "medsilo", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False}


def run(name: str, place: Path, options: list[str]) -> tuple[Path, float]:
    """Run a copy of an example. Return the folder with the run's results, and the duration of the run in seconds."""
    copytree(HERE / name, place)
    began = time.monotonic()
    subprocess.run([sys.executable, "job.py", *options], cwd=place, check=True, stdout=subprocess.DEVNULL)
    [summary] = place.glob("workspace/*/server/medsilo/*/summary.json")
    return summary.parent, time.monotonic() - began


def draw(name: str, record: Path, picture: Path) -> None:
    """Draw the scores that the sites measured in each round before training."""
    rounds = read_rounds(record)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(4, 2.2), layout="constrained")
        for site in sorted({site for own in rounds for site in own.sites}):
            found = [(own.round, own.sites[site].validation) for own in rounds if site in own.sites]
            axes.plot(*zip(*found, strict=True), marker="o", markersize=3, label=site)
        axes.set(xlabel="round", ylabel=SCORES[name], xticks=[own.round for own in rounds])
        axes.spines["right"].set_visible(False)
        axes.legend(frameon=False)
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, metadata={"Date": None, "Title": f"{name}: {SCORES[name]} by round"})
        plt.close(figure)
    text = picture.read_text("utf-8")
    picture.write_text(text.replace("</style>", f"{IN_THE_DARK}</style>", 1), "utf-8")


def main() -> None:
    """Draw the pictures of all examples whose data are available, and print the times of these examples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="the table for the example tabular, not a part of medsilo")
    table = parser.parse_args().table
    given = {"tabular": ["--table", str(table.resolve()), "--sites", "3"]} if table else {}
    for name in SCORES:
        if name == "tabular" and not table:
            continue
        with TemporaryDirectory() as folder:
            record, seconds = run(name, Path(folder) / name, given.get(name, []))
            draw(name, record, HERE / "pictures" / f"{name}.svg")
        print(f"{name}: {seconds:.0f} s")


if __name__ == "__main__":
    main()
