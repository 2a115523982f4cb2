"""Command-line options that commands of `evaluate.py` share. Importing this is quick: no torch."""

from typing import Annotated, Literal

from common.arguments import option
from common.errors import BadInput

TIMEOUT_SECONDS = 3600  # of collectives: how long ranks wait for each other


MODEL_HELP = "run, checkpoint or model directory, or OWNER/NAME on the hub"
Models = Annotated[tuple[str, ...], option(MODEL_HELP, name="MODEL...", required=True)]
Checkpoint = Annotated[
    str | None, option("checkpoint of a run; default: best where there is one, else latest", "best|latest|NAME")
]
Tokenizer = Annotated[
    str | None, option("default: the tokenizer of the model, or of the run's tokens", "gpt2|bytes|FILE.tiktoken")
]
Device = Annotated[Literal["cuda", "cpu"] | None, option("default: cuda where there is a GPU, else cpu")]


def check_alone(command: str) -> None:
    """Raise BadInput under torchrun with several processes, as each would do all of the command's work."""
    from training.launch import environment_world_size

    processes = environment_world_size()
    if processes > 1:
        raise BadInput(f"{command}: got {processes} processes of torchrun, wanted one: python evaluate.py {command}")
