"""How do the processes meet? Each tells the others what it is, all add up one number, and what one has done reaches the rest."""

import hashlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from device import LAUNCH, Place
from faults import UserError, first_line, progress
from versions import library_versions

# How long ranks look for each other at the start: libraries are imported by then, on a slow disk minutes apart.
MEETING_SECONDS = 120
# How long the process group may take to form and to add up one tensor: seconds, once all ranks are there.
FIRST_SUM_SECONDS = 30
_FIRST_SUM_NUMBERS = 2**20  # enough to go the way that gradients go
_POLL_SECONDS = 0.2
_THREAD = "meeting"
_STORE_BYTES = 4 * 2**20  # the store breaks the connection over values of 8 MiB and more
CAUSES = """\
usual causes, and what to try in front of the same command:
  cards that cannot talk to each other directly (some boards, virtual machines): NCCL_P2P_DISABLE=1
  the wrong network interface: NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0, with the name that `ip addr` shows
  a firewall between the machines: open all ports between them, not --main_process_port alone
  too little shared memory in a container: docker run --shm-size 8g"""


@dataclass(frozen=True)
class Member:
    """What a rank tells the others at the start. `card` is the driver's identifier, "cpu" without one; `recipe` maps each
    section of the resolved recipe to a hash, `versions` each library, and this program's own files, to a version."""

    host: str
    local_rank: int
    world_size: int
    card: str
    card_name: str
    compute_type: str
    versions: dict[str, str]
    recipe: dict[str, str]


def describe_member(place: Place, *, recipe: str, compute_type: torch.dtype) -> Member:
    """What this process tells the others; `recipe` is the resolved one as YAML."""
    properties = None if place.device == "cpu" else torch.cuda.get_device_properties(place.device)
    own_files = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return Member(
        host=socket.gethostname(),
        local_rank=place.local_rank,
        world_size=place.world_size,
        card=str(properties.uuid) if properties else "cpu",
        card_name=properties.name if properties else "CPU",
        compute_type=str(compute_type).removeprefix("torch."),
        versions=library_versions() | {"src/": _sum_up(own_files)},
        recipe={title: _sum_up(json.dumps(section).encode()) for title, section in yaml.safe_load(recipe).items()},
    )


