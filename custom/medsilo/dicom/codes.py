"""The coded words of results: what a structure is, so that other programs know it, too."""

from dataclasses import dataclass
from typing import Any

SCHEME = "99MEDSILO"  # words that no vocabulary has
LISTS = ("cid4030", "cid7166", "cid7159")  # of the standard: anatomy, tissues, lesions
SAME = {"tumour": "Tumor", "tumor": "Tumor", "metastasis": "Metastasis"}
ABNORMAL = ("Tumor", "Neoplasm", "Lesion", "Metastasis", "Cyst", "Mass", "Nodule", "Hemorrhage", "Edema", "Necrosis")


@dataclass(frozen=True)
class StructureCode:
    """A code, its scheme and its meaning; and whether it is abnormal."""

    value: str
    scheme: str
    meaning: str
    abnormal: bool = False


def code_of(name: str) -> StructureCode:
    """Return the standard's code of a structure by its English name, or that of tissue where it has none."""
    from pydicom.sr.codedict import codes

    word = SAME.get(name.lower()) or "".join(part.capitalize() for part in name.replace("-", " ").split())
    for group in LISTS:
        found: Any = getattr(getattr(codes, group), word, None) if word.isalnum() else None
        if found is not None:
            return StructureCode(found.value, found.scheme_designator, found.meaning, word in ABNORMAL)
    return StructureCode("85756007", "SCT", "Tissue")
