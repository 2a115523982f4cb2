"""Web pages from templates in which everything is escaped.

`templates/page.html` is the frame of a page that can be opened offline.
"""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.line_chart import PALETTE

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

ROOT = Path(__file__).parents[1]
# The heat map of tokens (heat.css) has the classes p1 to p8. Each number is the smallest loss in a class: the negative
# log-probability of a token, in nats.
HEAT_NATS = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
HEAT_LEGEND = [(bound, math.exp(-bound)) for bound in HEAT_NATS]  # (nats, probability)


def render(template: str, **values: Any) -> "Markup":
    """Render a template with these values. The template's path is relative to the repository's root.

    The HTML is marked as safe, so that another template includes it without escaping it again.
    """
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
