"""Options of evaluate.py instruct."""

from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import option
from common.checks import integer, number
from evaluation.shared.command_line import MeasureOptions


@attrs.frozen(kw_only=True)
class FineTuneSettings:
    """Fine-tuning hyperparameters. The defaults are those of Raschka's book, which gpjt's comparisons use."""

    # of the order of records, and of dropout
    seed: Annotated[int, option("first seed", "N", check=integer(0))] = 0
    epochs: Annotated[int, option("maximum", "N", check=integer(1))] = 20
    batch_size: Annotated[int, option("records per update", "N", check=integer(1))] = 8
    learning_rate: Annotated[float, option("learning rate, constant", "X", check=number(0, above=True))] = 5e-5
    weight_decay: Annotated[float, option("decay of the weights", "X", check=number(0))] = 0.1
    prompt_loss: Annotated[bool, option("train on the prompt's tokens as well")] = False
    # at most half the context
    longest_answer: Annotated[int, option("maximum tokens of an answer", "N", check=integer(1))] = 256


@attrs.frozen(kw_only=True)
class InstructCommand(MeasureOptions):
    """Fine-tune a copy on instructions, and generate answers to held-out ones."""

    data: Annotated[Path, option("JSON of records: instruction, input, output", "FILE")]
    seeds: Annotated[int, option("number of fine-tunings", "N", check=integer(1))] = 1
    settings: Annotated[FineTuneSettings, Parameter(name="*")] = FineTuneSettings()
    output: Annotated[Path | None, option("directory for answers; default: answers/ of the run", "DIR")] = None
    keep_weights: Annotated[
        Path | None, option("write each fine-tuned model to DIR, as Hugging Face's libraries load it", "DIR")
    ] = None
