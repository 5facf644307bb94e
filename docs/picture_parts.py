"""Draws the picture of a method's round, for `method_pictures.py`.

It shows the server above, one client below, what travels between them, and what stays where it is.
Pictures are plain SVG. They are as wide as a page on a telephone, where text is 12 pixels high.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, MARGIN, PADDING = 344, 4, 8
INK, GREY = "#1f2937", "#6b7280"
# fill, line and meaning of what is shared, private, frozen, or kept at the server
COLOURS = {
    "shared": ("#dbeafe", "#1d4ed8", "travels"),
    "private": ("#ffedd5", "#c2410c", "stays with the client"),
    "server": ("#dcfce7", "#15803d", "stays at the server"),
    "frozen": ("#e5e7eb", "#6b7280", "is not trained"),
}
Chips = Sequence[tuple[str, str]]  # (text, a key of COLOURS)
Panel = Callable[[float, float], tuple[str, float]]  # (left, top) -> (SVG, height)


@dataclass(frozen=True)
class Picture:
    """What a picture says: the server's and the client's parts, and what goes down and up."""

    server: Chips
    down: str
    up: str
    client: Chips
    does: str  # in a round, at the client
    aggregates: str = "averages what clients send, by their examples"
    use: str = ""  # before the client uses its model
    server_panel: Panel | None = None
    client_panel: Panel | None = None


def text(x: float, y: float, words: str, size: float = 13, more: str = "") -> str:
    """A line of text; ``a_b`` has b as a subscript of one letter or more."""
    line = re.sub(
        r"_(\w+)",
        lambda m: f'<tspan dy="3" font-size="12">{m[1]}</tspan><tspan dy="-3">&#8203;</tspan>',
        escape(words),
    )
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" {more}>{line}</text>'


def rect(x: float, y: float, w: float, h: float, kind: str, radius: float = 5) -> str:
    """A box in the colours of ``kind``; a private one has a dashed line."""
    fill, line, _ = COLOURS[kind]
    dashes = ' stroke-dasharray="5 3"' if kind == "private" else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{line}" stroke-width="1.5"{dashes}/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float, kind: str = "", thick: float = 2) -> str:
    """A straight arrow, in the line colour of ``kind``."""
    colour = COLOURS[kind][1] if kind else INK
    length = math.hypot(to_x - x, to_y - y)
    u, v = (to_x - x) / length, (to_y - y) / length
    end_x, end_y = to_x - 8 * u, to_y - 8 * v
    head = [(to_x, to_y), (end_x - 4.5 * v, end_y + 4.5 * u), (end_x + 4.5 * v, end_y - 4.5 * u)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in head)
    return (
        f'<path d="M{x:g} {y:g}L{end_x:.1f} {end_y:.1f}" stroke="{colour}" stroke-width="{thick:g}"'
        f'/><polygon points="{points}" fill="{colour}"/>'
    )


def lock(x: float, y: float) -> str:
    """A padlock of 9 x 12."""
    line = COLOURS["private"][1]
    return (
        f'<path d="M{x + 2:g} {y + 5:g}v-2a2.5 2.5 0 0 1 5 0v2" fill="none" stroke="{line}" '
        f'stroke-width="1.5"/><rect x="{x:g}" y="{y + 5:g}" width="9" height="7" rx="1.5" '
        f'fill="{line}"/>'
    )


def cell(x: float, y: float, w: float, h: float, used: bool) -> str:
    """A part of a weight, which is used and sent, or left out."""
    fill, dashes = (COLOURS["shared"][0], "") if used else ("#ffffff", ' stroke-dasharray="3 3"')
    line = COLOURS["shared" if used else "frozen"][1]
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" '
        f'stroke="{line}"{dashes}/>'
    )


def width_of(words: str, size: float = 13) -> float:
    """About how wide a line of text is."""
    return 0.53 * size * len(words.replace("_", ""))


def lines(words: str, width: float) -> list[str]:
    """``words`` in lines of at most ``width``."""
    return textwrap.wrap(words, int(width / width_of("x")), break_long_words=False)


def chip(x: float, y: float, words: str, kind: str, width: float | None = None) -> str:
    """A box with a text in it, 26 high, and a lock if it is private."""
    left = 15 if kind == "private" else 0
    wide = chip_width(words, kind) if width is None else width
    middle = text(x + (wide + left) / 2, y + 17.5, words, 13, 'text-anchor="middle"')
    return rect(x, y, wide, 26, kind) + (lock(x + 7, y + 6) if left else "") + middle


def chip_width(words: str, kind: str) -> float:
    """How wide a `chip` is that fits its text."""
    return width_of(words) + 20 + (15 if kind == "private" else 0)


def chips(x: float, y: float, given: Chips, width: float) -> tuple[str, float]:
    """Rows of chips in ``width``; the height is that of all rows."""
    drawn, at, top = "", x, y
    for words, kind in given:
        wide = chip_width(words, kind)
        if at > x and at + wide > x + width:
            at, top = x, top + 32
        drawn += chip(at, top, words, kind)
        at += wide + 8
    return drawn, top + 26 - y if given else 0.0


def box(y: float, title: str, says: str, given: Chips, panel: Panel | None) -> tuple[str, float]:
    """The server or the client: a title, what it does, chips, and what ``panel`` draws."""
    left, width = MARGIN + PADDING, WIDTH - 2 * (MARGIN + PADDING)
    drawn, at = text(left, y + 21, title, 15, 'font-weight="bold"'), y + 26
    for line in lines(says, width):
        at += 17
        drawn += text(left, at, line)
    at += 10
    for draw in (lambda x, y: chips(x, y, given, width), panel):
        if draw is not None:
            parts, height = draw(left, at)
            drawn, at = drawn + parts, at + height + (8 if height else 0)
    height = at + 4 - y
    outline = (
        f'<rect x="{MARGIN}" y="{y:g}" width="{WIDTH - 2 * MARGIN}" height="{height:g}" rx="8" '
        f'fill="#f9fafb" stroke="{GREY}"/>'
    )
    return outline + drawn, height


def travels(y: float, down: str, up: str) -> tuple[str, float]:
    """The arrows down and up, each with what travels."""
    if not down and not up:
        words = "nothing travels"
        return text(WIDTH / 2, y + 26, words, 13, f'text-anchor="middle" fill="{GREY}"'), 42
    half = WIDTH / 2 - 34
    sides = [lines(down, half), lines(up, half)]
    height = max(58.0, 22 + 17 * (1 + max(map(len, sides))))
    drawn = ""
    for x, title, side in [(18, "down", sides[0]), (WIDTH / 2 + 14, "up", sides[1])]:
        ends = (y + 6, y + height - 8) if title == "down" else (y + height - 6, y + 8)
        drawn += arrow(x, ends[0], x, ends[1], "shared")
        drawn += text(x + 12, y + 22, title, 13, 'font-weight="bold"')
        for at, line in enumerate(side):
            drawn += text(x + 12, y + 39 + 17 * at, line)
    return drawn, height


def legend(y: float, kinds: Sequence[str]) -> tuple[str, float]:
    """What the colours mean."""
    drawn, x, top = "", float(MARGIN + PADDING), y
    for kind in kinds:
        words = COLOURS[kind][2]
        wide = 20 + width_of(words, 12) + 8
        if x > MARGIN + PADDING and x + wide > WIDTH - MARGIN:
            x, top = MARGIN + PADDING, top + 20
        drawn += rect(x, top + 2, 14, 12, kind, 3) + text(x + 20, top + 13, words, 12)
        x += wide
    return drawn, top + 20 - y


def draw(picture: Picture, title: str) -> str:
    """The picture as an SVG file's text."""
    y, drawn = float(MARGIN), ""
    server, client = picture.server_panel, picture.client_panel
    does = f"{picture.does}. {picture.use}".removesuffix(" ").removesuffix(".") + "."
    for part in (
        lambda y: box(y, "Server", f"{picture.aggregates}.", picture.server, server),
        lambda y: travels(y, picture.down, picture.up),
        lambda y: box(y, "Each client", does, picture.client, client),
    ):
        parts, height = part(y)
        drawn, y = drawn + parts, y + height
    used = [kind for kind in COLOURS if f'fill="{COLOURS[kind][0]}"' in drawn]
    parts, height = legend(y + 8, used)
    y += 8 + height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + MARGIN:g}" '
        f'width="{WIDTH}" height="{y + MARGIN:g}" font-family="system-ui, sans-serif" '
        f'fill="{INK}" role="img"><title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{y + MARGIN:g}" rx="12" fill="#ffffff"/>\n'
        + (drawn + parts).replace("><", ">\n<")
        + "\n</svg>\n"
    )


