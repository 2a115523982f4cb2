"""What a run was asked to do: kept beside its metrics and in its checkpoints, compared when it resumes."""

import json
import sys
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from files import replace_file
from tokens.token_file import TokenStream
from tokens.tokenizer import RANKS_FILE
from training import checkpoint
from training.config import Run
from training.hardware import environment, git_commit
from training.numerics import drift
from training.plan import Plan
from training.ranks import Ranks
from training.token_set import TokenSet

# A change of these would read tokens twice or never after a resume: a step would no longer mean the same windows.
_POSITION_KEYS = ("global_batch_size", "start_train_token", "shuffle", "random_seed")


def resolved(run: Run, plan: Plan, token_set: TokenSet) -> dict[str, Any]:
    """Return the resolved configuration as JSON."""
    return {
        "model": attrs.asdict(run.model),
        "train": attrs.asdict(run.train),
        "global_batch_size": plan.layout.global_batch_size,
        "accumulation": plan.layout.accumulation,
        "world_size": plan.layout.world_size,
        "steps": plan.steps,
        "train_stream": _describe(token_set, token_set.train),
        "validation_stream": None if token_set.validation is None else _describe(token_set, token_set.validation),
        "git_commit": git_commit(),
    }


def write_record(run: Run, config: dict[str, Any], token_set: TokenSet, ranks: Ranks) -> None:
    """Write `resolved.json`, and the tokenizer's ranks beside it, so that the run can be read without its tokens.

    Raises BadInput where that cannot be done.
    """
    record = {
        **config,
        "token_files": str(token_set.directory.resolve()),
        "tokenizer": token_set.tokenizer,
        "environment": environment(ranks),
        "command": sys.argv,
    }
    try:
        replace_file(run.directory / checkpoint.RESOLVED, json.dumps(record, indent=2) + "\n")
        if (token_set.tokenizer or {}).get("ranks_file"):
            replace_file(run.directory / RANKS_FILE, (token_set.directory / RANKS_FILE).read_text())
    except OSError as error:
        raise BadInput(
            f"{run.directory}: cannot be written: {error}; make room and run the same command again"
        ) from error


def differences(run: Run, before: dict[str, Any], now: dict[str, Any], path: Path) -> list[str]:
    """Return what changed since the checkpoint, a line each. Raises BadInput for what makes it unusable."""
    for key in ("train_stream", "validation_stream"):
        if before.get(key) is not None and now[key] is not None:
            _refuse_other_tokens(key.removesuffix("_stream"), before[key], now[key], path)
    lines = []
    for file, key, old, new in _changed_keys(before, now):
        where = f"{run.directory / file}: {key}"
        if (file == "model.json" and key != "drop_rate") or key in _POSITION_KEYS:
            raise BadInput(
                f"{where}: got {json.dumps(new)}, but {path} was made with {json.dumps(old)}; set it back to resume, "
                "or start anew with --resume never"
            )
        lines.append(f"NOTE: {where} was {json.dumps(old)} at {path.name} and is {json.dumps(new)} now")
    return lines


def numerics_drift(before: dict[str, Any], now: dict[str, Any], path: Path, *, allowed: bool) -> list[str]:
    """Return how the numerics changed since the checkpoint.

    Raises BadInput when that breaks what `determinism` promises and is not allowed.
    """
    changes = drift(before["numerics"], now["numerics"])
    promised = {before["numerics"]["determinism"], now["numerics"]["determinism"]} - {"off"}
    if changes and promised and not allowed:
        raise BadInput(
            f"{path}: made with other numerics ({'; '.join(changes)}), so the run would not continue to the bit; "
            "set them back, or pass --allow-numerics-drift, which the metrics will show"
        )
    return changes


def _changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Return (file, key, old, new) of each difference between two resolved configurations."""
    pairs = [
        (f"{section}.json", key, before[section].get(key), value)
        for section in ("model", "train")
        for key, value in now[section].items()
        if key != "global_batch_size"
    ]
    # as resolved: a directory without it follows the world size
    pairs.append(("train.json", "global_batch_size", before["global_batch_size"], now["global_batch_size"]))
    return [pair for pair in pairs if pair[2] != pair[3]]


def _describe(token_set: TokenSet, stream: TokenStream) -> dict[str, Any]:
    """Return what identifies a stream: its length, and each file's sha256 as it was read."""
    names = [file.path.name for file in stream.files]
    digests = [token_set.contents[name].sha256 for name in names]
    return {"directory": str(token_set.directory), "tokens": stream.length, "files": names, "sha256": digests}


def _refuse_other_tokens(split: str, old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Raise BadInput when a stream is not the one that the checkpoint was made with: its windows are others."""
    advice = "pass those with --token-files DIR, or start anew with --resume never"
    if old["tokens"] != new["tokens"]:
        raise BadInput(
            f"{new['directory']}: its {new['tokens']:,} {split} tokens are not the {old['tokens']:,} that {path} was "
            f"made with; {advice}"
        )
    if len(old["sha256"]) != len(new["sha256"]):
        raise BadInput(
            f"{new['directory']}: its {split} tokens are cut into other files than those that {path} was made with; "
            f"{advice}"
        )
    for name, before, now in zip(new["files"], old["sha256"], new["sha256"], strict=True):
        if before not in (None, now):  # None: written when a file without a manifest was not read through
            raise BadInput(
                f"{Path(new['directory']) / name}: damaged, or another file than the one that {path} was made with: "
                f"got sha256 {now[:12]}..., wanted {before[:12]}...; {advice}"
            )
