"""Markdown that a learner wrote, made harmless before somebody with an instructor's rights looks at it.

nbconvert turns markdown into HTML and lets HTML in it through, scripts included. What is plain text stays as it was
written; anything else is rendered here, sanitised with bleach, and put back as HTML that nbconvert does not read again.
There are no links: one click on an address of the grading server would be a request in the instructor's name.
"""

from __future__ import annotations

import base64
import binascii
import html
import re
import struct
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser

import bleach
from bleach.html5lib_shim import Filter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

_HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_TAGS = _HEADINGS | frozenset(
    ["b", "blockquote", "br", "code", "dd", "del", "details", "div", "dl", "dt", "em", "hr", "i", "img", "li", "ol",
     "p", "pre", "s", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul"]
)  # fmt: skip
# nbconvert names each heading after its text: one called "check_decode" would stand in for the cell's score.
_PLAIN = _TAGS - _HEADINGS - {"img"}
_LONGEST, _DEEPEST = 20_000, 60
_DATA_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")
_RAW_HTML = re.compile(r"<[A-Za-z!/?]")
_TAG = re.compile(r"<[^<>]*>")
# What markdown, MathJax or a template could take for more than a letter.
_MEANING = str.maketrans({each: f"&#{ord(each)};" for each in "*_`[]()!~|\\$:@{}\n\t"})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u0085\u2028\u2029\ud800-\udfff]")
_MOST_PNG_BYTES, _MOST_PIXELS = 4 * 2**20, 50_000_000


def safe_markdown(source: str, attachments: object = None) -> str:
    """The text of a markdown cell that shows the same and can do nothing. Images are PNG attachments, or dropped."""
    source = plain_characters(source)
    if len(source) > _LONGEST:
        return text_as_markdown(source)
    try:
        rendered = _render(source, plain_pictures(attachments))
        if not _RAW_HTML.search(source) and _is_plain(rendered):
            return source
        safe = _one_block(_cleaner().clean(rendered))
        if _render(safe, {}).strip() == safe:
            return safe
    except Exception:  # a text on which a renderer gives up is shown as it was written
        pass
    return text_as_markdown(source)


def text_as_markdown(text: str, heading: str = "") -> str:
    """Markdown that shows `text` letter by letter, under a heading."""
    above = f"<p><b>{_one_line(html.escape(plain_characters(heading)))}</b></p>" if heading else ""
    return f"<div>{above}<pre>{_one_line(html.escape(plain_characters(text)))}</pre></div>"


def notes_as_markdown(heading: str, notes: list[str]) -> str:
    """Markdown that shows `notes` as a list of plain text."""
    lines = "".join(f"<li>{_one_line(html.escape(plain_characters(note)))}</li>" for note in notes)
    return f"<div><p><b>{_one_line(html.escape(heading))}</b></p><ul>{lines}</ul></div>"


def plain_characters(text: str) -> str:
    """`text` with line ends of one kind and no control characters or halves of characters."""
    return _CONTROL.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))


def safe_png(content: object) -> str | None:
    """base64 of a picture if it is a PNG of a sensible size, else None. content: base64 as a notebook holds it."""
    if isinstance(content, list):
        content = "".join(part for part in content if isinstance(part, str))
    if not isinstance(content, str) or len(content) > 2 * _MOST_PNG_BYTES:
        return None
    try:
        raw = base64.b64decode("".join(content.split()), validate=True)
        width, height = struct.unpack(">II", raw[16:24])
    except (binascii.Error, struct.error, ValueError):
        return None
    if not raw.startswith(b"\x89PNG\r\n\x1a\n") or raw[12:16] != b"IHDR":
        return None
    if len(raw) > _MOST_PNG_BYTES or not 0 < width * height <= _MOST_PIXELS:
        return None
    return base64.b64encode(raw).decode("ascii")


def plain_pictures(attachments: object) -> dict[str, str]:
    """PNG attachments by name, as base64."""
    found = attachments.items() if isinstance(attachments, Mapping) else ()
    pictures = {name: safe_png(kinds.get("image/png")) for name, kinds in found if isinstance(kinds, Mapping)}
    return {name: content for name, content in pictures.items() if content and isinstance(name, str)}


class _Renderer(IPythonRenderer):
    """nbconvert's renderer; of pictures it knows the given ones only."""

    def _embed_image_or_attachment(self, src: str) -> str:
        name = src.removeprefix("attachment:")
        if name != src:
            return f"data:image/png;base64,{self.attachments[name]}" if name in self.attachments else ""
        return src


def _render(source: str, pictures: dict[str, str]) -> str:
    return MarkdownWithMath(_Renderer(escape=False, exclude_anchor_links=True, attachments=pictures)).render(source)


class _Tags(HTMLParser):
    """Notes whether all tags are plain ones."""

    plain = True

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.plain = self.plain and tag in _PLAIN and not attrs


def _is_plain(rendered: str) -> bool:
    """Whether HTML made from markdown without HTML in it has plain tags alone: no link, no picture, nothing named."""
    tags = _Tags()
    tags.feed(rendered)
    tags.close()
    return tags.plain


def _is_allowed(tag: str, name: str, value: str) -> bool:
    if tag == "img":
        return name == "alt" or (name == "src" and bool(_DATA_PNG.fullmatch(value)))
    return tag == "a" and name == "href"


def _cleaner() -> bleach.Cleaner:
    return bleach.Cleaner(
        tags=_TAGS | {"a"},
        attributes=_is_allowed,
        protocols={"http", "https", "mailto", "data"},
        filters=[_WithoutLinks],
    )


class _WithoutLinks(Filter):
    """Writes the address of a link after its text; of pictures keeps those that are there."""

    def __iter__(self) -> Iterator[dict]:
        address, text = "", ""
        for token in super().__iter__():
            if token.get("name") == "a":
                if token["type"] == "StartTag":
                    address, text = html.unescape(token["data"].get((None, "href"), "")), ""
                elif address.startswith(("http://", "https://", "mailto:")) and address != text:
                    yield {"type": "Characters", "data": f" ({address})"}
                continue
            text += token["data"] if token["type"] == "Characters" else ""
            if token.get("name") == "img":
                token = _picture(token)
            yield token


def _picture(token: dict) -> dict:
    about = re.sub(r"[^\w .,-]+", " ", html.unescape(token["data"].get((None, "alt"), "")))
    if (None, "src") not in token["data"]:
        return {"type": "Characters", "data": f"(a picture that was not handed in: {about})"}
    token["data"][(None, "alt")] = about
    return token


def _one_block(cleaned: str) -> str:
    """Sanitised HTML as a single line, which markdown takes for a block of HTML and leaves alone."""
    parts, end, depth = [], 0, 0
    for tag in _TAG.finditer(cleaned):
        parts += [_one_line(cleaned[end : tag.start()]), tag.group().replace("\n", " ")]
        end = tag.end()
        depth += -1 if tag.group().startswith("</") else not tag.group().startswith(("<br", "<hr", "<img"))
        if depth > _DEEPEST:
            raise ValueError("tags nested deeper than a page can be")
    return f"<div>{''.join(parts)}{_one_line(cleaned[end:])}</div>"


def _one_line(escaped: str) -> str:
    return escaped.translate(_MEANING)
