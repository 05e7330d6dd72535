"""Who is late? A thread in every rank that tells the others where it is, and ends the job when nothing moves any more."""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from checkpoints import list_checkpoints
from config import Recipe
from device import Place
from faults import Progress, RunFailure, UserError, describe_failure
from stopping import STOP_SECONDS, StopRequest

REPORT_FILE = "stall_report.txt"
# How long a rank is given to end by itself when another one has failed or the launcher ends the job.
SECONDS_AFTER_A_FAILURE = 8
# A rank that lives tells its place every second; one that is silent for so long while the job is ended is gone.
SECONDS_UNTIL_GONE = 10
ROUNDS_OF_SUSPICION = 4
_SECONDS_FOR_REPORTS = 6
_STORE_SECONDS = 3
# Of a core: what threads that only wait use is less.
LIVELY_SHARE = 0.02
LIVELY_BYTES = 4096  # a second


@dataclass
class Sign:
    """What a rank tells: where it is (see `Progress`), the collectives it has entered (counted once a rank is silent for long), for
    how many seconds nothing moved there, and whether it has left."""

    rank: int
    phase: str = "load"
    step: int = 0
    beats: int = 0
    collectives: int = 0
    silent: float = 0.0
    waits: bool = False
    left: bool = False
    unheard: float = 0.0  # seconds since this was told; filled in by the one who hears it

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank has come; the same order on all ranks."""
        return self.beats, self.collectives


def find_late(signs: list[Sign], limit: float) -> list[Sign]:
    """The ranks that hold up the job, once nothing has moved for `limit` seconds; none while work goes on.

    Late are ranks that tell nothing any more, or else those that have passed the fewest places (and there have entered the
    fewest collectives), unless one of them still shows life: the others wait for these, whatever the others do. Ranks that have
    left or that wait for the main process are not judged.
    """
    here = [sign for sign in signs if not sign.left]
    gone = [sign for sign in here if sign.unheard > limit]
    if gone:
        return gone
    judged = [sign for sign in here if not sign.waits]
    last = [sign for sign in judged if sign.place == min(other.place for other in judged)]
    return last if all(sign.silent + sign.unheard > limit for sign in last) else []


def describe_stall(late: list[Sign], signs: list[Sign], *, limit: float, clips: str) -> str:
    """One sentence: who is late, where, for how long, and who waits. `clips` names what the first late rank works on, if known."""
    def name(ranks: list[Sign]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(sign.rank) for sign in ranks)}"

    first, many = late[0], len(late) > 1
    is_gone = first.unheard > limit
    line = f"stalled: {name(late)} {'have' if many else 'has'} {'not answered' if is_gone else 'made no progress'}"
    line += f" for {first.unheard if is_gone else first.silent:.0f} s ({'last told: ' * is_gone}phase {first.phase}, step {first.step}"
    line += f", {clips})" if clips else ")"
    waiting = [sign for sign in signs if not sign.left and sign not in late]
    if waiting:
        line += f"; {name(waiting)} wait{'s' * (len(waiting) == 1)} for {'them' if many else 'it'}"
    return line


def collective_seconds(recipe: Recipe) -> float:
    """How long a collective may wait, in seconds: longer than the watchdog, also where the rank that is late still works."""
    return max(recipe.training["ddp_timeout"], 3 * recipe.run.stall_timeout_seconds)


class Watchdog(threading.Thread):
    """Watches this process, and through the store all ranks.

    Args:
        store: a connection of its own to the store of all ranks; None for a single process.
        limit: seconds without any sign of life after which the job is ended (`run.stall_timeout_seconds`).
        folder: receives the report; only the rank that finds the stall writes there.
        end_early: called with the reason before this process leaves on a stop that nothing waits for; may be slow or fail.
        stop_status: exit status after such a stop; another one than 0 where 0 would say that all was done.
    """

    def __init__(self, progress: Progress, stop: StopRequest, place: Place, *, store: dist.Store | None, limit: float, folder: Path):
        super().__init__(name="watchdog", daemon=True)
        self.progress, self.stop, self.place, self.store = progress, stop, place, store
        if store:
            store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self.limit, self.folder = limit, folder
        self.end_early: Callable[[str], None] | None = None
        self.stop_status = 0
        self.period = min(1.0, limit / 10)
        self.signs = [Sign(rank) for rank in range(place.world_size)]
        self._told = [""] * place.world_size
        self._count = 0
        self._silent, self._beats, self._life = 0.0, -1, (0.0, 0)
        self._done = threading.Event()
        self._store_answers = True
        self._suspects: list[tuple[int, tuple[int, int]]] = []
        self._rounds = 0

    # --- from the main thread

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Leaves at a good end and after the user's mistakes. Raises RunFailure with the first failure of the job after any other."""
        if error is None or isinstance(error, UserError):
            self.close()
            return
        own = describe_failure(error, rank=self.place.rank)
        first = self.tell_failure(own)
        if first != own:
            raise RunFailure(f"ended because of {first}") from None

    def tell_failure(self, message: str) -> str:
        """Tells the other ranks why this one ends; gives the first failure of the job, which may be another rank's."""
        try:
            return self.store.compare_set("failure", "", message).decode() if self.store else message
        except (RuntimeError, OSError):  # the store has gone with its process
            return message

    def close(self) -> None:
        """Ends the watch: this rank leaves at a good end."""
        self._done.set()
        self.join()
        self._tell(left=True)

    # --- the thread

    def run(self) -> None:
        """Looks around until the watch is closed."""
        looked = 0.0
        while True:
            rested = time.monotonic()
            if self._done.wait(self.period):
                break
            woke = time.monotonic()
            # A process that was halted (Ctrl-Z, a laptop that slept) has not been late in that time.
            passed = min(woke - rested, 2 * self.period) + looked
            # A call that holds the interpreter for ever would hold this thread too: then at least the stacks are shown.
            with suppress(OSError, ValueError):  # standard error is no file in a notebook
                faulthandler.dump_traceback_later(self.limit + 60)
            self._look_at_myself(passed)
            self._store_answers = True
            self._tell()
            self._hear(passed)
            # In this order: after a failure the launcher asks the others to stop.
            self._end_after_a_failure()
            self._end_when_asked()
            self._end_a_stall()
            looked = time.monotonic() - woke
        faulthandler.cancel_dump_traceback_later()

    def _look_at_myself(self, passed: float) -> None:
        moved = self.progress.beats != self._beats
        if self.progress.patient and not moved:
            seconds, count = measure_life()
            moved = count - self._life[1] > LIVELY_BYTES * passed or seconds - self._life[0] > LIVELY_SHARE * passed
            self._life = seconds, count
        self._beats = self.progress.beats
        self._silent = 0.0 if moved else self._silent + passed
        # Also where another rank stands still: one that waits on its card may look busy, and the numbers must be comparable.
        if max(self._silent, *(sign.silent for sign in self.signs)) > self.limit / 2:
            self.signs[self.place.rank].collectives = read_last_collective().count

    def _tell(self, *, left: bool = False) -> None:
        own, progress = self.signs[self.place.rank], self.progress
        own.phase, own.step, own.beats = progress.phase, progress.step, progress.beats
        own.silent, own.waits, own.left = self._silent, progress.waits, left
        if self.store:
            self._count += 1
            self._ask_store(lambda: self.store.set(f"sign/{own.rank}", json.dumps([self._count, asdict(own), self.stop.reason])))

    def _hear(self, passed: float) -> None:
        for rank in range(self.place.world_size if self.store else 0):
            if rank == self.place.rank:
                continue
            said = self._ask_store(lambda rank=rank: self.store.get(f"sign/{rank}").decode() if self.store.check([f"sign/{rank}"]) else "")
            if said and said != self._told[rank]:
                self._told[rank] = said
                _, words, reason = json.loads(said)
                self.signs[rank] = Sign(**words)
                if reason:
                    self.stop.ask(reason)  # a signal may reach one rank alone
            else:
                self.signs[rank].unheard += passed

    def _ask_store(self, question: Callable[[], str | None]) -> str | None:
        """An answer of the store, or None when it has gone with its process; that is found out once a round, for it takes seconds."""
        if not self._store_answers:
            return None
        try:
            return question()
        except (RuntimeError, OSError):
            self._store_answers = False
            return None

    # --- ends

    def _end_when_asked(self) -> None:
        reason = self.stop.look()
        if not reason:
            return
        waited = time.monotonic() - self.stop.since
        gone = [sign.rank for sign in self.signs if sign.unheard > SECONDS_UNTIL_GONE and not sign.left]
        if gone and self._store_answers and waited > SECONDS_UNTIL_GONE:
            self._leave(f"rank {self.place.rank} ends: rank {gone[0]} is gone")
        if not self.progress.keeps or (waited > STOP_SECONDS and reason != "run.time_limit_seconds"):
            late = f"; the step could not be saved within {STOP_SECONDS} s, {self._name_checkpoint()}" if self.progress.keeps else ""
            if self.place.is_main:
                _print(f"stopped by {reason} in phase {self.progress.phase}{late}", sys.stdout)
                with suppress(Exception):  # a full disk, say: this process ends all the same
                    self.end_early(reason + late) if self.end_early else None
            self._tell(left=True)
            time.sleep(3 * self.period if self.store else 0)  # the store may end with this process: the others must have heard
            os._exit(self.stop_status)

    def _end_after_a_failure(self) -> None:
        failure = self.store and self._ask_store(lambda: self.store.get("failure").decode() if self.store.check(["failure"]) else "")
        if failure:
            self._done.wait(SECONDS_AFTER_A_FAILURE)
            self._leave(failure)

    def _end_a_stall(self) -> None:
        late = find_late(self.signs, self.limit)
        suspects = [(sign.rank, sign.place) for sign in late]
        self._rounds, self._suspects = (self._rounds + 1 if suspects == self._suspects else 0), suspects
        verdict = ""
        # One that has waited for the others for long looks late, once they move on, until it has told that it moves, too.
        if late and self._rounds >= ROUNDS_OF_SUSPICION:
            clips = self._name_clips() if late[0].rank == self.place.rank else ""
            verdict = describe_stall(late, self.signs, limit=self.limit, clips=clips)
        if self.store:
            verdict = self._ask_store(lambda: self._share_verdict(verdict)) or verdict
        if not verdict:
            return
        report = self.describe()
        if self.store:
            self._ask_store(lambda: self.store.set(f"report/{self.place.rank}", report))
            report = self._gather_reports()
        if self.store is None or self._ask_store(lambda: self.store.add("reporter", 1)) in (None, 1):
            verdict += self._write_report(f"{verdict}\n\n{report}")
            _print(verdict, sys.stderr)
        self._leave(verdict)

    def _share_verdict(self, verdict: str) -> str:
        """The first verdict of any rank; empty while there is none."""
        if verdict:
            return self.store.compare_set("verdict", "", verdict).decode()
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else ""

    def _gather_reports(self) -> str:
        end, reports = time.monotonic() + _SECONDS_FOR_REPORTS, {}
        while len(reports) < self.place.world_size and time.monotonic() < end:
            for rank in range(self.place.world_size):
                if rank not in reports and self._ask_store(lambda rank=rank: self.store.check([f"report/{rank}"])):
                    reports[rank] = self.store.get(f"report/{rank}").decode()
            time.sleep(0.2)
        silent = [f"rank {rank}: no report" for rank in range(self.place.world_size) if rank not in reports]
        return "\n\n".join([*(reports[rank] for rank in sorted(reports)), *silent])

    def _write_report(self, text: str) -> str:
        written = threading.Event()

        def write() -> None:
            with suppress(OSError):
                (self.folder / REPORT_FILE).write_text(text, encoding="utf-8")
                written.set()

        # The disk may be what hangs.
        threading.Thread(target=write, name="report", daemon=True).start()
        if written.wait(_SECONDS_FOR_REPORTS):
            return f". Stacks: {self.folder / REPORT_FILE}"
        _print(text, sys.stderr)
        return ""

    def _leave(self, message: str) -> None:
        """Ends this process at once with status 1; the launcher's summary shows the message."""
        try:
            raise RunFailure(message)
        except RunFailure as failure:
            get_error_handler().record_exception(failure)
        os._exit(1)

    def _name_checkpoint(self) -> str:
        saved = list_checkpoints(self.folder)
        return f"the last checkpoint is {saved[-1].name}" if saved else "and no checkpoint was there before it"

    def _name_clips(self) -> str:
        try:
            return self.progress.clips()
        except Exception:  # the main thread may be at work on what this reads; the report must be written all the same
            return ""

    def describe(self) -> str:
        """This rank's part of the report: place, clips, last collective and the Python stacks of all its threads."""
        progress = self.progress
        lines = [
            f"rank {self.place.rank} (process {os.getpid()} on {socket.gethostname()}): phase {progress.phase}, step {progress.step}, "
            f"no progress for {self._silent:.0f} s",
            f"clips: {self._name_clips() or 'not known'}",
            f"last collective: {read_last_collective().words}",
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sorted(sys._current_frames().items(), key=lambda entry: names.get(entry[0]) != "MainThread"):
            if number != self.ident:
                lines += [f"thread {names.get(number, number)}:", "".join(traceback.format_stack(frame)).rstrip()]
        return "\n".join(lines)


def _print(text: str, stream: TextIO) -> None:
    """Prints a line; the reader of a pipe may be gone already (Ctrl-C ends `tee`, too)."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def measure_life() -> tuple[float, int]:
    """Processor seconds of this process and its children, without this thread's own, and bytes that they read and wrote."""
    seconds, count = time.process_time() - time.thread_time(), 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            # Of this process only what came from a disk: looking around reads files of the kernel.
            traffic = process.io_counters()
            count += traffic.read_bytes + traffic.write_bytes
            if process is not own:
                times = process.cpu_times()
                seconds += times.user + times.system
                count += traffic.read_chars + traffic.write_chars
        except (psutil.Error, OSError):
            continue
    return seconds, count


@dataclass
class Collective:
    """The collective a process entered last: how many it has entered, and the kind and state of this one in words."""

    count: int = 0
    words: str = "not known"


def read_last_collective() -> Collective:
    """As torch's flight recorder knows it; count 0 where it knows nothing."""
    try:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
    except (AttributeError, RuntimeError, ValueError, KeyError):
        return Collective()
    if not entries:
        return Collective()
    last = max(entries, key=lambda entry: entry["record_id"])
    state = "ended" if last.get("retired") else "not ended"
    return Collective(last["record_id"] + 1, f"{last['profiling_name']}, number {last['collective_seq_id']}, {state}")
