"""Colours and dashes that tell methods apart, and figures that stand on one page."""

import re
from xml.etree import ElementTree

from fedtailor.report.drawing import (
    COLOURS,
    DARK,
    Drawing,
    marker,
    new_figure,
    shared_legend,
    style,
    svg,
)


def drawn(title: str = "A <title>") -> Drawing:
    figure = new_figure(2.0)
    axis = figure.subplots()
    axis.plot([0, 1], [2, 3], marker="o", clip_on=True)
    return Drawing(title, figure, 'What "it" shows & more.')


def test_48_methods_look_different() -> None:
    looks = [tuple(style(index).values()) for index in range(48)]
    assert len(set(looks)) == 48
    assert style(48) == style(0)
    assert len({colour for colour, _ in looks[:12]}) == len(set(DARK)) == 12
    assert len({marker(index) for index in range(6)}) == 6


def test_colours_are_those_of_the_pages_theme() -> None:
    figure = new_figure(2.0)
    figure.subplots().plot([0, 1], [2, 3], **style(1))
    text = svg(Drawing("A", figure, "B."), "one")
    assert "stroke: var(--m1)" in text
    assert not any(colour in text for colour in COLOURS)


def test_ids_of_two_figures_are_apart_and_each_reference_has_one() -> None:
    texts = [svg(drawn(), name) for name in ("one", "two")]
    ids = [re.findall(r'\bid="([^"]*)"', text) for text in texts]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    for text, own in zip(texts, ids, strict=True):
        assert len(own) == len(set(own))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) == set(own)


def test_the_same_figure_gives_the_same_text_with_a_label_in_words() -> None:
    text = svg(drawn(), "one")
    assert text == svg(drawn(), "one")
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'A <title>. What "it" shows & more.'
    assert "Matplotlib" not in text


def test_a_legend_has_as_many_columns_as_fit() -> None:
    for labels, columns in ((["a"] * 4, 4), (["a" * 40] * 4, 2), (["a" * 200] * 3, 1)):
        figure = new_figure(2.0)
        (line,) = figure.subplots().plot([0, 1])
        shared_legend(figure, [line] * len(labels), labels)
        (legend,) = figure.legends
        assert legend._ncols == columns
        assert [text.get_text() for text in legend.get_texts()] == labels
