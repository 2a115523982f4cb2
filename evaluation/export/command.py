"""Options of evaluate.py export."""

from pathlib import Path
from typing import Annotated, Literal

import attrs

from common.arguments import option
from evaluation.command_line import MODEL_HELP, Checkpoint, Tokenizer


@attrs.frozen(kw_only=True)
class ExportCommand:
    """Export a model to a directory that Hugging Face's libraries load as a class of their own."""

    model: Annotated[str, option(MODEL_HELP, name="MODEL")] = attrs.field(kw_only=False)
    directory: Annotated[Path, option("output directory; must not exist yet, or be empty", name="DIR")] = attrs.field(
        kw_only=False
    )
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    dtype: Annotated[Literal["float32", "bfloat16"], option("precision of the weights")] = "float32"
    push: Annotated[str | None, option("upload to the hub as well", "OWNER/NAME")] = None
    private: Annotated[bool, option("create a private repository")] = False
    license: Annotated[str | None, option("license identifier for the model card, such as mit", "NAME")] = None
