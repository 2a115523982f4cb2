"""Command-line options that commands of `evaluate.py` share. Importing this is quick: no torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import attrs

from common.arguments import option
from common.errors import BadInput, printable, printable_lines

if TYPE_CHECKING:
    from evaluation.shared.load import ModelLocation, Trained
    from training.parallel.process_group import Ranks

    Prepared = TypeVar("Prepared")

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


@attrs.frozen(kw_only=True)
class MeasureCommand:
    """Options of a command that measures models; under torchrun the ranks share the work."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    device: Device = None

    def locate_all(self) -> "list[ModelLocation]":
        """Return the models' locations. Raises BadInput."""
        from evaluation.shared.load import locate

        return [locate(model, self.checkpoint) for model in self.models]

    def measure_each(
        self,
        kind: str,
        prepare: "Callable[[list[ModelLocation]], Prepared]",
        measure: "Callable[[Trained, Prepared, Ranks], tuple[dict[str, Any], str]]",
    ) -> None:
        """Measure each model, store its result, and print it.

        `prepare` is called on rank 0, before a model is loaded; `measure` on every rank, with what was prepared. It
        returns the result to store and the text to print after the model's path.
        """
        from evaluation.shared.load import load_on_all
        from evaluation.shared.results import append_result
        from training.parallel.process_group import from_coordinator, meet, stop

        ranks = meet(self.device, TIMEOUT_SECONDS)

        def make() -> "tuple[list[ModelLocation], Prepared]":
            places = self.locate_all()
            return places, prepare(places)

        places, prepared = from_coordinator(ranks, make)
        for place in places:
            values, text = measure(load_on_all(ranks, place, self.tokenizer), prepared, ranks)
            if ranks.coordinates:
                append_result(place.home, place.title, kind, values)
                print(f"{printable(str(place.path))}:{printable_lines(text)}")
        stop()


def check_alone(command: str) -> None:
    """Raise BadInput under torchrun with several processes, as each would do all of the command's work."""
    from training.launch import environment_world_size

    processes = environment_world_size()
    if processes > 1:
        raise BadInput(f"{command}: got {processes} processes of torchrun, wanted one: python evaluate.py {command}")
