"""Write small xlsx and ods files."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from xml.sax.saxutils import escape

Row = Sequence[str | float | None]

_XLSX = {
    "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/xl/workbook.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.sheet.main+xml"/></Types>',
    "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="rId1" Target="xl/workbook.xml" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"/></Relationships>',
}
_MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_ODS_TYPE = "application/vnd.oasis.opendocument.spreadsheet"
_MANIFEST = (
    '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0">'
    f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{_ODS_TYPE}"/>'
    '<manifest:file-entry manifest:full-path="content.xml" manifest:media-type="text/xml">{}'
    "</manifest:file-entry></manifest:manifest>"
)
_ODS = (
    '<office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"><office:body><office:spreadsheet>'
)


def write_xlsx(path: str, *sheets: Sequence[Row]) -> None:
    """Write a workbook. Sheets are named S1, S2, ..."""
    numbers = range(1, len(sheets) + 1)
    names = "".join(f'<sheet name="S{number}" sheetId="{number}" r:id="rId{number}"/>' for number in numbers)
    targets = "".join(
        f'<Relationship Id="rId{number}" Type="{_RELATIONS}/worksheet" Target="worksheets/sheet{number}.xml"/>'
        for number in numbers
    )
    parts = dict(_XLSX)
    parts["xl/workbook.xml"] = f'<workbook {_MAIN} xmlns:r="{_RELATIONS}"><sheets>{names}</sheets></workbook>'
    relations = "http://schemas.openxmlformats.org/package/2006/relationships"
    parts["xl/_rels/workbook.xml.rels"] = f'<Relationships xmlns="{relations}">{targets}</Relationships>'
    for number, rows in enumerate(sheets, 1):
        data = "".join(_xlsx_row(index, row) for index, row in enumerate(rows, 1))
        parts[f"xl/worksheets/sheet{number}.xml"] = f"<worksheet {_MAIN}><sheetData>{data}</sheetData></worksheet>"
    write_parts(path, parts)


def write_ods(path: str, *sheets: Sequence[Row], has_password: bool = False) -> None:
    """Write a spreadsheet of OpenDocument. Sheets are named S1, S2, ..."""
    tables = "".join(
        f'<table:table table:name="S{number}">{"".join(map(_ods_row, rows))}</table:table>'
        for number, rows in enumerate(sheets, 1)
    )
    content = f"{_ODS}{tables}</office:spreadsheet></office:body></office:document-content>"
    manifest = _MANIFEST.format("<manifest:encryption-data/>" if has_password else "")
    write_parts(path, {"mimetype": _ODS_TYPE, "META-INF/manifest.xml": manifest, "content.xml": content})


def _letters(column: int) -> str:
    return (chr(64 + (column - 1) // 26) if column > 26 else "") + chr(65 + (column - 1) % 26)


def _xlsx_row(number: int, row: Row) -> str:
    cells = [
        f'<c r="{_letters(column)}{number}"><v>{value}</v></c>'
        if isinstance(value, float)
        else f'<c r="{_letters(column)}{number}" t="inlineStr"><is><t>{escape(str(value))}</t></is></c>'
        for column, value in enumerate(row, 1)
        if value is not None
    ]
    return f'<row r="{number}">{"".join(cells)}</row>'


def _ods_row(row: Row) -> str:
    cells = [
        "<table:table-cell/>"
        if value is None
        else f'<table:table-cell office:value-type="float" office:value="{value}"><text:p>{value}</text:p>'
        "</table:table-cell>"
        if isinstance(value, float)
        else f'<table:table-cell office:value-type="string"><text:p>{escape(value)}</text:p></table:table-cell>'
        for value in row
    ]
    return f"<table:table-row>{''.join(cells)}</table:table-row>"


def write_parts(path: str, parts: dict[str, str]) -> None:
    """Write an archive of named parts."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            # OpenDocument has its type first, not compressed.
            archive.writestr(name, content, zipfile.ZIP_STORED if name == "mimetype" else None)
