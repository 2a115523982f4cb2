"""Section of a report's page, as HTML that is already escaped."""

import attrs

COLOURS = 8  # that a page tells apart: .s0 to .s7 of report_page.css


@attrs.frozen(kw_only=True)
class Section:
    """A part of the page between the curves and the cost."""

    title: str
    anchor: str
    html: str
    style: str = ""  # CSS
