"""Web pages: templates with everything escaped; `templates/page.html` is the frame of a page that opens offline."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.line_chart import PALETTE

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

ROOT = Path(__file__).parents[1]
# Heat map of tokens (heat.css): least nats, the negative log-probability, of the classes p1 to p8; with probabilities.
HEAT_NATS = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
HEAT_LEGEND = [(bound, math.exp(-bound)) for bound in HEAT_NATS]


def render(template: str, **values: Any) -> "Markup":
    """Return a template, by its path from the root, with these values: HTML that another template takes as it is."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(ROOT), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.globals["palette"] = PALETTE
    return environment
