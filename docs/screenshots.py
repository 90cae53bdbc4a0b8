"""Draws the README's pictures: a run's page and a study's, made anew from synthetic data, in a headless Chromium.

python docs/screenshots.py            # or: make screenshots
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent / "pictures"
WIDTH, HEIGHT = 1000, 1250
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STUDY = ["compare", "--task", "synthetic-prostate", "--set", "training.rounds=8", "--set", "task.patients=12"]
STUDY += ["--methods", "local,fedavg,fedbn,adafed", "--seeds", "0,1,2", "--engine", "inprocess", "--device", "cpu"]
STUDY += ["--title", "Four methods on synthetic prostates"]


def main() -> None:
    """Run a small study and take the pictures."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "study"
        subprocess.run([sys.executable, "-m", "medsilo.cli", *STUDY, "--out", str(folder)], check=True)
        page = folder / "fedbn-0/report.html"
        subprocess.run(
            [sys.executable, "-m", "medsilo.cli", "report", str(folder / "fedbn-0"), "-o", str(page)], check=True
        )
        take(browser, folder / "report.html", HERE / "study.png")
        take(browser, page, HERE / "run.png")


def take(browser: str, page: Path, picture: Path) -> None:
    """Take a picture of the first screen of a page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run([browser, *options, f"--screenshot={picture}", page.resolve().as_uri()], check=True, timeout=120)
    print(picture)


if __name__ == "__main__":
    main()