def block_of_fedsdg(x: float, y: float) -> tuple[str, float]:
    """A transformer block's projection with its two branches and the gate."""
    rows = [
        ("frozen", "frozen weights"),
        ("shared", "shared branch"),
        ("private", "private branch"),
    ]
    drawn = text(x, y + 13, "In each transformer block:", 13, 'font-weight="bold"')
    drawn += text(x, y + 75, "x", 15)
    for number, (kind, words) in enumerate(rows):
        top = y + 24 + 40 * number
        drawn += arrow(x + 12, y + 70, x + 32, top + 15)
        drawn += chip(x + 34, top, words, kind, 136)
        if kind != "private":
            drawn += arrow(x + 170, top + 13, x + 256, y + 66 + 6 * (number - 1))
    drawn += arrow(x + 170, y + 117, x + 194, y + 117, "private")
    drawn += (
        f'<circle cx="{x + 209:g}" cy="{y + 117:g}" r="15" fill="{COLOURS["private"][0]}" '
        f'stroke="{COLOURS["private"][1]}" stroke-width="1.5" stroke-dasharray="5 3"/>'
    )
    drawn += text(x + 209, y + 121, "m_l", 14, 'text-anchor="middle"')
    drawn += text(x + 209, y + 148, "gate", 12, 'text-anchor="middle"')
    drawn += arrow(x + 219, y + 106, x + 258, y + 79, "private")
    drawn += f'<circle cx="{x + 268:g}" cy="{y + 70:g}" r="11" fill="#ffffff" stroke="{INK}"/>'
    drawn += text(x + 268, y + 75, "+", 15, 'text-anchor="middle"')
    drawn += arrow(x + 279, y + 70, x + 302, y + 70) + text(x + 307, y + 75, "y", 15)
    return drawn, 152


