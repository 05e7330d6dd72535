"""Where a process lives follows from its environment alone; strays are named."""

import os

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st

from config import TrainingConfig, load_recipe
from device import (
    Place,
    check_placement,
    choose_compute_type,
    choose_device,
    describe_launch,
    describe_place,
    find_strays,
    is_main_process,
    model_tensors,
    settle_place,
)
from faults import UserError
from trainer import build_arguments


def local(rank: int, processes: int, **more: str) -> dict[str, str]:
    """The environment that launchers give one of several processes on one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return {name: str(number) for name, number in numbers.items()} | more


# --- the device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "visible", "device"),
    [
        ({}, 0, "cpu"),
        ({}, 1, "cuda:0"),
        ({}, 2, "cuda:0"),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 8, "cuda:1"),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 4, "cuda:1"),
        ({"LOCAL_RANK": "0"}, 1, "cuda:0"),
        (local(0, 2), 2, "cuda:0"),
        (local(1, 2), 2, "cuda:1"),
        (local(7, 8), 8, "cuda:7"),
        (local(1, 2), 8, "cuda:1"),
        (local(0, 2), 0, "cpu"),
        (local(1, 2), 0, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "1"}, 1, "cuda:0"),
        (local(1, 2, CUDA_VISIBLE_DEVICES="3"), 1, "cuda:0"),
        (local(0, 2, CUDA_VISIBLE_DEVICES="2"), 1, "cuda:0"),
        (local(1, 2, CUDA_VISIBLE_DEVICES="2,3"), 2, "cuda:1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, "cpu"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1, "cuda:0"),
    ],
)
def test_the_device_follows_from_the_local_rank_and_the_visible_cards(environ, visible, device):
    assert choose_device(environ, visible) == device


@pytest.mark.parametrize(("processes", "cards"), [(3, 2), (2, 1), (8, 4)])
def test_more_processes_than_cards_are_refused_by_every_one_of_them(processes, cards):
    for rank in range(processes):
        with pytest.raises(UserError, match=f"{processes} processes .* accelerate launch --num_processes {cards} src/train.py"):
            choose_device(local(rank, processes), cards)


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "1"}])
@pytest.mark.parametrize("visible", [0, 2])
def test_ranks_set_by_hand_are_refused_with_the_launch_command(environ, visible):
    with pytest.raises(UserError, match="LOCAL_RANK is missing.*accelerate launch --num_processes"):
        choose_device(environ, visible)


@pytest.mark.parametrize("visible", [0, 1, 2])
def test_a_launcher_of_several_machines_that_gives_no_rank_is_refused(visible):
    with pytest.raises(UserError, match=r"MASTER_ADDR is 10\.0\.0\.5, .*each machine would train by itself.*--multi_gpu"):
        choose_device({"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"}, visible)
    choose_device(local(0, 2, MASTER_ADDR="10.0.0.5"), 2)
    for address in ("127.0.0.1", "localhost", ""):  # accelerate sets it for one process on one machine, too
        choose_device({"MASTER_ADDR": address}, visible)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["one", "", "-1", "1.5", "0x1"])
def test_a_rank_that_is_no_number_is_refused_by_its_name(monkeypatch, name, value):
    for key, number in (local(1, 2) | {name: value}).items():
        monkeypatch.setenv(key, number)
    with pytest.raises(UserError, match=f"^{name}={value} in the environment: a whole number"):
        settle_place(use_cpu=True)


RANKS = st.integers(-1, 9).map(str) | st.sampled_from(["", " 1", "one", "1.0", "٣"])
ENVIRONS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"], RANKS) | {"CUDA_VISIBLE_DEVICES": st.sampled_from(["", "3", "0,1"])}
)


@settings(deadline=None, derandomize=True, max_examples=1000)
@given(environ=ENVIRONS, visible=st.integers(0, 8))
def test_rule_1_any_environment_gives_one_visible_device_or_the_users_mistake(environ, visible):
    try:
        device = choose_device(environ, visible)
    except UserError as error:
        assert len(error.problems) == 1 and ("RANK" in str(error) or "WORLD_SIZE" in str(error) or "processes were started" in str(error))
    else:
        local_rank = int(environ.get("LOCAL_RANK", 0))
        alone = visible == 1 and environ.get("CUDA_VISIBLE_DEVICES")
        assert device == ("cpu" if not visible else "cuda:0" if alone else f"cuda:{local_rank}")
        assert not visible or int(device.removeprefix("cuda:")) < visible


@pytest.mark.parametrize(("environ", "is_main"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False)])
def test_the_process_of_rank_0_is_the_main_one(environ, is_main):
    assert is_main_process(environ) == is_main


def test_ranks_set_by_hand_stop_before_anybody_is_waited_for(environ):
    environ.setenv("WORLD_SIZE", "2")
    environ.setenv("RANK", "0")
    with pytest.raises(UserError, match="LOCAL_RANK is missing"):
        settle_place(use_cpu=True)


# --- settling there ----------------------------------------------------------------------------------------------


@pytest.fixture
def environ(monkeypatch):
    """The environment without ranks and launchers' words; threads are as before afterwards."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))] + list(local(0, 1)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    yield monkeypatch
    torch.set_num_threads(threads)


