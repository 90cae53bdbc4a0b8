"""The frame of all reports: one HTML file without scripts, which needs no network and can be printed."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from medsilo.core.files import write_text
from medsilo.core.text import epsilon_text
from medsilo.core.version import __version__
from medsilo.runs.schema import StudyFacts
from medsilo.runs.score import number_text
from medsilo_lab.report.glossary import terms_in
from medsilo_lab.report.read import picture_of
from medsilo_page.frame import STYLE, templates_in

HERE = Path(__file__).parent


def fill(template: str, title: str, folder: Path = HERE, description: StudyFacts | None = None, **content: Any) -> str:
    """Fill a template and return the page as HTML. The page depends only on the arguments.

    Args:
        title: the main finding, which becomes the title
        folder: folder of the template; the templates of a plug-in are in the plug-in's folder
        description: the lead's description of the study
    """
    environment = templates_in(folder, HERE)
    environment.filters |= {"score": number_text, "epsilon": epsilon_text}
    environment.filters |= {"picture": picture_of, "terms": terms_in}
    return environment.get_template(template).render(
        title=title,
        description=description or StudyFacts(),
        style=Markup(STYLE.read_text(encoding="utf-8").strip()),
        version=__version__,
        **content,
    )


def save(page: str, destination: Path) -> Path:
    """Write a page into a file and return its path. The file is replaced in one step, so it is never incomplete."""
    # messages of sites may contain unpaired surrogates, which UTF-8 cannot encode, so the surrogates are replaced
    write_text(destination, page.encode("utf-8", "replace").decode())
    return destination