CLUSTERS = ("#7c3aed", "#0d9488", "#db2777")


def clusters_of_fedhft(x: float, y: float) -> tuple[str, float]:
    """The server's adapters, one a cluster."""
    drawn = chip(x, y + 34, "assignments of clients to clusters", "server", 316)
    for number, colour in enumerate(CLUSTERS):
        left = x + 108 * number
        drawn += rect(left, y, 100, 26, "shared")
        drawn += f'<circle cx="{left + 16:g}" cy="{y + 13:g}" r="6" fill="{colour}"/>'
        drawn += text(left + 30, y + 17.5, f"cluster {number + 1}")
    return drawn, 60


def rows_of_fedhft(x: float, y: float) -> tuple[str, float]:
    """A client's mixture of the clusters' adapters, and the rows of its update that it sends."""
    drawn, at = text(x, y + 13, "its mixture"), x
    for share, colour in zip((0.7, 0.2, 0.1), CLUSTERS, strict=True):
        drawn += (
            f'<rect x="{at:g}" y="{y + 22:g}" width="{120 * share:g}" height="18" fill="{colour}"/>'
        )
        at += 120 * share
    drawn += text(x, y + 58, "of the three adapters", 12)
    drawn += text(x + 132, y + 36, "+", 18)
    left = x + 154
    drawn += text(left, y + 13, "its update, row by row")
    for row, sent in enumerate([True, False, True, True, False, False]):
        drawn += cell(left, y + 22 + 13 * row, 70, 10, sent)
    drawn += text(left + 78, y + 45, "solid: sent", 12)
    drawn += text(left + 78, y + 63, "dashed: least", 12)
    drawn += text(left + 78, y + 79, "important, cut", 12)
    return drawn, 102


