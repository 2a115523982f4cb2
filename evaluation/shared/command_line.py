"""Command-line options that commands of `evaluate.py` share. Importing this is quick: no torch."""

from typing import Annotated, Literal

import attrs

from common.arguments import option
from common.errors import BadInput

MODEL_HELP = "run, checkpoint or model directory, or OWNER/NAME on the hub"
Models = Annotated[tuple[str, ...], option(MODEL_HELP, name="MODEL...", required=True)]
Checkpoint = Annotated[
    str | None, option("checkpoint of a run; default: best where there is one, else latest", "best|latest|NAME")
]
Tokenizer = Annotated[
    str | None, option("default: the tokenizer of the model, or of the run's tokens", "gpt2|bytes|FILE.tiktoken")
]
Device = Annotated[Literal["cuda", "cpu"] | None, option("default: cuda where there is a GPU, else cpu")]


@attrs.frozen(kw_only=True)
class MeasureOptions:
    """Options of a command that measures models; under torchrun the ranks share the work."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    device: Device = None


def check_alone(command: str) -> None:
    """Raise BadInput under torchrun with several processes, as each would do all of the command's work."""
    from training.launch import environment_world_size

    processes = environment_world_size()
    if processes > 1:
        raise BadInput(f"{command}: got {processes} processes of torchrun, wanted one: python evaluate.py {command}")
