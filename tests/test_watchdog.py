"""The watchdog: who is late, what is no stall, and what it costs."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch.distributed as dist

from device import Place
from faults import Progress
from launching import ROOT
from stopping import StopRequest
from watchdog import Collective, Sign, Watchdog, describe_stall, find_late


def ranks(signs: list[Sign]) -> list[int]:
    return [sign.rank for sign in signs]


def test_the_rank_behind_the_others_is_late_and_they_wait_for_it():
    signs = [Sign(0, "backward", 7, beats=12, silent=70), Sign(1, "forward", 7, beats=11, silent=71), Sign(2, "backward", 7, beats=12, silent=70)]
    late = find_late(signs, 60)
    assert ranks(late) == [1]
    line = describe_stall(late, signs, limit=60, clips="train.jsonl:4 (a.wav)")
    assert line == "stalled: rank 1 has made no progress for 71 s (phase forward, step 7, train.jsonl:4 (a.wav)); ranks 0, 2 wait for it"


def test_at_one_place_the_rank_that_has_entered_fewer_collectives_is_late():
    signs = [Sign(0, beats=12, collectives=31, silent=70), Sign(1, beats=12, collectives=30, silent=70)]
    assert ranks(find_late(signs, 60)) == [1]


def test_ranks_that_stand_still_together_are_told_together():
    signs = [Sign(rank, "forward", 1, beats=3, silent=61) for rank in (0, 1)]
    assert describe_stall(find_late(signs, 60), signs, limit=60, clips="") == "stalled: ranks 0, 1 have made no progress for 61 s (phase forward, step 1)"


def test_a_rank_that_tells_nothing_is_late_wherever_the_others_are():
    signs = [Sign(0, "evaluate", 3, beats=40), Sign(1, "evaluate", 3, beats=40, unheard=61)]
    assert ranks(find_late(signs, 60)) == [1]
    assert "rank 1 has not answered for 61 s (last told: phase evaluate, step 3); rank 0 waits for it" in describe_stall(
        find_late(signs, 60), signs, limit=60, clips=""
    )


@pytest.mark.parametrize(
    "signs",
    [
        pytest.param([Sign(0, beats=5, silent=59)], id="not for long enough"),
        pytest.param([Sign(0, beats=9, silent=300), Sign(1, beats=5, silent=1)], id="the rank that is behind still works"),
        pytest.param([Sign(0, beats=5, silent=300), Sign(1, beats=5, silent=1)], id="one of those at the same place still works"),
        pytest.param([Sign(0, beats=5, silent=1), Sign(1, beats=2, silent=300, waits=True)], id="it waits for the main process, which works"),
        pytest.param([Sign(0, beats=9, silent=1), Sign(1, beats=9, silent=300, unheard=300, left=True)], id="it has left at a good end"),
    ],
)
def test_work_is_no_stall(signs):
    assert find_late(signs, 60) == []


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Starts watchdogs of a job in this process, a rank each, over one store; gives the messages with which ranks were ended."""
    left, dogs = {}, []
    monkeypatch.setattr(Watchdog, "_leave", lambda dog, message: (left.setdefault(dog.place.rank, message), dog._done.set()))
    monkeypatch.setattr("watchdog._SECONDS_FOR_REPORTS", 1)

    def begin(progresses: list[Progress], *, limit: float) -> dict[int, str]:
        store = dist.HashStore()
        for rank, progress in enumerate(progresses):
            place = Place("cpu", rank=rank, world_size=len(progresses))
            dog = Watchdog(progress, StopRequest(), place, store=store if len(progresses) > 1 else None, limit=limit, folder=tmp_path)
            dogs.append(dog)
            dog.start()
        return left

    yield begin
    for dog in dogs:
        dog._done.set()
        dog.join()