@pytest.fixture
def two_cards(environ):
    """Two visible T4 cards that nothing can be put on; gives the list of CUDA calls made."""
    calls = []

    def pretend(name, answer):
        environ.setattr(torch.cuda, name, lambda *words: calls.append((name, *map(str, words))) or answer)

    pretend("is_available", True)
    pretend("device_count", 2)
    pretend("set_device", None)
    pretend("get_device_name", "Tesla T4")
    pretend("get_device_capability", (7, 5))
    pretend("is_bf16_supported", True)
    pretend("current_device", 0)
    pretend("init", None)
    yield calls
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_own_card_becomes_the_current_device_before_any_other_cuda_call(environ, two_cards, rank):
    for name, value in local(rank, 2).items():
        environ.setenv(name, value)
    place = settle_place()
    assert place == Place(f"cuda:{rank}", rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    describe_place(place)
    choose_compute_type(place, bf16=None, fp16=None)
    asked = [call for call in two_cards if call[0] not in ("device_count", "is_available")]
    assert asked[0] == ("set_device", f"cuda:{rank}")
    assert {word for call in asked for word in call[1:]} == {f"cuda:{rank}"}


def test_what_accelerates_defaults_leak_is_removed(environ):
    leaks = {
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    }
    for name, value in leaks.items():
        environ.setenv(name, value)
    settle_place(use_cpu=True)
    assert not leaks.keys() & os.environ.keys()


def test_the_launchers_word_for_cpu_counts(environ, two_cards):
    environ.setenv("ACCELERATE_USE_CPU", "true")
    assert settle_place().device == "cpu"
    assert ("set_device", "cuda:0") not in two_cards


@pytest.mark.parametrize(("cores", "processes", "threads"), [(8, 1, 8), (8, 2, 4), (2, 4, 1)])
def test_processes_on_a_cpu_share_its_cores(environ, cores, processes, threads):
    environ.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    for name, value in local(0, processes).items():
        environ.setenv(name, value)
    assert settle_place(use_cpu=True).device == "cpu"
    assert torch.get_num_threads() == threads and os.environ["OMP_NUM_THREADS"] == str(threads)


def test_a_launch_is_described_with_its_number_of_processes():
    assert describe_launch(Place("cpu")) == "accelerate launch src/train.py"
    assert describe_launch(Place("cpu", world_size=3)) == "accelerate launch --num_processes 3 src/train.py"


def test_one_process_with_two_cards_says_how_to_use_both(two_cards):
    line = describe_place(settle_place())
    assert "2 GPUs are visible and one is used" in line and "accelerate launch --num_processes 2 src/train.py" in line


def test_two_processes_with_two_cards_say_nothing_about_launching(environ, two_cards):
    for name, value in local(0, 2).items():
        environ.setenv(name, value)
    assert "launch" not in describe_place(settle_place())


def test_data_parallel_is_never_entered(environ, two_cards, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name: toy}}\ndata: {{train: a.jsonl, validation: b.jsonl}}\ntraining: {{output_dir: {tmp_path}}}\n"
    )
    recipe = load_recipe(["--config", str(tmp_path / "recipe.yaml")])
    assert TrainingConfig(output_dir=str(tmp_path)).n_gpu == 2, "the stock arguments would use data parallel"
    AcceleratorState._reset_state(True)
    settle_place()
    arguments = build_arguments(recipe, torch.float16, world_size=1, on_cpu=False)
    assert (arguments.n_gpu, str(arguments.device), arguments.train_batch_size) == (1, "cuda:0", 8)


