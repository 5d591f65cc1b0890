"""Pieces of HTML. Whatever is given is a plain text, and is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

LONGEST = 3_000
"""Characters of a text that are shown; behind them stands how many more there are."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def text(value: str) -> str:
    """Return a text escaped; characters that no page may have are shown by others."""
    return html.escape(_CONTROL.sub(_picture, value))


def _picture(found: re.Match[str]) -> str:
    """Return the picture of an ASCII control character; for any other, the replacement."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"


def said(value: str) -> str:
    """Return a block with what was asked or answered, as it is, cut if it is very long."""
    if not value.strip():
        blank = f", {len(value):,} white-space characters" if value else ""
        return f'<div class="said"><em>(empty{blank})</em></div>'
    more = len(value) - LONGEST
    rest = f"<em> \N{HORIZONTAL ELLIPSIS} {more:,} more characters</em>" if more > 0 else ""
    return f'<div class="said" dir="auto">{text(value[:LONGEST])}{rest}</div>'


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    clear: Sequence[bool] = (),
    words: bool = False,
) -> str:
    """Return a table in a box that scrolls; the first cell of each row names it.

    Args:
        caption: what the table tells.
        head: names of the columns.
        rows: their cells.
        clear: which rows are marked; by default none.
        words: whether the cells are words, which wrap, and not figures.
    """
    kind = ' class="words"' if words else ""
    lines = [f'<div class="table" role="region" tabindex="0" aria-label="{text(caption)}">']
    lines.append(f"<table{kind}>\n<caption>{text(caption)}</caption>")
    cells = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    lines.append(f"<thead><tr>{cells}</tr></thead>\n<tbody>")
    for place, (name, *values) in enumerate(rows):
        marked = ' class="clear"' if place < len(clear) and clear[place] else ""
        cells = "".join(f"<td>{text(value)}</td>" for value in values)
        lines.append(f'<tr{marked}><th scope="row">{text(name)}</th>{cells}</tr>')
    lines.append("</tbody>\n</table></div>")
    return "\n".join(lines)


def details(summary: str, *content: str, opened: bool = False) -> str:
    """Return a part that is folded up until its reader opens it."""
    state = " open" if opened else ""
    inside = "\n".join(content)
    return f"<details{state}><summary>{text(summary)}</summary>\n{inside}\n</details>"


def picture(svg: str, number: int, label: str, caption: str = "", widest: int = 0) -> str:
    """Return a figure of an SVG file's text, fit to stand in a page beside others.

    Args:
        svg: the file's text.
        number: of the picture in the page; names within it begin with it.
        label: what the picture shows, for those who do not see it.
        caption: stands below.
        widest: pixels of width below which it scrolls and does not shrink; 0: it shrinks.
    """
    found = re.search(r'<svg[^>]*\bviewBox="([^"]*)"[^>]*>', svg)
    assert found is not None
    width = float(found[1].split()[2]) * 4 / 3  # points to pixels
    body = svg[found.end() :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>p{number}-", body)
    style = f"max-width: {width:.0f}px" + (f"; min-width: {widest}px" if widest else "")
    below = f"\n<figcaption>{text(caption)}</figcaption>" if caption else ""
    return (
        f'<figure><div class="card"><svg viewBox="{found[1]}" role="img" '
        f'aria-label="{text(label)}" style="{style}">{body.strip()}</div>{below}</figure>'
    )


def page(title: str, css: str, content: str) -> str:
    """Return a whole page that needs nothing from elsewhere and runs no program."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
{css}</style>
</head>
<body>
<main>
<h1>{text(title)}</h1>
{content}
</main>
</body>
</html>
"""


def plain(value: Any) -> str:
    """Return a setting's value in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else str(value)
