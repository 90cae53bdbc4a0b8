"""Tumour in patches of lymph nodes from five hospitals: Camelyon17 as WILDS publishes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from medsilo.extend import Classification, DataError, SiteData
from medsilo_papers.public_files import PictureTask, Split, bare_name, rows_of, site_folder

TABLE = "metadata.csv"
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
LAYOUT = f"{TABLE} and patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png (WILDS' camelyon17_v1.0)"


class Camelyon17(PictureTask):
    """RGB patches in 0 to 1, [3, size, size]; 1 where the middle holds tumour. Read when asked for, but for those
    that the site's cache keeps.

    A site named center-0 to center-4 takes that hospital's rows of metadata.csv; where the table has one hospital, its
    site may have any name. The set's own split, which leaves out whole hospitals, isn't used.
    """

    title: ClassVar[str] = "Camelyon17: tumour in lymph node patches of five hospitals"
    goal: ClassVar[Classification] = Classification(2)

    name: Literal["camelyon17"] = "camelyon17"
    size: int = Field(default=96, ge=32, le=1024, description="patches are resized to this many pixels")
    split: Split = Field(default="patient", description="paper: patches at random, as HarmoFL's paper")
    shares: SiteData.Shares = (0.64, 0.16, 0.2)

    def default_network(self) -> str:
        return "densenet121"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        place = site_folder(self.name, site, sites, folder, lambda path: (path / TABLE).is_file(), LAYOUT)
        rows = rows_of(place / TABLE, COLUMNS)
        centers = sorted({row["center"] for row in rows})
        wanted = centers[0] if len(centers) == 1 else bare_name(site).removeprefix("center")
        own = [row for row in rows if row["center"] == wanted]
        if not own:
            known = ", ".join(f"center-{center}" for center in centers)
            raise DataError(f"{TABLE} has several hospitals; name the site after one of them: {known}")
        if {row["tumor"] for row in own} - {"0", "1"} or not all(
            row[name].isalnum() for row in own for name in COLUMNS
        ):
            raise DataError(f"{TABLE}: column tumor has values beside 0 and 1, or another column has no plain numbers")
        patients = [row["patient"] for row in own]
        items = [(place / _file(row), int(row["tumor"])) for row in own]
        if not items[0][0].is_file():
            raise DataError(f"{TABLE} names patches that are not there; expected {LAYOUT}", private=str(items[0][0]))
        return SiteData.read_later(items, patients, self.parts_of(patients, site, seed), self.case_of)


def _file(row: dict[str, str]) -> str:
    slide = f"patient_{row['patient']}_node_{row['node']}"
    return f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
