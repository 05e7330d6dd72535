"""Ranks that cannot work together are told so in seconds and by name; those that can share what one of them has done."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import meeting
from device import Place
from faults import UserError
from meeting import (
    Meeting,
    Member,
    describe_member,
    describe_members,
    describe_stall,
    exchange_members,
    find_mismatches,
    join_processes,
)

SRC = Path(__file__).parent.parent / "src"
MEMBER = Member(
    host="alpha",
    local_rank=0,
    world_size=2,
    card="uuid-a",
    card_name="Tesla T4",
    compute_type="float16",
    versions={"torch": "2.13.0", "src/": "aa"},
    recipe={"model": "11", "training": "22"},
)
RECIPE = "model: {name: toy}\ntraining: {max_steps: 2}\n"


def pair(**changes) -> dict[int, Member]:
    """Two ranks on two machines that fit together, but for what rank 1 has changed."""
    return {0: MEMBER, 1: replace(MEMBER, **{"host": "beta", "card": "uuid-b"} | changes)}


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def on_ranks(work, members: dict[int, Member]) -> list:
    """Calls `work` with the meeting of each rank, one thread a rank; gives the result or the UserError of each."""
    store, found = dist.HashStore(), [None] * len(members)

    def run(rank: int) -> None:
        place = Place("cpu", rank=rank, local_rank=members[rank].local_rank, world_size=len(members), local_world_size=len(members))
        try:
            found[rank] = work(Meeting(place, store, members))
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


# --- who is there ------------------------------------------------------------------------------------------------


def test_ranks_that_fit_together_have_no_mismatch():
    assert find_mismatches(pair()) == []
    assert find_mismatches(pair(host="alpha", local_rank=1)) == []
    cpu = replace(MEMBER, card="cpu")
    assert find_mismatches({0: cpu, 1: cpu}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 4}, "the number of processes differs: 2 on rank 0 (alpha); 4 on rank 1 (beta)"),
        ({"host": "alpha", "card": "uuid-a"}, "two processes share one GPU (ranks 0 and 1 (alpha): uuid-a)"),
        ({"card": "cpu"}, "some processes have a card and others have none: GPU on rank 0 (alpha); CPU on rank 1 (beta)"),
        ({"compute_type": "bfloat16"}, "the compute type differs: float16 on rank 0 (alpha); bfloat16 on rank 1 (beta)"),
        ({"versions": {"torch": "2.12.0", "src/": "aa"}}, "torch differs: 2.13.0 on rank 0 (alpha); 2.12.0 on rank 1 (beta)"),
        ({"versions": {"src/": "aa"}}, "torch differs: 2.13.0 on rank 0 (alpha); none on rank 1 (beta)"),
        ({"versions": {"torch": "2.13.0", "src/": "bb"}}, "the files of this program differ between the machines: aa on rank 0"),
        ({"recipe": {"model": "11", "training": "33"}}, "the recipe's section training differs: 22 on rank 0 (alpha); 33 on rank 1 (beta)"),
    ],
)
def test_everything_that_differs_is_one_message_by_rank_and_machine(changes, message):
    (problem,) = find_mismatches(pair(**changes))
    assert problem.startswith(message) and "\n" not in problem


def test_the_same_card_number_on_two_machines_is_two_cards():
    assert find_mismatches(pair(card="uuid-a")) == []


def test_ranks_that_agree_are_named_together():
    members = {rank: replace(MEMBER, card=f"uuid-{rank}") for rank in range(4)}
    members[3] = replace(members[3], compute_type="float32")
    (problem,) = find_mismatches(members)
    assert "float16 on ranks 0, 1 and 2 (alpha); float32 on rank 3 (alpha)" in problem


def test_several_ranks_are_shown_with_machine_and_card_and_a_single_one_is_not():
    assert describe_members(pair(local_rank=1)) == ["rank 0: alpha, cuda:0 Tesla T4 uuid-a", "rank 1: beta, cuda:1 Tesla T4 uuid-b"]
    assert describe_members({0: MEMBER}) == []


def test_recipes_are_told_apart_by_section():
    own = [
        describe_member(Place("cpu"), recipe=recipe, compute_type=torch.float32)
        for recipe in (RECIPE, "model: {name: toy}\ntraining: {max_steps: 3}\n")
    ]
    assert own[0].recipe["model"] == own[1].recipe["model"] and own[0].recipe["training"] != own[1].recipe["training"]
    assert (own[0].host, own[0].card, own[0].compute_type) == (socket.gethostname(), "cpu", "float32")
    assert {"python", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "src/"} <= own[0].versions.keys()


def exchange(monkeypatch, *, seconds: float, come: dict[int, Member], world_size: int) -> list:
    monkeypatch.setattr(meeting, "MEETING_SECONDS", seconds)
    store, found = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            found[rank] = exchange_members(Place("cpu", rank=rank, world_size=world_size), store, come[rank])
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in come]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in come]


def test_every_rank_learns_what_all_are_in_the_order_of_ranks(monkeypatch):
    members = {rank: replace(MEMBER, world_size=3, card=f"uuid-{rank}") for rank in range(3)}
    found = exchange(monkeypatch, seconds=20, come={rank: members[rank] for rank in (2, 0, 1)}, world_size=3)
    assert [list(one.items()) for one in found] == [list(members.items())] * 3


def test_ranks_that_do_not_come_are_named(monkeypatch):
    members = {rank: replace(MEMBER, world_size=4) for rank in (0, 2)}
    for error in exchange(monkeypatch, seconds=0.5, come=members, world_size=4):
        assert str(error).startswith("ranks 1 and 3 of 4 did not come within 0.5 s")


def test_another_number_of_processes_is_told_at_once_and_not_waited_for(monkeypatch):
    started = time.monotonic()
    (found, _) = exchange(monkeypatch, seconds=60, come={0: MEMBER, 1: replace(MEMBER, world_size=3, card="uuid-b")}, world_size=3)
    assert "the number of processes differs" in find_mismatches(found)[0]
    assert time.monotonic() - started < 10


# --- the store ---------------------------------------------------------------------------------------------------


def test_a_port_that_another_program_has_is_named(no_launcher):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        no_launcher.setenv("MASTER_ADDR", "127.0.0.1")
        no_launcher.setenv("MASTER_PORT", port)
        no_launcher.setattr(meeting, "MEETING_SECONDS", 1)
        with pytest.raises(UserError, match=rf"^port {port} on this machine is taken .* --main_process_port 0$"):
            join_processes(Place("cpu", world_size=2), recipe=RECIPE, compute_type=torch.float32, timeout_seconds=5)
        # The other ranks reach that program, which never answers.
        with pytest.raises(UserError, match=f"^rank 1 found no main process at 127.0.0.1:{port} within 1 s"):
            join_processes(Place("cpu", rank=1, world_size=2), recipe=RECIPE, compute_type=torch.float32, timeout_seconds=5)


@pytest.mark.parametrize(("address", "port"), [("", "29500"), ("127.0.0.1", ""), ("127.0.0.1", "0"), ("127.0.0.1", "x")])
def test_an_address_that_is_missing_is_refused_before_anybody_is_waited_for(no_launcher, address, port):
    no_launcher.setenv("MASTER_ADDR", address)
    no_launcher.setenv("MASTER_PORT", port)
    with pytest.raises(UserError, match="MASTER_ADDR or MASTER_PORT is not set"):
        join_processes(Place("cpu", world_size=2), recipe=RECIPE, compute_type=torch.float32, timeout_seconds=5)


def test_a_single_process_starts_no_process_group():
    alone = join_processes(Place("cpu"), recipe=RECIPE, compute_type=torch.float32, timeout_seconds=1)
    assert [member.host for member in alone.members.values()] == [socket.gethostname()]
    assert not dist.is_initialized() and not alone.spans_machines


# --- the first sum -----------------------------------------------------------------------------------------------


def add_up(monkeypatch, start_group, entered: tuple[int, ...] = (1,)) -> None:
    store = dist.HashStore()
    for rank in entered:
        store.set(f"entered/{rank}", b"")
    monkeypatch.setattr(meeting, "FIRST_SUM_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "_start_group", start_group)
    meeting._add_up_once(Place("cpu", world_size=2), store, timeout_seconds=60)


@pytest.mark.parametrize(("entered", "said"), [((1,), "though all began it: no numbers come through"), ((), ": rank 1 did not begin it")])
def test_a_first_sum_without_an_end_is_left_and_tells_who_did_not_begin_it(monkeypatch, entered, said):
    started = time.monotonic()
    with pytest.raises(UserError, match=said):
        add_up(monkeypatch, lambda place, timeout_seconds: time.sleep(5), entered)
    assert time.monotonic() - started < 4


def test_the_causes_of_a_stall_are_one_line_each_with_what_to_do():
    lines = describe_stall([]).splitlines()
    for word in ("NCCL_P2P_DISABLE=1", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "firewall", "--shm-size"):
        assert sum(word in line for line in lines[1:]) == 1
    assert len(describe_stall([1]).splitlines()) == 1


def fake_sum(monkeypatch, factor: float, polls: int = 3) -> None:
    """An all-reduce that multiplies, and is complete at the given poll."""

    def all_reduce(tensor, async_op):
        tensor *= factor
        left = iter(range(polls))
        return SimpleNamespace(is_completed=lambda: next(left, None) is None, wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def test_a_right_first_sum_is_silent_and_a_wrong_one_is_refused(monkeypatch):
    fake_sum(monkeypatch, 3.0)
    add_up(monkeypatch, lambda place, timeout_seconds: None)
    fake_sum(monkeypatch, 1.0)
    with pytest.raises(UserError, match="^rank 0: the ranks' first sum is wrong"):
        add_up(monkeypatch, lambda place, timeout_seconds: None)


def test_a_sum_that_never_completes_is_left_although_nothing_blocks(monkeypatch):
    fake_sum(monkeypatch, 3.0, polls=10**9)
    with pytest.raises(UserError, match="no numbers come through"):
        add_up(monkeypatch, lambda place, timeout_seconds: None)
    fake_sum(monkeypatch, 3.0)  # lets no thread of this test spin on


def test_a_backend_that_fails_is_told_by_rank_with_its_own_words(monkeypatch):
    def fail(place, timeout_seconds):
        raise RuntimeError("NCCL error: no socket interface found\nframe #0")

    with pytest.raises(UserError, match="^rank 0 cannot exchange numbers with the others: NCCL error: no socket interface found; usual"):
        add_up(monkeypatch, fail)


STUCK = f"""
import sys
sys.path.insert(0, {str(SRC)!r})
import torch
import meeting
import train
from device import settle_place

