"""Draws the pages' pictures: of the demo, a comparison and a run, from synthetic data, in a headless Chromium.

python docs/screenshots.py            # or: make screenshots
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from medsilo_lab.study.demo import ROWS, SMALL
from medsilo_lab.study.verdict_file import read_verdict

HERE = Path(__file__).resolve().parent / "pictures"
COLOURS = 256  # of the palette
NUMBERS = "numbers"  # the key under which a picture carries what it shows
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STUDY = ["compare", "--task", "synthetic-prostate", "--set", "training.rounds=8", "--set", "task.patients=12"]
STUDY += ["--methods", "local,fedavg,fedbn,adafed", "--seeds", "0,1,2", "--device", "cpu"]
STUDY += ["--set", "study.title=Four methods on synthetic prostates"]
# What the README's picture leaves out of the demo's page, as it says.
LEFT_OUT = "header > :is(.notices, .checks, nav, details), #same, #yours"


def main() -> None:
    """Run the demo and a small study, and take the pictures."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        demo, study = Path(place) / "demo", Path(place) / "study"
        medsilo("demo", "--out", str(demo))
        medsilo(*STUDY, "--out", str(study))
        medsilo("report", str(study / "fedbn-0"), "-o", str(study / "run.html"))
        page = next(demo.glob("*/report.html"))
        style = f"<style>{LEFT_OUT} {{ display: none }}</style></head>"
        page.write_text(page.read_text("utf-8").replace("</head>", style, 1), "utf-8")
        take(browser, page, HERE / "demo.png", 880, 1530, numbers_of(page.parent))
        take(browser, study / "report.html", HERE / "study.png", 1000, 1130)
        take(browser, study / "run.html", HERE / "run.png", 1000, 1240)


def medsilo(*arguments: str) -> None:
    """Run a command of the package that this Python has."""
    subprocess.run([sys.executable, "-m", "medsilo", *arguments], check=True)


def numbers_of(study: Path) -> str:
    """Return what the demo ran and its scores by row and seed, which the picture carries for a test."""
    verdict = read_verdict(study)
    scores = {row.title: row.score.by_seed for row in verdict.rows if row.score}
    return json.dumps({"rows": ROWS, "changes": SMALL, "seeds": verdict.seeds, "scores": scores})


def take(browser: str, page: Path, picture: Path, width: int, height: int, numbers: str = "") -> None:
    """Take a picture of the first screen of a page, with a palette."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = [browser, *options, f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    with Image.open(picture) as taken:
        small = taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    told = PngInfo()
    told.add_text(NUMBERS, numbers)
    small.save(picture, optimize=True, pnginfo=told if numbers else None)
    print(picture)


if __name__ == "__main__":
    main()
