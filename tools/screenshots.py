"""Take screenshots of the demo and a comparison for the documentation, each in a light and in a dark version.

python -m tools.screenshots            # or: make screenshots
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from medsilo_lab.comparison.demo import ROWS, SMALL
from medsilo_lab.study.verdict_file import read_verdict

HERE = Path(__file__).resolve().parents[1] / "docs/pictures"
# maps the suffix of a picture's name to Chromium's number for the preferred colour scheme
SCHEMES = {"": 1, "-dark": 0}
COLOURS = 256
NUMBERS = "numbers"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STUDY = ["compare", "--task", "synthetic-prostate", "--set", "training.rounds=8", "--set", "task.patients=12"]
STUDY += ["--methods", "local,fedavg,fedbn,adafed", "--seeds", "0,1,2,3", "--device", "cpu"]
STUDY += ["--set", "study.title=Four methods on synthetic prostates"]
# Elements of the demo's page that are missing in the README's picture; the picture's caption mentions this.
LEFT_OUT = "header > :is(.notices, .checks, nav, details), #same, #yours"


def main() -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        demo, study = Path(place) / "demo", Path(place) / "study"
        medsilo("demo", "--out", str(demo))
        medsilo(*STUDY, "--out", str(study))
        page = next(demo.glob("*/report.html"))
        style = f"<style>{LEFT_OUT} {{ display: none }}</style></head>"
        page.write_text(page.read_text("utf-8").replace("</head>", style, 1), "utf-8")
        for scheme in SCHEMES:
            take(browser, page, HERE / f"demo{scheme}.png", 880, 1062, numbers_of(page.parent), scheme)
            take(browser, study / "report.html", HERE / f"study{scheme}.png", 1000, 1130, scheme=scheme)


def medsilo(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "medsilo", *arguments], check=True)


def numbers_of(study: Path) -> str:
    """Return the rows of the demo and the scores of each seed; the picture contains these scores so that a test can
    read them.
    """
    verdict = read_verdict(study)
    scores = {row.title: row.score.by_seed for row in verdict.rows if row.score}
    return json.dumps({"rows": ROWS, "changes": SMALL, "seeds": verdict.seeds, "scores": scores})


def take(browser: str, page: Path, picture: Path, width: int, height: int, numbers: str = "", scheme: str = "") -> None:
    """Take a picture of the part of a page that is visible without scrolling, and reduce the picture's colours to a
    palette.
    """
    options = [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    options += ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
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
