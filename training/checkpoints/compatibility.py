"""What a run was asked to do: kept beside its metrics and in its checkpoints, compared when it resumes."""

import json
import sys
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.files import replace_file, writing
from tokens.format.token_file import TokenStream
from tokens.prepare.growing_tokens import finished_by
from tokens.tokenizer.tokenizer import RANKS_FILE
from training.checkpoints import directory as checkpoint
from training.config.batch_plan import Plan
from training.config.dataset_config import shares
from training.config.train_config import KEYS, Run
from training.data.open_tokens import TokenDirectory, TokenSet
from training.exactness.fingerprint import drift
from training.hardware.environment import environment, git_commit
from training.parallel.process_group import Ranks

ONE_SOURCE = [[0, [1]]]  # the shares of a run with a single dataset, which older versions do not record
# A change of these would read tokens twice or never after a resume: a step would no longer mean the same windows.
_POSITION_KEYS = ("global_batch_size", "start_train_token", "shuffle", "era_tokens", "random_seed")
_STATE_KEYS = ("optimizer",)  # the moments of one are not those of another


def resolved(run: Run, plan: Plan, token_set: TokenSet) -> dict[str, Any]:
    """Return the resolved configuration as JSON."""
    streams = [_describe(directory, directory.train) for directory in token_set.directories]
    held_out = token_set.validation
    return {
        "model": attrs.asdict(run.model),
        "train": run.train.flat(),
        "global_batch_size": plan.layout.global_batch_size,
        "accumulation": plan.layout.accumulation,
        "world_size": plan.layout.world_size,
        "steps": plan.steps,
        "shares": [[first_step, list(share)] for first_step, share in shares(run.train.data.parts)],
        "sources": plan.read_until(plan.steps),
        "train_stream": streams if len(streams) > 1 else streams[0],
        "validation_stream": _describe(held_out, held_out.validation) if held_out and held_out.validation else None,
        "git_commit": git_commit(),
    }


def write_record(
    run: Run, config: dict[str, Any], token_set: TokenSet, ranks: Ranks, price_per_hour: float | None
) -> None:
    """Write `resolved.json`, and the tokenizer's ranks beside it, so that the run can be read without its tokens.

    Raises BadInput where that cannot be done.
    """
    directories = [str(directory.path.resolve()) for directory in token_set.directories]
    origin, tokenizer = token_set.tokenizer or (None, None)
    record = {
        **config,
        "token_files": directories if len(directories) > 1 else directories[0],
        "tokenizer": tokenizer,
        "environment": environment(ranks.device, ranks.world_size),
        "price_per_hour": price_per_hour,  # of the machine, USD
        "command": sys.argv,
    }
    with writing(run.directory / checkpoint.RESOLVED):
        replace_file(run.directory / checkpoint.RESOLVED, json.dumps(record, indent=2) + "\n")
    if origin is not None and tokenizer is not None and tokenizer["ranks_file"]:
        ranks_of_tokens = (origin / RANKS_FILE).read_text()
        with writing(run.directory / RANKS_FILE):
            replace_file(run.directory / RANKS_FILE, ranks_of_tokens)


def differences(run: Run, before: dict[str, Any], now: dict[str, Any], path: Path) -> list[str]:
    """Return what changed since the checkpoint, a line each. Raises BadInput for what makes it unusable."""
    _refuse_other_mixture(run, before, now, path)
    for key in ("train_stream", "validation_stream"):
        if before.get(key) is not None and now[key] is not None:
            for old, new in zip(listed(before[key]), listed(now[key]), strict=True):
                _refuse_other_tokens(key.removesuffix("_stream"), old, new, path)
    lines = []
    for file, key, old, new in _changed_keys(before, now):
        where = f"{run.directory / file}: {key}"
        if (file == "model.json" and key != "drop_rate") or key in (*_POSITION_KEYS, *_STATE_KEYS):
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
        # what a key means that an older version did not know
        (f"{section}.json", key, before[section].get(key, definition.default), now[section][key])
        for section, keys in KEYS.items()
        for key, definition in keys.items()
        if key != "global_batch_size"
    ]
    # as resolved: a directory without it follows the world size
    pairs.append(("train.json", "global_batch_size", before["global_batch_size"], now["global_batch_size"]))
    return [pair for pair in pairs if pair[2] != pair[3]]


def _describe(directory: TokenDirectory, stream: TokenStream) -> dict[str, Any]:
    """Return what identifies a stream: its length, and each file's sha256 as it was read."""
    names = [file.path.name for file in stream.files if directory.growing is None]
    digests = [directory.contents[name].sha256 for name in names]
    growing = directory.growing
    return {
        "directory": str(directory.path),
        "tokens": None if growing is not None else stream.length,
        "files": names,
        "sha256": digests,
        "plan": finished_by(directory.path) if growing is None else growing.fingerprint,  # what decides every byte
    }


def listed(streams: Any) -> list[dict[str, Any]]:
    """Return streams as a list; a run that reads a single dataset records it without one."""
    return streams if isinstance(streams, list) else [streams]


def _refuse_other_mixture(run: Run, before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise BadInput when samples come from other sources than when the checkpoint was made."""
    old, new = before.get("shares", ONE_SOURCE), now.get("shares", ONE_SOURCE)
    if old != new:
        raise BadInput(
            f"{run.directory / 'train.json'}: dataset: got shares {json.dumps(new)} ([first step, samples of each "
            f"dataset]), but {path} was made with {json.dumps(old)}; set datasets and weights back to resume, or start "
            "anew with --resume never"
        )


def _refuse_other_tokens(split: str, old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Raise BadInput when a stream is not the one that the checkpoint was made with: its windows are others."""
    advice = "name those in train.json, or with --token-files DIR, or start anew with --resume never"
    if None in (old["tokens"], new["tokens"]):  # still being written, then or now
        if old.get("plan") is None or old.get("plan") != new.get("plan"):
            raise BadInput(
                f"{new['directory']}: its {split} tokens are not prepared as those were that {path} was made with; "
                f"{advice}"
            )
        return
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