def blocks_of_pfedgate(x: float, y: float) -> tuple[str, float]:
    """The gating layer picks blocks of every layer within the budget."""
    drawn = chip(x, y + 30, "gating layer", "private", 116)
    drawn += text(x + 8, y + 16, "a batch") + arrow(x + 30, y + 19, x + 30, y + 30)
    drawn += text(x, y + 76, "budget s = 0.5:", 12) + text(x, y + 92, "half of the weights", 12)
    used = [(1, 1, 0, 1, 0), (1, 0, 1, 0, 0), (1, 0, 0, 1, 1)]
    for row, flags in enumerate(used):
        top = y + 6 + 30 * row
        drawn += arrow(x + 116, y + 43, x + 140, top + 11, "private")
        for column, flag in enumerate(flags):
            drawn += cell(x + 144 + 24 * column, top, 21, 22, bool(flag))
        drawn += text(x + 268, top + 16, f"layer {row + 1}", 12)
    drawn += text(x + 144, y + 112, "solid: used and sent", 12)
    return drawn, 118


def copies_of_fedsq(x: float, y: float) -> tuple[str, float]:
    """The structural copy's activation pattern is imposed on the quantitative copy."""
    drawn = text(x, y + 64, "x", 15)
    drawn += arrow(x + 12, y + 54, x + 30, y + 30) + arrow(x + 12, y + 64, x + 30, y + 88)
    copies = [("frozen", 8, "structural copy", "as pretrained"),
              ("shared", 68, "quantitative copy", "trained")]  # fmt: skip
    for kind, top, words, more in copies:
        drawn += rect(x + 32, y + top, 128, 44, kind)
        drawn += text(x + 96, y + top + 19, words, 13, 'text-anchor="middle"')
        drawn += text(x + 96, y + top + 36, more, 12, 'text-anchor="middle"')
    drawn += arrow(x + 160, y + 30, x + 186, y + 30)
    for at, bit in enumerate("1011"):
        left = x + 190 + 22 * at
        drawn += f'<rect x="{left:g}" y="{y + 20:g}" width="20" height="20" fill="#ffffff" '
        drawn += f'stroke="{GREY}"/>' + text(left + 10, y + 35, bit, 13, 'text-anchor="middle"')
    drawn += text(x + 282, y + 35, "mask", 12)
    drawn += arrow(x + 233, y + 42, x + 233, y + 76)
    drawn += arrow(x + 160, y + 90, x + 218, y + 90, "shared")
    drawn += f'<circle cx="{x + 233:g}" cy="{y + 90:g}" r="13" fill="#ffffff" stroke="{INK}"/>'
    drawn += text(x + 233, y + 95, "×", 15, 'text-anchor="middle"')
    drawn += arrow(x + 247, y + 90, x + 272, y + 90) + text(x + 276, y + 95, "output", 12)
    return drawn, 116


def models_of_fedmerge(x: float, y: float) -> tuple[str, float]:
    """The server's models, merged by a client's weights."""
    drawn = ""
    for number, weight in enumerate((0.6, 0.25, 0.05, 0.1)):
        left = x + 80 * number
        drawn += chip(left, y, f"model {number + 1}", "server", 74)
        drawn += arrow(left + 37, y + 27, x + 110 + 33 * number, y + 77, "server", 1 + 5 * weight)
        drawn += text(left + (4 if number < 2 else 44), y + 47, f"{weight:g}", 12)
    drawn += chip(x + 80, y + 79, "the client's merge", "shared", 160)
    return drawn, 105
