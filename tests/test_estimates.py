"""What a run needs is estimated before it starts, and told when the machine has less."""

from types import SimpleNamespace

import pytest

import estimates
from device import Place
from estimates import find_shared_memory_shortage

RUN = dict(do_train=True, per_device_train_batch_size=16, per_device_eval_batch_size=8, dataloader_num_workers=4, dataloader_prefetch_factor=None)


@pytest.fixture
def shortage(monkeypatch):
    """A function that gives the warning for so many bytes of free shared memory, four ranks, and changes of the arguments."""

    def find(free: int, *, mel_bins: int = 80, **changes) -> str:
        monkeypatch.setattr(estimates.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return find_shared_memory_shortage(SimpleNamespace(**RUN | changes), mel_bins=mel_bins, place=Place("cpu", local_world_size=4))

    return find


def test_four_ranks_with_four_workers_do_not_fit_a_containers_64_mb(shortage):
    line = shortage(64 * 10**6)
    assert "may need 492 MB of /dev/shm, 64 MB are free" in line
    assert "--training.dataloader_num_workers" in line and "--shm-size" in line and len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("needed", "changes"),
    [
        (16 * 960_000 * 4 * 2 * 4, {}),
        (16 * 1_536_000 * 4 * 2 * 4, {"mel_bins": 128}),
        (32 * 960_000 * 4 * 2 * 4, {"per_device_eval_batch_size": 32}),
        (8 * 960_000 * 4 * 2 * 4, {"do_train": False}),
        (16 * 960_000 * 4 * 5 * 4, {"dataloader_prefetch_factor": 5}),
        (0, {"dataloader_num_workers": 0}),
    ],
)
def test_nothing_is_said_while_everything_fits_to_the_byte(shortage, needed, changes):
    assert shortage(needed, **changes) == ""
    assert needed == 0 or shortage(needed - 1, **changes).startswith("warning: ")


def test_a_machine_without_that_mount_is_told_nothing(monkeypatch):
    monkeypatch.setattr(estimates, "SHARED_MEMORY", "/nowhere")
    assert find_shared_memory_shortage(SimpleNamespace(**RUN), mel_bins=80, place=Place("cpu")) == ""
