"""The best size for a budget has the lowest affordable loss. Outside the ladder's range, there are warnings."""

import attrs
import pytest
from forecast_coverage import BESIROGLU

from experiments.ladder import forecast
from experiments.ladder.forecast import best_sizes, describe_best_sizes, limits_of, size_family
from experiments.ladder.loss_law import LawFit, LossPoint, fit_law
from model.config import ModelConfig
from model.counts import matmul_parameter_count
from tests.conftest import ROOT
from training.config.train_config import load_run
from training.planning.price_list import MACHINES, PriceList, read_machines
from training.planning.throughput import roofline, throughputs

RUN = load_run(ROOT / "runs" / "speedrun-8xh100", [])
LADDER = [
    attrs.evolve(RUN.model, emb_dim=width, n_heads=width // 64, n_layers=width // 64) for width in (256, 512, 768)
]


def fit() -> LawFit:
    points = []
    for model in LADDER:
        size = matmul_parameter_count(model)
        for ratio in (5, 10, 20):
            loss = BESIROGLU(size, ratio * size)
            points.append(LossPoint(rung=str(model.emb_dim), parameters=size, tokens=ratio * size, loss=loss))
    return fit_law(points)


def prices(*names: str) -> PriceList:
    return read_machines(MACHINES, names)


def test_a_family_continues_the_ladders_rule_of_depth_and_width() -> None:
    family = size_family(LADDER)
    measured, continued = ({(model.n_layers, model.emb_dim) for model in models} for models in (LADDER, family))
    assert measured <= continued
    assert all(model.n_layers == model.emb_dim // 64 and model.head_width == 64 for model in family)
    assert family[0].emb_dim == 256 and family[-1].emb_dim > 4 * 768
    sizes = [matmul_parameter_count(model) for model in family]
    assert sizes == sorted(set(sizes))


def test_a_family_keeps_the_proportions_of_its_ladder() -> None:
    model = attrs.evolve(RUN.model, emb_dim=256, n_heads=4, n_kv_heads=2, n_layers=6, mlp_width=640)
    ladder = [model, attrs.evolve(model, emb_dim=512, n_heads=8, n_kv_heads=4, mlp_width=1280)]
    family = size_family(ladder)
    assert ladder[0] in family and ladder[1] in family
    assert all(model.n_layers == 6 and model.n_heads == 2 * model.kv_heads for model in family)
    assert all(model.hidden_width == 2.5 * model.emb_dim for model in family)


@pytest.mark.slow
def test_the_best_size_has_the_lowest_affordable_loss() -> None:
    law, family = fit(), size_family(LADDER)
    [choice] = best_sizes(law, family, RUN, 10, prices("8xh100-80gb"))
    machine = choice.machine
    share = choice.tokens_per_second / roofline(choice.model, machine.gpu)

    def loss(model: ModelConfig) -> float:
        seconds = 3600 * 10 / machine.usd_per_hour - 120  # the start-up takes 120 s
        tokens = int(seconds * share * roofline(model, machine.gpu))
        return law.predict(matmul_parameter_count(model), tokens).value

    assert choice.loss.value == min(map(loss, family)) == loss(choice.model)
    assert choice.hours == pytest.approx(10 / machine.usd_per_hour)
    [large] = best_sizes(law, family, RUN, 100, prices("8xh100-80gb"))
    assert matmul_parameter_count(choice.model) < matmul_parameter_count(large.model)


def test_machines_are_sorted_by_loss_with_speed_sources() -> None:
    list_, family = prices("8xh100-80gb", "8xa100-40gb", "1xrtx4090"), size_family(LADDER)[::5]
    choices = best_sizes(fit(), family, RUN, 10, list_)
    assert len(choices) == 3
    losses = [choice.loss.value for choice in choices]
    assert losses == sorted(losses)
    lines = describe_best_sizes(fit(), family, RUN, 10, list_)
    assert lines[0].startswith("$10.00 ") and "(estimate)" in lines[0]
    assert lines[-1].startswith("estimate: ") and lines[-1].endswith("; expect fewer tokens/s")
    [line] = describe_best_sizes(fit(), LADDER, RUN, 0.01, list_)
    assert line.startswith("$0.01: not enough for the start-up")


def test_all_shapes_have_the_targets_share_of_the_roofline() -> None:
    gpt2 = load_run(ROOT / "runs" / "8xh100", [])
    speed = throughputs(gpt2.model, (list_ := prices("8xh100-80gb")).machines[0])[0]
    [choice] = best_sizes(fit(), [gpt2.model], gpt2, 10, list_)
    assert choice.tokens_per_second == pytest.approx(speed.tokens_per_second)
    assert choice.source == "roofline x 0.16, measured by gpjt/ddp-base-model-from-scratch"


def test_choices_at_an_edge_have_warnings() -> None:
    family, machines = size_family(LADDER)[::5], prices("8xh100-80gb")
    [far] = best_sizes(fit(), family, RUN, 5000, machines)
    assert "intervals were tested up to 30 x" in "\n".join(limits_of(far, fit(), family, RUN))
    [edge] = best_sizes(fit(), LADDER, RUN, 50, machines)
    limits = "\n".join(limits_of(edge, fit(), LADDER, RUN))
    assert edge.model == LADDER[-1] and "a larger size may be better" in limits
    assert "tokens per parameter, but the ladder has 5 to 20" in limits


def test_choices_use_only_available_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines, thrice = prices("8xh100-80gb"), attrs.evolve(RUN, train=RUN.train.replace(max_epochs=3))
    [free] = best_sizes(fit(), LADDER, RUN, 40, machines)
    assert "the dataset is not here, so its number of tokens is unknown" in limits_of(free, fit(), LADDER, RUN)[-1]
    monkeypatch.setattr(forecast, "lengths_at_hand", lambda *_: {"fineweb": 10**9})
    [choice] = best_sizes(fit(), LADDER, thrice, 40, machines)
    assert choice.tokens == 3 * 10**9 < free.tokens and choice.hours < free.hours
    assert "uses all available tokens in max_epochs epochs" in limits_of(choice, fit(), LADDER, thrice)[-1]
