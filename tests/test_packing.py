"""Windows of an epoch: no clip lost or twice, every limit kept, the same on every rank, and nearly full."""

import math
import time
from collections import Counter

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from audio import SAMPLE_RATE, WINDOW_SAMPLES
from mixing import Mix, TrainingSampler
from packing import PAUSE_SAMPLES, Clips, PackedSampler, pack, split

TOKEN_ROOM = 444


def like_speech(count: int, *, weight: float = 1.0, groups: int = 1) -> Clips:
    """Clips of 4.7 s on average, as short read speech has them, with 5 tokens a second."""
    chance = np.random.default_rng(0)
    seconds = chance.gamma(3.5, 4.7 / 3.5, count).clip(0.5, 30)
    return Clips(
        (seconds * SAMPLE_RATE).astype(np.int32),
        (seconds * 5).astype(np.int16) + 1,
        chance.integers(groups, size=count),
        TOKEN_ROOM,
        Mix([count], [weight]),
    )


def epoch(sampler: PackedSampler | TrainingSampler, number: int) -> list:
    sampler.set_epoch(number)
    return list(sampler)


@st.composite
def clip_sets(draw) -> Clips:
    sources = draw(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.5, 1.0, 2.0, 2.5])), min_size=1, max_size=3))
    if draw(st.booleans()):
        sources = [(size, 1.0) for size, _ in sources]
    count = sum(size for size, _ in sources)
    longest, most = draw(st.sampled_from([32_000, 160_000, 240_001, WINDOW_SAMPLES])), draw(st.sampled_from([0, 30, 200, TOKEN_ROOM]))
    samples = draw(st.lists(st.integers(1, longest), min_size=count, max_size=count))
    tokens = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    mix = Mix([size for size, _ in sources], [weight for _, weight in sources])
    return Clips(np.array(samples, np.int32), np.array(tokens, np.int16), np.array(groups, np.int32), TOKEN_ROOM, mix)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(clip_sets(), st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 5))
def test_every_epoch_is_whole_and_holds_its_clips_once_within_all_limits(clips, seed, whole, epochs):
    sampler, chosen = PackedSampler(clips, seed=seed, global_batch_size=whole, epochs=epochs), TrainingSampler(clips.mix, seed=seed, global_batch_size=1)
    for number in range(epochs):
        windows = epoch(sampler, number)
        assert len(windows) == len(sampler) and len(windows) % whole == 0
        clips_of_it = Counter(epoch(chosen, number))
        if clips_of_it.total() >= len(windows):
            assert Counter(row for window in windows for row in window) == clips_of_it
        else:  # too few to fill a global batch without meeting some again
            assert Counter(row for row, in windows[: clips_of_it.total()]) == clips_of_it
        for window in windows:
            rows = list(window)
            assert len({*rows}) == len(rows) > 0
            assert len({*clips.groups[rows].tolist()}) == 1
            assert clips.samples[rows].sum() + (len(rows) - 1) * PAUSE_SAMPLES <= WINDOW_SAMPLES
            assert clips.tokens[rows].sum(dtype=int) <= TOKEN_ROOM


@settings(max_examples=25, derandomize=True, deadline=None)
@given(clip_sets(), st.integers(1, 8), st.integers(1, 60))
def test_a_run_of_so_many_steps_has_room_in_each_of_its_epochs(clips, whole, steps):
    sampler = PackedSampler(clips, seed=1, global_batch_size=whole, epochs=math.inf, windows=steps * whole)
    for number in range(math.ceil(steps * whole / len(sampler))):
        assert len(epoch(sampler, number)) == len(sampler)


def test_windows_depend_on_seed_and_epoch_alone_and_each_epoch_has_its_own():
    sampler = PackedSampler(like_speech(300), seed=3, global_batch_size=4)
    first, second = epoch(sampler, 0), epoch(sampler, 1)
    assert epoch(PackedSampler(like_speech(300), seed=3, global_batch_size=4), 1) == second
    assert epoch(sampler, 0) == first
    pairs = [{frozenset((a, b)) for window in windows for a in window for b in window if a < b} for windows in (first, second)]
    assert len(pairs[0] & pairs[1]) < 0.2 * len(pairs[0])
    assert epoch(PackedSampler(like_speech(300), seed=4, global_batch_size=4), 0) != first


def test_the_longest_clip_of_a_window_is_anywhere_in_it():
    clips = like_speech(2000)
    windows = [window for window in epoch(PackedSampler(clips, seed=0, global_batch_size=1), 0) if len(window) > 1]
    places = [clips.samples[list(window)].argmax() / (len(window) - 1) for window in windows]
    assert sum(places) / len(places) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("groups", [1, 3])