def main(argv, listen):
    place = settle_place(use_cpu=True)
    meeting.join_processes(place, recipe={RECIPE!r}, compute_type=torch.float32, timeout_seconds=60)

meeting.FIRST_SUM_SECONDS = 2
meeting.exchange_members = lambda place, store, own: dict.fromkeys(range(2), own)  # rank 1 came, and is gone
train.main = main
train.start([])
"""


def test_a_process_whose_library_hangs_in_a_call_ends_with_status_2_and_the_message_last():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")} | ranks
    run = subprocess.run([sys.executable, "-c", STUCK], env=environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2, run.stderr
    assert run.stderr.strip() == "the ranks' first sum did not end within 2 s: rank 1 did not begin it"


# --- working together --------------------------------------------------------------------------------------------


def test_one_process_does_the_work_itself():
    alone = Meeting(Place("cpu"), None)
    assert [alone.once(lambda: b"a"), alone.together(lambda: "b"), alone.once(lambda: b"c")] == [b"a", "b", b"c"]


def test_results_larger_than_a_value_of_the_store_arrive_whole(monkeypatch):
    monkeypatch.setattr(meeting, "_STORE_BYTES", 7)
    content = bytes(range(256))
    assert on_ranks(lambda here: here.once(lambda: content), pair()) == [content] * 2
    assert on_ranks(lambda here: here.once(lambda: b""), pair()) == [b""] * 2


def test_each_rank_keeps_its_own_result_of_work_done_by_all():
    assert on_ranks(lambda here: here.together(lambda: here.place.rank), pair()) == [0, 1]


def test_a_problem_of_another_rank_ends_all_and_the_main_process_tells_it_with_its_machine():
    def work(here):
        if here.place.rank:
            raise UserError("train.jsonl: is not there")

    main, other = on_ranks(lambda here: here.together(lambda: work(here)), pair())
    assert main.problems == ["rank 1 (beta): train.jsonl: is not there"]
    assert other.problems == ["stopped by the main process: its output, on alpha, tells why"]


def test_a_problem_that_all_ranks_have_is_told_once():
    def work():
        raise UserError("train.jsonl: is not there")

    main, other = on_ranks(lambda here: here.together(work), pair(host="alpha", local_rank=1))
    assert (main.problems, other.problems) == (["train.jsonl: is not there"], [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": "alpha", "local_rank": 1}, []),
        ({}, ["stopped by the main process: its output, on alpha, tells why"]),
        ({"local_rank": 1}, []),
    ],
)
def test_a_users_mistake_in_the_main_process_is_told_by_it_alone_and_other_machines_say_where_to_look(changes, said):
    def fail():
        raise UserError("train.jsonl:3: is wrong")

    main, other = on_ranks(lambda here: here.once(fail), pair(**changes))
    assert (main.problems, other.problems) == (["train.jsonl:3: is wrong"], said)


def test_two_launchers_on_one_machine_count_as_two():
    place = Place("cpu", rank=1, world_size=2, local_world_size=1)
    here = Meeting(place, dist.HashStore(), pair(host="alpha"))
    assert here.spans_machines and here.is_first_elsewhere
    together = Meeting(replace(place, local_rank=1, local_world_size=2), dist.HashStore(), pair(host="alpha"))
    assert not together.spans_machines and not together.is_first_elsewhere


# --- two processes -----------------------------------------------------------------------------------------------


RANK = f"""
import sys, time
sys.path.insert(0, {str(SRC)!r})
import torch
from device import settle_place
from faults import UserError
from meeting import connect_store, join_processes

