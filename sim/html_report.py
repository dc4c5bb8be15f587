"""A result as one HTML file that needs nothing else: words, tables, pictures inside, and the whole document as JSON."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

Draw = Callable[[io.BytesIO], object]

_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#222}
.answer{background:#eef4ee;border-left:.4rem solid #228833;padding:.6rem 1rem;margin:1rem 0}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem}
th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}
img{max-width:100%}pre{overflow:auto;font-size:.75rem;background:#f6f6f6;padding:.6rem}
"""


class HtmlTable(NamedTuple):
    """A table: what it shows, its heads, its rows."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


class HtmlPicture(NamedTuple):
    """A picture: what it shows, and who draws it as PNG."""

    title: str
    draw: Draw


def render_html(
    title: str,
    answer: Sequence[str],
    tables: Sequence[HtmlTable],
    pictures: Sequence[HtmlPicture],
    assumptions: Sequence[str],
    document: dict[str, Any],
) -> str:
    """The file's text; it refers to nothing outside itself.

    Without matplotlib it has a sentence in place of each picture.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", '<div class="answer">']
    parts += [f"<p>{html.escape(line)}</p>" for line in answer]
    parts.append("</div>")
    for picture in pictures:
        parts.append(f"<h2>{html.escape(picture.title)}</h2>")
        parts.append(_image(picture))
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>")
        parts += [f"<th>{html.escape(head)}</th>" for head in table.heads]
        parts.append("</tr>")
        for row in table.rows:
            parts.append("<tr>" + "".join(f"<td>{html.escape(str(entry))}</td>" for entry in row) + "</tr>")
        parts.append("</table>")
    parts.append("<h2>What was assumed</h2><ul>")
    parts += [f"<li>{html.escape(line)}</li>" for line in assumptions]
    parts.append("</ul><details><summary>Everything, as JSON</summary><pre>")
    parts.append(html.escape(json.dumps(document, indent=1)))
    parts.append("</pre></details>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _image(picture: HtmlPicture) -> str:
    buffer = io.BytesIO()
    try:
        picture.draw(buffer)
    except ImportError as missing:
        return f"<p>No picture: {html.escape(str(missing))}</p>"
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(picture.title)}" src="data:image/png;base64,{encoded}">'
