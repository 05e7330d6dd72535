"""An epoch meets the rows of several sources by weight, in an order that depends on seed and epoch alone."""

from collections import Counter

import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mixing import Mix, TrainingSampler


def epoch(sampler: TrainingSampler, number: int) -> list[int]:
    sampler.set_epoch(number)
    return list(sampler)


sources = st.lists(
    st.tuples(st.integers(1, 40), st.one_of(st.sampled_from([0.1, 0.5, 1.0, 2.0, 2.5]), st.floats(0.01, 4))), min_size=1, max_size=4
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(sources, st.integers(0, 2**31), st.integers(1, 6))
def test_no_row_repeats_before_all_of_its_source_were_met(sources, seed, epochs):
    mix = Mix([size for size, _ in sources], [weight for _, weight in sources])
    sampler = TrainingSampler(mix, seed=seed, global_batch_size=1)
    met = Counter(row for number in range(epochs) for row in epoch(sampler, number))
    first = 0
    for (size, weight), count in zip(sources, mix.clips, strict=True):
        times = [met[row] for row in range(first, first + size)]
        assert sum(times) == epochs * count == epochs * max(1, round(weight * size))
        assert max(times) - min(times) <= 1
        first += size
    assert sum(met.values()) == epochs * len(sampler)


def test_half_of_a_source_comes_in_one_epoch_and_the_other_half_in_the_next():
    sampler = TrainingSampler(Mix([10, 4], [0.5, 2.5]), seed=1, global_batch_size=1)
    first, second = epoch(sampler, 0), epoch(sampler, 1)
    assert sorted(row for row in first + second if row < 10) == list(range(10))
    assert sorted(Counter(row for row in first if row >= 10).values()) == [2, 2, 3, 3]


def test_the_order_depends_on_seed_and_epoch_alone():
    mix = Mix([20, 20], [1.0, 0.5])
    asked_late = TrainingSampler(mix, seed=3, global_batch_size=1)
    orders = [epoch(TrainingSampler(mix, seed=3, global_batch_size=1), number) for number in range(3)]
    assert epoch(asked_late, 2) == orders[2]
    assert epoch(asked_late, 2) == orders[2]
    assert orders[0] != orders[1] != orders[2]
    assert epoch(TrainingSampler(mix, seed=4, global_batch_size=1), 0) != orders[0]


def batches(mix: Mix, rank: int, world_size: int, *, each: int, number: int, skip: int = 0) -> list[list[int]]:
    """The batches of an epoch on one rank at a global batch of 12, as the trainer makes them."""
    sampler = TrainingSampler(mix, seed=5, global_batch_size=12)
    loader = DataLoader(range(sum(mix.sizes)), batch_size=each, sampler=sampler, collate_fn=list)
    loader = prepare_data_loader(loader, num_processes=world_size, process_index=rank, put_on_device=False)
    loader.set_sampler(sampler)
    loader = skip_first_batches(loader, skip) if skip else loader
    loader.set_epoch(number)
    return list(loader)


SPLITS = [(1, 12), (1, 1), (2, 2), (2, 6), (3, 4), (4, 1), (6, 2)]


@pytest.mark.parametrize("mix", [Mix([12, 9], [0.5, 2.0]), Mix([31], [1.0]), Mix([5], [1.0]), Mix([24], [1.0])], ids=str)
def test_steps_have_the_same_rows_on_any_split_and_a_resumed_epoch_goes_on_where_it_was(mix):
    clips = sum(mix.clips)
    whole = epoch(TrainingSampler(mix, seed=5, global_batch_size=1), 2)
    assert len(whole) == clips
    for world_size, each in SPLITS:
        by_rank = [batches(mix, rank, world_size, each=each, number=2) for rank in range(world_size)]
        shared = [row for step in zip(*by_rank, strict=True) for batch in step for row in batch]
        assert shared[:clips] == whole
        assert len(shared) % 12 == 0 and 0 <= len(shared) - clips < 12
        assert all(row == shared[place % clips] for place, row in enumerate(shared))
        for rank, own in enumerate(by_rank):
            done = len(own) // 2
            assert batches(mix, rank, world_size, each=each, number=2, skip=done) == own[done:]


@given(sources, st.integers(0, 2**31), st.integers(1, 100))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_an_epoch_has_every_row_of_a_plain_set(sources, seed, size):
    mix = Mix([count for count, _ in sources], [1.0] * len(sources))
    sampler = TrainingSampler(mix, seed=seed, global_batch_size=size)
    for number in range(2):
        rows = epoch(sampler, number)
        assert len(rows) == len(sampler) and len(rows) % size == 0
        assert sorted(rows[: sum(mix.sizes)]) == list(range(sum(mix.sizes)))


def test_weights_of_one_are_plain():
    assert Mix([3, 4], [1.0, 1.0]).is_plain and not Mix([3, 4], [1.0, 2.0]).is_plain
