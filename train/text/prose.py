"""What a reader sees of an HTML page or of a text file: prose without markup, with one kind of space and of newline."""

from __future__ import annotations

import re
from html.parser import HTMLParser

BREAKS = frozenset("address article aside dd div dl dt figure footer form header hr li main nav ol section table tbody "
                   "thead tr ul".split())  # fmt: skip
PARAGRAPHS = frozenset("blockquote h1 h2 h3 h4 h5 h6 p pre".split())
SKIPPED = frozenset(["script", "style", "head", "template"])


class _Text(HTMLParser):
    """Collects what a reader sees: text, a newline at a block, an empty line at a paragraph."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping: str | None = None
        self.preformatted = 0

    def _block(self, tag: str) -> None:
        if tag in PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in BREAKS or tag == "br":
            self.parts.append("\n")

    def handle_starttag(self, tag: str, attrs: object) -> None:
        # </head> may be left out of HTML; the first thing that is not of the head ends it.
        if self.skipping == "head" and (tag == "body" or tag in PARAGRAPHS or tag in BREAKS):
            self.skipping = None
        if self.skipping is None and tag in SKIPPED:
            self.skipping = tag
        if self.skipping is None:
            self.preformatted += tag == "pre"
            self._block(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skipping is None:
            self.preformatted = max(0, self.preformatted - (tag == "pre"))
            if tag != "br":
                self._block(tag)
        elif tag == self.skipping:
            self.skipping = None

    def handle_data(self, data: str) -> None:
        if self.skipping is None:
            # A newline in the source of a page is a space, but not in <pre>.
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """Text of a page: no tags, scripts or head; one space for any white space, at most one empty line in a row."""
    parser = _Text()
    try:
        parser.feed(html)
        parser.close()
    except AssertionError as error:  # the standard library's word for a broken <![ section
        raise ValueError(f"not HTML: {error}") from None
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return _ended(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)))


def plain(text: str) -> str:
    """Plain text and Markdown as they are, but for the kinds of newline and of space, and spaces at a line's end."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub("[\u00a0\u2007\u202f]", " ", text)
    return _ended("\n".join(line.rstrip() for line in text.split("\n")))


def _ended(text: str) -> str:
    text = text.strip()
    return text + "\n" if text else ""
