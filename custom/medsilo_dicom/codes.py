"""The coded words of results: what a structure is, so that other programs know it, too."""

from dataclasses import dataclass
from typing import Any

SCHEME = "99MEDSILO"  # words that no vocabulary has
ANATOMY = ("cid4030", "cid7166")  # the standard's lists of anatomy and tissues
SPELLED = {"tumour": "Tumor", "oedema": "Edema", "haemorrhage": "Hemorrhage"}
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

    word = SPELLED.get(name.lower()) or "".join(part.capitalize() for part in name.replace("-", " ").split())
    lists = [codes.SCT] if word in ABNORMAL else [getattr(codes, name) for name in ANATOMY] if word.isalnum() else []
    found: Any = next((known for known in (getattr(group, word, None) for group in lists) if known), None)
    if found is None:
        return StructureCode("85756007", "SCT", "Tissue")
    return StructureCode(found.value, found.scheme_designator, found.meaning, word in ABNORMAL)


def parsed(text: str) -> StructureCode:
    """Return the code that a hospital writes as scheme:value:meaning."""
    scheme, value, meaning = text.split(":", 2)
    return StructureCode(value, scheme, meaning)