place = settle_place(use_cpu=True)
meeting = join_processes(place, recipe={RECIPE!r}, compute_type=torch.float32, timeout_seconds=2)

def work():
    time.sleep(4)  # twice the time limit of collectives
    return b"done by " + str(place.rank).encode()

def fail():
    raise UserError("train.jsonl:3: is wrong")

print(meeting.once(work).decode(), flush=True)
total = torch.tensor(place.rank + 1)
torch.distributed.all_reduce(total)
print("sum", total.item(), flush=True)
store = connect_store(place)
store.set(f"seen by {{place.rank}}", b"1")
store.wait([f"seen by {{1 - place.rank}}"])
print("seen", flush=True)
try:
    meeting.once(fail)
except UserError as error:
    print("problems", error.problems, flush=True)
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def ranks() -> list[SimpleNamespace]:
    """Status and lines of output of two processes, started without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")} | shared
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-c", RANK], env=environ | {"RANK": rank, "LOCAL_RANK": rank}, **pipes) for rank in ("0", "1")
    ]
    try:
        return [SimpleNamespace(lines=p.communicate(timeout=60)[0].splitlines(), status=p.returncode) for p in started]
    finally:
        for process in started:
            process.kill()


def test_work_of_the_main_process_may_take_longer_than_the_time_limit_of_collectives(ranks):
    assert [rank.lines[:2] for rank in ranks] == [["done by 0", "sum 3"]] * 2


def test_a_connection_of_its_own_reaches_the_store_of_all_ranks(ranks):
    assert [rank.lines[2] for rank in ranks] == ["seen"] * 2


def test_a_users_mistake_in_that_work_ends_the_other_rank_silently(ranks):
    assert ranks[0].lines[3:] == ["problems ['train.jsonl:3: is wrong']"]
    assert ranks[1].lines[3:] == ["problems []"]
    assert [rank.status for rank in ranks] == [2, 2]
