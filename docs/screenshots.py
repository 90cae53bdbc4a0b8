"""Draws the pages' pictures anew: of the demo, a comparison and a run, from synthetic data, in a headless Chromium.

python docs/screenshots.py            # or: make screenshots
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent / "pictures"
WIDTH = 1000
COLOURS = 64  # of the palette; text on white needs few
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STUDY = ["compare", "--task", "synthetic-prostate", "--set", "training.rounds=8", "--set", "task.patients=12"]
STUDY += ["--methods", "local,fedavg,fedbn,adafed", "--seeds", "0,1,2", "--engine", "inprocess", "--device", "cpu"]
STUDY += ["--title", "Four methods on synthetic prostates"]


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
        take(browser, next(demo.glob("*/report.html")), HERE / "demo.png", 1200)
        take(browser, study / "report.html", HERE / "study.png", 1250)
        take(browser, study / "run.html", HERE / "run.png", 1250)


def medsilo(*arguments: str) -> None:
    """Run a command of the package that this Python has."""
    subprocess.run([sys.executable, "-m", "medsilo.cli", *arguments], check=True)


def take(browser: str, page: Path, picture: Path, height: int) -> None:
    """Take a picture of the first screen of a page, in few colours."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{height}"]
    subprocess.run([browser, *options, f"--screenshot={picture}", page.resolve().as_uri()], check=True, timeout=120)
    with Image.open(picture) as taken:
        small = taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)
    print(picture)


if __name__ == "__main__":
    main()