def wait_for(condition, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_stall_of_one_process_is_ended_with_its_stacks_and_clips(watch, tmp_path):
    progress = Progress()
    progress.clips = lambda: "train.jsonl:4 (a.wav)"
    progress.beat("forward")
    left = watch([progress], limit=0.3)
    assert wait_for(lambda: left)
    assert left[0].startswith("stalled: rank 0 has made no progress for 0 s (phase forward, step 0, train.jsonl:4 (a.wav))")
    report = (tmp_path / "stall_report.txt").read_text()
    assert "thread MainThread:" in report and "test_a_stall_of_one_process" in report and "train.jsonl:4" in report


def test_all_ranks_report_a_stall_and_name_the_same_one(watch, tmp_path):
    ahead, behind = Progress(), Progress()
    ahead.beat("forward"), behind.beat("forward"), ahead.beat("backward")
    left = watch([ahead, behind], limit=0.5)
    assert wait_for(lambda: len(left) == 2)
    assert all("rank 1 has made no progress" in message and "rank 0 waits for it" in message for message in left.values())
    report = (tmp_path / "stall_report.txt").read_text()
    assert report.count("thread MainThread:") == 2 and "rank 0 (process" in report and "rank 1 (process" in report


def test_a_rank_that_beats_is_left_alone(watch):
    progress = Progress()
    left = watch([progress], limit=0.5)
    for _ in range(60):
        progress.beat()
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize("patient", [True, False])
def test_processor_time_counts_as_life_in_patient_work_alone(watch, patient):
    progress = Progress()
    progress.patient = int(patient)
    left = watch([progress], limit=1.0)
    end = time.monotonic() + 3
    while time.monotonic() < end and not left:
        sum(range(1000))
    assert bool(left) is not patient


def test_patient_work_that_does_nothing_is_a_stall():
    # In a process of its own: this one has other threads and children, whose work would count.
    code = """
    import threading, time
    from pathlib import Path
    from device import Place
    from faults import Progress
    from stopping import StopRequest
    from watchdog import Watchdog
    progress = Progress()
    progress.patient = 1
    Watchdog(progress, StopRequest(), Place("cpu"), store=None, limit=2.0, folder=Path(".")).start()
    Watchdog._write_report = lambda dog, text: ""
    time.sleep(30)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.startswith("stalled: rank 0 has made no progress for ")


def test_the_work_of_child_processes_counts_as_life_of_patient_work(watch):
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        progress = Progress()
        progress.patient = 1
        left = watch([progress], limit=1.0)
        time.sleep(3)
        assert not left
    finally:
        child.kill()
        child.wait()


def test_a_failure_of_one_rank_ends_the_others_with_its_message(watch, monkeypatch):
    monkeypatch.setattr("watchdog.SECONDS_AFTER_A_FAILURE", 0.1)
    store, left = dist.HashStore(), {}
    monkeypatch.setattr(Watchdog, "_leave", lambda dog, message: (left.setdefault(dog.place.rank, message), dog._done.set()))
    places = [Place("cpu", rank=rank, world_size=2) for rank in (0, 1)]
    failing, other = (Watchdog(Progress(), StopRequest(), place, store=store, limit=60, folder=None) for place in places)
    other.period = 0.05
    other.start()
    assert failing.tell_failure("rank 0, phase load, step 0: ValueError: first") == "rank 0, phase load, step 0: ValueError: first"
    assert wait_for(lambda: left)
    assert left == {1: "rank 0, phase load, step 0: ValueError: first"}
    assert other.tell_failure("rank 1: later") == "rank 0, phase load, step 0: ValueError: first"
    other.join()


def fail(*words: object, **more: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("status", [0, 1])
def test_a_stop_that_cannot_be_told_or_written_ends_the_process_all_the_same(tmp_path, monkeypatch, status):
    exits, stop = [], StopRequest()
    dog = Watchdog(Progress(), stop, Place("cpu"), store=None, limit=60, folder=tmp_path)
    monkeypatch.setattr("watchdog.print", fail, raising=False)  # a pipe whose reader is gone
    monkeypatch.setattr(os, "_exit", exits.append)
    dog.end_early, dog.stop_status = fail, status
    stop.ask("SIGINT")
    dog._end_when_asked()
    assert exits == [status]


def test_a_report_that_cannot_be_written_because_the_disk_hangs_does_not_keep_the_process(watch, tmp_path, capsys):
    os.mkfifo(tmp_path / "stall_report.txt")  # to open it blocks while nobody reads
    left = watch([Progress()], limit=0.3)
    assert wait_for(lambda: left)
    assert left[0].startswith("stalled: ") and "stall_report.txt" not in left[0]
    assert "thread MainThread:" in capsys.readouterr().err
    os.close(os.open(tmp_path / "stall_report.txt", os.O_RDONLY | os.O_NONBLOCK))  # lets the writer go


def test_a_rank_that_looks_busy_counts_its_collectives_when_another_one_stands_still(tmp_path, monkeypatch):
    # Waiting on a card takes processor time, which is life in patient work: without its number it would seem to be behind.
    monkeypatch.setattr("watchdog.read_last_collective", lambda: Collective(count=31))
    dog = Watchdog(Progress(), StopRequest(), Place("cpu", rank=1, world_size=2), store=None, limit=60, folder=tmp_path)
    dog.signs[0] = Sign(0, "save", 3, collectives=30, silent=61)
    dog._look_at_myself(1.0)
    assert ranks(find_late(dog.signs, 60)) == [0]


def test_a_launcher_that_ends_the_others_after_a_failure_is_no_stop_on_purpose(tmp_path, monkeypatch):
    monkeypatch.setattr("watchdog.SECONDS_AFTER_A_FAILURE", 0.1)
    ended, store, stop = [], dist.HashStore(), StopRequest()
    monkeypatch.setattr(Watchdog, "_leave", lambda dog, message: (ended.append(message), dog._done.set()))
    monkeypatch.setattr(os, "_exit", ended.append)
    failing, other = (Watchdog(Progress(), request, Place("cpu", rank=rank, world_size=2), store=store, limit=60, folder=tmp_path)
                      for rank, request in ((1, StopRequest()), (0, stop)))  # fmt: skip
    other.period = 0.05
    failing.tell_failure("rank 1, phase evaluate, step 6: ValueError: first")
    stop.ask("SIGTERM")
    other.start()
    assert wait_for(lambda: ended)
    other._done.set()
    other.join()
    assert ended[0] == "rank 1, phase evaluate, step 6: ValueError: first"


def test_a_beat_costs_less_than_fifty_microseconds():
    progress = Progress()
    started = time.perf_counter()
    for _ in range(20_000):
        progress.beat("forward")
    assert (time.perf_counter() - started) / 20_000 < 50e-6


def test_the_watch_ends_with_its_work_and_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with Watchdog(Progress(), StopRequest(), Place("cpu"), store=None, limit=60, folder=tmp_path):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert not os.listdir(tmp_path)


def test_a_rank_that_waited_for_long_is_not_late_when_the_other_moves_on_first(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(Watchdog, "_leave", lambda dog, message: left.append(message))
    dog = Watchdog(Progress(), StopRequest(), Place("cpu", world_size=2), store=None, limit=60, folder=tmp_path)
    dog.signs = [Sign(0, beats=6), Sign(1, beats=5, silent=700)]  # what rank 1 told last, before it moved
    dog._end_a_stall()
    dog.signs[1] = Sign(1, beats=6)
    for _ in range(9):
        dog._end_a_stall()
    assert not left