# --- the compute type --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16", "compute_type"),
    [
        ((7, 0), None, None, torch.float16),
        ((7, 5), None, None, torch.float16),
        ((8, 0), None, None, torch.bfloat16),
        ((9, 0), None, None, torch.bfloat16),
        ((10, 0), None, None, torch.bfloat16),
        (None, None, None, torch.float32),
        ((7, 5), True, None, torch.bfloat16),
        ((9, 0), None, True, torch.float16),
        ((9, 0), False, True, torch.float16),
        ((9, 0), False, False, torch.float32),
        (None, True, None, torch.bfloat16),
        (None, False, False, torch.float32),
    ],
)
def test_the_compute_type_follows_the_card_unless_the_recipe_says_one(monkeypatch, capability, bf16, fp16, compute_type):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    place = Place("cuda:0" if capability else "cpu")
    assert choose_compute_type(place, bf16=bf16, fp16=fp16) == compute_type


def test_half_precision_on_a_cpu_is_refused_by_its_key():
    with pytest.raises(UserError, match=r"^training\.fp16: "):
        choose_compute_type(Place("cpu"), bf16=None, fp16=True)


# --- strays ------------------------------------------------------------------------------------------------------


def test_strays_are_named_with_their_device():
    tensors = {"here": torch.ones(1), "there": torch.ones(1, device="meta")}
    assert find_strays(iter(tensors.items()), "cpu") == ["there on meta"]
    assert find_strays(iter(tensors.items()), "cuda:0") == ["here on cpu", "there on meta"]


@pytest.mark.parametrize("stray", ["weight", "bias", "codes.running"])
def test_a_parameter_or_buffer_elsewhere_stops_the_run_by_name(stray):
    model = torch.nn.Linear(2, 2)
    model.add_module("codes", torch.nn.Module())
    model.codes.register_buffer("running", torch.ones(1))
    check_placement(model_tensors(model), Place("cpu"), what="the model")
    owner, _, name = stray.rpartition(".")
    place = model.get_submodule(owner)
    tensor = getattr(place, name).data.to("meta")
    setattr(place, name, torch.nn.Parameter(tensor) if isinstance(getattr(place, name), torch.nn.Parameter) else tensor)
    with pytest.raises(RuntimeError, match=f"^the model: not on cpu: {stray} on meta$"):
        check_placement(model_tensors(model), Place("cpu"), what="the model")


@pytest.mark.parametrize("hidden", ["CB", "SCB"])
@pytest.mark.parametrize("used", [False, True])
def test_codes_and_scales_that_8_bit_layers_hide_are_looked_at_before_and_after_their_first_use(hidden, used):
    import bitsandbytes

    model = torch.nn.Sequential(bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)).to("cpu")
    if used:
        model(torch.ones(1, 8))
    layer = model[0]
    assert not find_strays(model_tensors(model), "cpu")
    owner = layer.state if used else layer.weight
    setattr(owner, hidden, getattr(owner, hidden).to("meta"))
    assert find_strays(model_tensors(model), "cpu") == [f"0.{hidden} on meta"]


def test_many_strays_are_counted():
    tensors = [(f"t{i}", torch.ones(1, device="meta")) for i in range(8)]
    with pytest.raises(RuntimeError, match="t4 on meta and 3 more$"):
        check_placement(iter(tensors), Place("cpu"), what="the first training batch")
