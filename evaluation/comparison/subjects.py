"""Subjects of results: two are compared only on the same tokens, items or questions, of a judge in one session."""

import json

from evaluation.comparison.harness_measures import harness_measures, is_task, task_described, task_subject
from evaluation.comparison.measures import MEASURES, Result
from evaluation.shared.intervals import CONFIDENCE


def understood(result: Result) -> bool:
    """Tell whether a result is of a kind that is compared, and whole: an older version's may lack something."""
    measures = [measure for measure in MEASURES if measure.kind == result.get("evaluation")]
    try:
        measures += harness_measures([result])
        for measure in measures:
            _ = subject(result), described(result), measure.read(result, measure.digits)
            if measure.difference is not None:
                measure.difference([result], [result], CONFIDENCE)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return bool(measures)


def subject(result: Result) -> str:
    """Return what tells the subject of a result from others."""
    if is_task(result):
        return task_subject(result)
    match result["evaluation"]:
        case "loss":
            return f"{result['range']['sha256']} {len(result['groups']['nats'])}"
        case "hellaswag":
            lengths = [len(result[style]["hits_norm"]) for style in ("completion", "lm_eval")]
            return f"{result['data']['sha256']} {result['items']} {lengths}"
        case "instruct":
            return f"{result['data']['sha256']} {result['data']['test']}"
        case _:
            return json.dumps([result[key] for key in ("judge", "questions", "orders", "seeds", "differences")])


def described(result: Result) -> str:
    """Return what a result is about, for people."""
    if is_task(result):
        return task_described(result)
    match result["evaluation"]:
        case "loss":
            span = result["range"]
            where, end = span.get("dataset") or span["tokens"], span["start"] + span["count"]
            return (
                f"{span['split']} of {where}, tokens {span['start']:,} to {end:,}; ± is a standard error over documents"
            )
        case "hellaswag":
            return (
                f"acc_norm on {result['items']:,} items of {result['data']['file']}; ± is a standard error over items"
            )
        case "instruct":
            data = result["data"]
            return (
                f"{data['test']} questions of {data['file']}; ± is a standard error over questions, and over "
                "fine-tuning seeds where there are several"
            )
        case _:
            out = left_out(result)
            missing = f", {out:,} prompts of which were left out for all models alike" if out else ""
            count = result["questions"]["count"]
            session = f"{count} questions in one session of {result['judge']}{missing}; 95 % intervals over"
            if decides(result):
                return f"{session} questions and fine-tuning seeds"
            return f"{session} questions only, of one fine-tuning each; instruct --seeds 2 or more tells more"


def decides(result: Result) -> bool:
    """Tell whether intervals of a result cover all that fine-tuning does by chance: a judge's do not, of one seed."""
    return result["evaluation"] != "judge" or result["seeds"] > 1


def left_out(result: Result) -> int:
    """Return how many prompts of a judge's session have no verdict, as where the judge refused; 0 for all else."""
    return int(result.get("left_out") or 0) if result["evaluation"] == "judge" else 0
