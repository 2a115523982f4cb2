"""Templates of a report's page: HTML with everything escaped, CSS and scripts, in `templates/`."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parents[1] / "reporting" / "templates"


def render(template: str, **values: Any) -> str:
    """Return a template with these values."""
    return _environment().get_template(template).render(**values)


def template_text(name: str) -> str:
    """Return a file that has no values, such as CSS."""
    return (TEMPLATES / name).read_text()


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