def test_speech_of_4_7_seconds_a_clip_fills_over_nine_tenths_of_the_windows(groups):
    clips = like_speech(6000, groups=groups)
    sampler = PackedSampler(clips, seed=0, global_batch_size=16)
    assert clips.samples.sum(dtype=int) / WINDOW_SAMPLES / len(sampler) > 0.93
    assert sampler.describe().startswith(f"packed: 6,000 clips in {len(sampler):,} windows, 28.")
    assert "hint" not in sampler.describe()


def test_clips_longer_than_half_a_window_are_hinted_at():
    clips = Clips(np.full(9, 300_000, np.int32), np.full(9, 50, np.int16), np.zeros(9, np.int32), TOKEN_ROOM, Mix([9], [1.0]))
    assert "hint: 100% of the clips are longer than half a window" in PackedSampler(clips, seed=0, global_batch_size=2).describe()


def test_texts_with_many_tokens_fill_a_window_before_its_time_is_up():
    clips = Clips(np.full(60, 16_000, np.int32), np.full(60, 111, np.int16), np.zeros(60, np.int32), TOKEN_ROOM, Mix([60], [1.0]))
    assert {len(window) for window in epoch(PackedSampler(clips, seed=0, global_batch_size=5), 0)} == {4}


def test_in_the_order_of_lengths_the_number_of_windows_is_no_matter_of_chance():
    clips = like_speech(500, groups=2)
    counts = {len(pack(clips.sizes, clips.groups, chance=np.random.default_rng(seed), spread=0.0)) for seed in range(20)}
    assert len(counts) == 1


def test_an_epoch_that_would_need_too_many_windows_keeps_closer_to_the_lengths(monkeypatch):
    # Pairs of 14 and 15.8 s: whoever takes them out of their order needs more windows than there are pairs.
    samples = np.array([224_000, 252_800] * 20, np.int32)
    clips = Clips(samples, np.zeros(40, np.int16), np.zeros(40, np.int32), TOKEN_ROOM, Mix([40], [1.0]))
    loose = {len(pack(clips.sizes, clips.groups, chance=np.random.default_rng(seed), spread=0.3)) for seed in range(20)}
    sampler = PackedSampler(clips, seed=0, global_batch_size=1)
    assert max(loose) > len(sampler)
    assert all(len(epoch(sampler, number)) == len(sampler) for number in range(20))


def test_windows_are_halved_until_there_are_enough():
    assert sorted(map(len, split([(1, 2, 3, 4), (5, 6), (7,)], 5))) == [1, 1, 1, 2, 2]
    assert sorted(split([(1, 2), (3,)], 9)) == [(1,), (2,), (3,)]


def batches(clips: Clips, rank: int, world_size: int, *, number: int, skip: int = 0) -> list[list[tuple[int, ...]]]:
    """The batches of an epoch on one rank, as the trainer makes them."""

    class Echo:
        def __len__(self) -> int:
            return len(clips.samples)

        def __getitem__(self, index: tuple[int, ...]) -> tuple[int, ...]:
            return index

    sampler = PackedSampler(clips, seed=5, global_batch_size=2 * world_size, epochs=3)
    loader = DataLoader(Echo(), batch_size=2, sampler=sampler, collate_fn=list)
    loader = prepare_data_loader(loader, num_processes=world_size, process_index=rank, put_on_device=False)
    loader.set_sampler(sampler)
    loader = skip_first_batches(loader, skip) if skip else loader
    loader.set_epoch(number)
    return list(loader)


@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_an_epoch_evenly_and_a_resumed_one_goes_on_where_it_was(world_size, weight):
    clips = like_speech(60, weight=weight)
    by_rank = [batches(clips, rank, world_size, number=2) for rank in range(world_size)]
    assert len({len(own) for own in by_rank}) == 1
    shared = [window for step in zip(*by_rank, strict=True) for batch in step for window in batch]
    assert shared == epoch(PackedSampler(clips, seed=5, global_batch_size=2 * world_size, epochs=3), 2)
    for rank, own in enumerate(by_rank):
        assert batches(clips, rank, world_size, number=2, skip=2) == own[2:]


def test_a_hundred_thousand_clips_are_packed_within_seconds():
    clips, started = like_speech(100_000), time.process_time()
    epoch(PackedSampler(clips, seed=0, global_batch_size=64), 0)
    assert time.process_time() - started < 10
