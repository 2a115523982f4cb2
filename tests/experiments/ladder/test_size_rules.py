"""Rules of batch and rate."""

from experiments.ladder.ladder_file import scaled_batch, scaled_rate


def test_eight_times_the_weights_have_half_the_rate_and_four_times_the_batch() -> None:
    assert scaled_rate(0.01, 8_000, 1_000) == 0.005
    assert scaled_batch(16, 8_000, 1_000, 4, 1).global_batch_size == 64
    assert scaled_batch(64, 1_000, 8_000, 4, 1).global_batch_size == 16


def test_the_published_set_keeps_to_itself() -> None:
    assert scaled_rate(0.00235, 108_000_000 * 8, 108_000_000) == 0.001175  # OLMo-core


def test_the_own_size_keeps_its_own() -> None:
    assert scaled_rate(0.004, 5, 5) == 0.004
    assert scaled_batch(16, 5, 5, 2, 1).global_batch_size == 16


def test_a_batch_is_whole_micro_batches_and_one_at_least_for_each_rank() -> None:
    for parameters in range(1, 1000, 7):
        for ranks in (1, 2, 3):
            batch = scaled_batch(100, parameters, 1000, 8, ranks)
            count, rest = divmod(batch.global_batch_size, batch.microbatch_size)
            assert rest == 0 and count >= ranks and batch.microbatch_size <= 8
