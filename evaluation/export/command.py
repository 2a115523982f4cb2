"""evaluate.py export"""

from pathlib import Path
from typing import Annotated, Literal

import attrs

from common.arguments import option
from common.errors import BadInput, printable
from evaluation.shared.command_line import MODEL_HELP, Checkpoint, Tokenizer, check_alone


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

    def run(self) -> None:
        """Export a model, and upload it if asked."""
        import torch

        from common.hub_client import check_logged_in, check_names
        from common.installation import keep_logs_only
        from evaluation.export.export import export, push
        from evaluation.shared.load import load, locate

        keep_logs_only()
        check_alone("export")
        if self.private and self.push is None:
            raise BadInput("--private: applies to --push, which is missing")
        check_names(self.push or "owner/name", self.license)
        if self.push is not None:
            check_logged_in()
        trained = load(locate(self.model, self.checkpoint), self.tokenizer, torch.device("cpu"))
        export(trained, self.directory, self.push, self.license, self.dtype)
        print(printable(f"{self.directory}: AutoModelForCausalLM.from_pretrained loads it"))
        if self.push is not None:
            print(push(self.directory, self.push, private=self.private))
