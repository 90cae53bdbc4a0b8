"""A record as an officer reads it: one HTML page, and the same as a Word document to go on writing in."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from medsilo.core.package import package_facts
from medsilo.report.template import fill
from medsilo_record.facts import Case, RecordEntry

TEMPLATE = "record.html"
TO_FILL_IN, LINE = "To fill in: ", " ____________"
CANNOT = (
    "Sentences come from the plan, the hospital's settings and medsilo's leak report; nobody has judged them.",
    "A blank is what medsilo does not know. Risks are listed and not weighed.",
    "What people did beside medsilo, such as copying a file, is not in it.",
)


def title_of(case: Case) -> str:
    """Return the title of a record."""
    where = f" at {case.site}" if case.site else ""
    return f"Record of processing: {case.plan.algorithm.title}, task {case.plan.task.name}{where}"


def as_html(case: Case, entries: Sequence[RecordEntry]) -> str:
    """Return record.html."""
    blanks = sum(bool(entry.blank) for entry in entries)
    return fill(
        TEMPLATE,
        title_of(case),
        Path(__file__).parent,
        context=f"Plan {case.plan.hash}, build {package_facts()['hash']}",
        answer=f"{len(entries)} entries, {blanks} of them with something to fill in.",
        notices=[],
        limits=CANNOT,
        parts=[(part, list(own)) for part, own in groupby(entries, attrgetter("part"))],
    )


def as_docx(case: Case, entries: Sequence[RecordEntry]) -> bytes:
    """Return record.docx, whose bytes depend on the record alone."""
    from docx import Document

    document = Document()
    document.core_properties.author = document.core_properties.last_modified_by = "medsilo"
    document.core_properties.title = title_of(case)
    document.add_heading(title_of(case), 0)
    for part, own in groupby(entries, attrgetter("part")):
        document.add_heading(part, 1)
        for entry in own:
            document.add_heading(entry.title, 2)
            for line in entry.says:
                document.add_paragraph(line)
            if entry.blank:
                blank = document.add_paragraph()
                blank.add_run(TO_FILL_IN).bold = True
                blank.add_run(entry.blank + LINE)
    document.add_heading("What this record cannot tell", 1)
    for line in CANNOT:
        document.add_paragraph(line)
    written = BytesIO()
    document.save(written)
    with ZipFile(written) as dated:
        return undated_zip({name: dated.read(name) for name in dated.namelist()})


def undated_zip(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file without the times of its parts."""
    found = BytesIO()
    with ZipFile(found, "w") as written:
        for name, content in files.items():
            written.writestr(ZipInfo(name), content, ZIP_DEFLATED)
    return found.getvalue()