def _sum_up(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def find_mismatches(members: dict[int, Member]) -> list[str]:
    """One message for everything that must be the same on all ranks and is not, and for cards that two ranks share."""
    everyone, problems = list(members), []

    def values(found: dict[int, Hashable]) -> str:
        """2.13.0 on rank 0 (alpha); 2.12.0 on ranks 1 and 2 (beta); "" when all are the same."""
        by_value: dict[Hashable, list[int]] = {}
        for rank, value in found.items():
            by_value.setdefault(value, []).append(rank)
        return "; ".join(f"{value} on {_name(ranks, members)}" for value, ranks in by_value.items()) if len(by_value) > 1 else ""

    differing = values({rank: member.world_size for rank, member in members.items()})
    if differing:
        problems.append(f"the number of processes differs: {differing}. --num_processes is that of all machines together, the same on each")
    cards: dict[Hashable, list[int]] = {}
    for rank, member in members.items():
        cards.setdefault((member.host, member.card), []).append(rank)
    for (host, card), ranks in cards.items():
        if card != "cpu" and len(ranks) > 1:
            problems.append(
                f"two processes share one GPU ({_name(ranks, members)}: {card}): one process a GPU. "
                f"Start: {LAUNCH.format(processes=len(cards))}"
            )
    differing = values({rank: "CPU" if member.card == "cpu" else "GPU" for rank, member in members.items()})
    if differing:
        problems.append(f"some processes have a card and others have none: {differing}")
    differing = values({rank: member.compute_type for rank, member in members.items()})
    if differing:
        problems.append(f"the compute type differs: {differing}. One that all cards have: --training.fp16 true")
    for name in dict.fromkeys(name for member in members.values() for name in member.versions):
        differing = values({rank: members[rank].versions.get(name, "none") for rank in everyone})
        if differing and name == "src/":
            problems.append(f"the files of this program differ between the machines: {differing}. Take the same commit on each")
        elif differing:
            problems.append(f"{name} differs: {differing}. On each machine: pip install -r requirements.txt")
    for title in dict.fromkeys(title for member in members.values() for title in member.recipe):
        differing = values({rank: members[rank].recipe.get(title, "none") for rank in everyone})
        if differing:
            problems.append(f"the recipe's section {title} differs: {differing}. Give each machine the same --config and the same keys")
    return problems


def _name(ranks: list[int], members: dict[int, Member]) -> str:
    """rank 0 (alpha), or ranks 1 and 2 (beta)."""
    hosts = ", ".join(dict.fromkeys(members[rank].host for rank in ranks if rank in members))
    numbers = " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])]))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" + (f" ({hosts})" if hosts else "")


def describe_members(members: dict[int, Member]) -> list[str]:
    """A line for each rank, when there are several: its machine and its card."""
    if len(members) == 1:
        return []
    return [
        f"rank {rank}: {member.host}, " + ("CPU" if member.card == "cpu" else f"cuda:{member.local_rank} {member.card_name} {member.card}")
        for rank, member in members.items()
    ]


# --- starting ----------------------------------------------------------------------------------------------------


def join_processes(place: Place, *, recipe: str, compute_type: torch.dtype, timeout_seconds: float) -> "Meeting":
    """Starts the process group (NCCL between cards, gloo between CPUs) and gives back the meeting point of all ranks.

    `recipe` is the resolved one as YAML. Collectives wait at most `timeout_seconds`. A single process starts nothing.
    Raises UserError when ranks do not come, do not fit together, or cannot add up a number.
    """
    own = describe_member(place, recipe=recipe, compute_type=compute_type)
    if place.world_size == 1:
        return Meeting(place, None, {0: own})
    store = _open_store(place)
    members = exchange_members(place, store, own)
    problems = find_mismatches(members)
    if problems:
        time.sleep(5 * _POLL_SECONDS)  # the store ends with the main process: the others must have read it
        raise UserError(*problems)
    _add_up_once(place, store, timeout_seconds=timeout_seconds)
    return Meeting(place, store, members)


def connect_store(place: Place) -> dist.Store:
    """A connection of its own to the store in which the ranks meet: two threads must not share one, since a wait blocks it.

    Raises DistError when the store is not there.
    """
    return _open_store(place, host_it=False)


def _open_store(place: Place, *, host_it: bool = True) -> dist.Store:
    """The store, hosted by the launcher or else by the main process."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or not int(port):
        raise UserError(
            "MASTER_ADDR or MASTER_PORT is not set, so the processes cannot meet. "
            f"Start: {LAUNCH.format(processes=place.world_size)}, or torchrun --standalone"
        )
    is_host = host_it and place.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=MEETING_SECONDS)
    try:
        # A program that answers at this port in another language is waited for without a limit.
        store = _run_within(MEETING_SECONDS + 1, lambda: dist.TCPStore(address, int(port), is_master=is_host, timeout=limit))
    except (dist.DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"port {port} on this machine is taken by another program or another run; choose another for all processes, "
                "or 0 for a free one on a single machine: accelerate launch --main_process_port 0"
            ) from error
        raise UserError(
            f"rank {place.rank} found no main process at {address}:{port} within {MEETING_SECONDS} s; is the port taken or blocked, or was "
            "the main process not started? All machines are given the same --main_process_ip and --main_process_port"
        ) from error
    # A launcher that starts failed processes again keeps what they left in the store.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def exchange_members(place: Place, store: dist.Store, own: Member) -> dict[int, Member]:
    """Tells `own` to the others and waits for theirs; by rank. When one was started for another number of processes, the wait ends.

    Raises UserError naming the ranks that have not come within MEETING_SECONDS.
    """
    members = {place.rank: own}
    deadline = time.monotonic() + MEETING_SECONDS
    try:
        store.set(f"member/{place.rank}", json.dumps(asdict(own)))
        while len(members) < place.world_size:
            for rank in [rank for rank in range(place.world_size) if rank not in members]:
                if store.check([f"member/{rank}"]):
                    members[rank] = Member(**json.loads(store.get(f"member/{rank}")))
            if any(member.world_size != own.world_size for member in members.values()):
                break
            absent = [rank for rank in range(place.world_size) if rank not in members]
            if absent and time.monotonic() > deadline:
                raise UserError(
                    f"{_name(absent, {})} of {place.world_size} did not come within {MEETING_SECONDS} s. Look for an earlier line of the "
                    "missing process; on several machines each needs its own --machine_rank"
                )
            time.sleep(_POLL_SECONDS if absent else 0)
    except dist.DistError as error:
        raise UserError(f"rank {place.rank} lost the main process while the ranks met: {first_line(error)}") from error
    return dict(sorted(members.items()))


def _run_within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` gives; TimeoutError after `seconds`. It runs in a thread: the library's calls block without a limit of their own."""
    outcome: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except Exception as error:  # whatever it is, it is raised below
            outcome.put((None, error))

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no end after {seconds} s") from None
    if error is not None:
        raise error
    return result


def is_stuck() -> bool:
    """Whether a call of the library still hangs: then only `os._exit` ends this process in order, any other end waits or crashes."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _add_up_once(place: Place, store: dist.Store, *, timeout_seconds: float) -> None:
    """Starts the process group and adds up one tensor over all ranks, under a limit of its own. Raises UserError when that fails."""

    def start_and_sum() -> bool:
        if place.device != "cpu":
            torch.cuda.set_device(place.device)  # each thread has a current device of its own
        _start_group(place, timeout_seconds=timeout_seconds)
        numbers = torch.full((_FIRST_SUM_NUMBERS,), place.rank + 1.0, device=place.device)
        work = dist.all_reduce(numbers, async_op=True)
        while not work.is_completed():  # to wait for NCCL does not block the host
            time.sleep(0.01)
        work.wait()
        return bool((numbers == place.world_size * (place.world_size + 1) / 2).all())

    store.set(f"entered/{place.rank}", b"")
    try:
        is_right = _run_within(FIRST_SUM_SECONDS, start_and_sum)
    except TimeoutError:
        try:
            absent = [rank for rank in range(place.world_size) if not store.check([f"entered/{rank}"])]
        except dist.DistError:
            raise UserError() from None  # the main process has told it and is gone, and the store with it
        raise UserError(describe_stall(absent)) from None
    except RuntimeError as error:
        raise UserError(f"rank {place.rank} cannot exchange numbers with the others: {first_line(error)}; {CAUSES}") from error
    if not is_right:
        raise UserError(f"rank {place.rank}: the ranks' first sum is wrong, so every gradient would be; {CAUSES}")


def describe_stall(absent: list[int]) -> str:
    """Why the first sum did not end in time: these ranks never began, or all did and no numbers came through."""
    if absent:
        return f"the ranks' first sum did not end within {FIRST_SUM_SECONDS} s: {_name(absent, {})} did not begin it"
    return f"the ranks' first sum did not end within {FIRST_SUM_SECONDS} s, though all began it: no numbers come through; {CAUSES}"


def _start_group(place: Place, *, timeout_seconds: float) -> None:
    on_gpu = place.device != "cpu"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", connect_store(place)),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device(place.device) if on_gpu else None,
    )


# --- working together --------------------------------------------------------------------------------------------


class Meeting:
    """Work for all ranks inside no collective and no time limit: results go through the store, and the ranks poll for them."""

    def __init__(self, place: Place, store: dist.Store | None, members: dict[int, Member] | None = None):
        self.place = place
        self.members = members or {}
        self._store = store
        self._count = 0

    @property
    def spans_machines(self) -> bool:
        """Whether ranks run on several machines, or under several launchers."""
        hosts = {member.host for member in self.members.values()}
        return len(hosts) > 1 or self.place.local_world_size < self.place.world_size

    @property
    def is_first_elsewhere(self) -> bool:
        """Whether this is the first process of a machine other than the main process's."""
        return self.spans_machines and self.place.local_rank == 0 and not self.place.is_main

    def once(self, work: Callable[[], bytes]) -> bytes:
        """Runs `work` (no arguments, gives bytes) on the main process; gives its result on every rank.

        A UserError raised by the work ends the other ranks too, silently: the main process alone talks. On other machines
        the first process says where to look.
        """
        key = self._next_key()
        if self._store is None:
            return work()
        if self.place.is_main:
            try:
                result = work()
            except UserError:
                self._put(key, b"!")
                raise
            self._put(key, b"=" + result)
            return result
        answer = self._wait_for(key)
        if answer[:1] == b"!":
            raise self._told_elsewhere()
        return answer[1:]

    def together(self, work: Callable[[], Any]) -> Any:
        """Runs `work` (no arguments) on every rank and gives each its own result; when it fails on one, it ends on all.

        Raises UserError with the problems of all ranks, each with rank and machine unless it is the main process's own.
        """
        key = self._next_key()
        if self._store is None:
            return work()
        result, problems, failure = None, [], None
        try:
            result = work()
        except UserError as error:
            problems = error.problems
        except Exception as error:
            problems, failure = [f"{type(error).__name__}: {first_line(error)}"], error
        self._put(f"{key}/{self.place.rank}", json.dumps(problems).encode())
        if failure:
            raise failure
        ranks_by_problem: dict[str, list[int]] = {}
        for rank in range(self.place.world_size):
            for problem in json.loads(self._wait_for(f"{key}/{rank}")):
                ranks_by_problem.setdefault(problem, []).append(rank)
        if ranks_by_problem and not self.place.is_main:
            raise self._told_elsewhere()
        if ranks_by_problem:
            told = (problem if 0 in ranks else f"{_name(ranks, self.members)}: {problem}" for problem, ranks in ranks_by_problem.items())
            raise UserError(*told)
        return result

    def _told_elsewhere(self) -> UserError:
        if not self.is_first_elsewhere:
            return UserError()
        host = self.members[0].host if self.members else "another machine"
        return UserError(f"stopped by the main process: its output, on {host}, tells why")

    def _next_key(self) -> str:
        self._count += 1
        return f"work/{self._count}"

    def _put(self, key: str, content: bytes) -> None:
        parts = [content[at : at + _STORE_BYTES] for at in range(0, len(content), _STORE_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/part/{number}", part)
        self._store.set(key, str(len(parts)))

    def _wait_for(self, key: str) -> bytes:
        progress.waits = True
        try:
            while not self._store.check([key]):
                time.sleep(_POLL_SECONDS)
            return b"".join(self._store.get(f"{key}/part/{number}") for number in range(int(self._store.get(key))))
        except dist.DistError:
            # The main process, or its launcher, has ended and taken the store with it.
            raise self._told_elsewhere() from None
        finally:
            progress.waits = False
