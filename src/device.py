"""Where does this process live? One function turns the environment into one device, before any CUDA call."""

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from faults import UserError

ONE_PROCESS = "accelerate launch src/train.py"
LAUNCH = "accelerate launch --num_processes {processes} src/train.py"
# How long ranks look for each other at the start: libraries are imported by then, on a slow disk minutes apart.
MEETING_SECONDS = 120
# A user's own accelerate defaults (mixed precision, dynamo, sharding) must not change what a recipe means.
_LEAKS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


@dataclass(frozen=True)
class Place:
    """Where this process is: `device` is "cuda:N" or "cpu"; the main process has rank 0."""

    device: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0


def is_main_process(environ: Mapping[str, str]) -> bool:
    """Whether this process alone talks; answers before anything else is known."""
    return environ.get("RANK", "0") == "0"


def choose_device(environ: Mapping[str, str], visible_devices: int) -> str:
    """The one device of this process: "cuda:<local rank>", "cuda:0" of a process that sees one masked card, or "cpu".

    Pure: `environ` is the environment, `visible_devices` the number of cards this process sees.
    Raises UserError for ranks set by hand without LOCAL_RANK, and for more local processes than cards.
    """
    world_size = _number(environ, "WORLD_SIZE", 1)
    if "LOCAL_RANK" not in environ and (world_size > 1 or _number(environ, "RANK", 0) > 0):
        raise UserError(
            "LOCAL_RANK is missing, but WORLD_SIZE or RANK is set: the other processes would be waited for in vain. "
            f"Leave the ranks to the launcher: {LAUNCH.format(processes=world_size)}"
        )
    local_rank = _number(environ, "LOCAL_RANK", 0)
    if not visible_devices:
        return "cpu"
    if local_rank < visible_devices and _number(environ, "LOCAL_WORLD_SIZE", 1) <= visible_devices:
        return f"cuda:{local_rank}"
    # One masked card a process, as batch systems and containers hand them out.
    if visible_devices == 1 and environ.get("CUDA_VISIBLE_DEVICES"):
        return "cuda:0"
    raise UserError(
        f"{_number(environ, 'LOCAL_WORLD_SIZE', local_rank + 1)} processes were started for {visible_devices} visible "
        f"GPU{'s' if visible_devices > 1 else ''}: one process a GPU. Start: {LAUNCH.format(processes=visible_devices)}"
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        value = int(environ.get(name, default))
    except ValueError:
        value = -1
    if value < 0:
        raise UserError(f"{name}={environ[name]} in the environment: a whole number is expected; leave it to the launcher")
    return value


def settle_place(*, use_cpu: bool = False) -> Place:
    """Turns this process's environment into its place and makes its card the current device.

    Reads the environment once; removes what a user's accelerate defaults would leak into the recipe; on a CPU shares
    the cores out between the local processes. Raises UserError as `choose_device` does.
    """
    use_cpu = use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    for name in [name for name in os.environ if name.startswith(_LEAKS)]:
        del os.environ[name]
    device = choose_device(os.environ, 0 if use_cpu else torch.cuda.device_count())
    place = Place(
        device=device,
        rank=_number(os.environ, "RANK", 0),
        local_rank=_number(os.environ, "LOCAL_RANK", 0),
        world_size=_number(os.environ, "WORLD_SIZE", 1),
        local_world_size=_number(os.environ, "LOCAL_WORLD_SIZE", _number(os.environ, "WORLD_SIZE", 1)),
    )
    if device == "cpu":
        # Launchers set one thread a process, whatever the machine has.
        threads = max(1, len(os.sched_getaffinity(0)) // place.local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    else:
        torch.cuda.set_device(device)
    return place


def describe_place(place: Place) -> str:
    """One line for the log: how many processes on what, and how to use every card when this is a single process."""
    if place.device == "cpu":
        return f"{place.world_size} process{'es' if place.world_size > 1 else ''} on CPU, {torch.get_num_threads()} threads each"
    line = f"{place.world_size} process{'es, one a GPU' if place.world_size > 1 else ''}: {torch.cuda.get_device_name(place.device)}"
    visible = torch.cuda.device_count()
    if place.world_size == 1 and visible > 1:
        line += f"; {visible} GPUs are visible and one is used. To use all: {LAUNCH.format(processes=visible)}"
    return line


def describe_launch(place: Place) -> str:
    """The command that starts as many processes as there are now."""
    return LAUNCH.format(processes=place.world_size) if place.world_size > 1 else ONE_PROCESS


def choose_compute_type(place: Place, *, bf16: bool | None, fp16: bool | None) -> torch.dtype:
    """The type that frozen weights and products have: the one place where it is decided.

    `bf16` and `fp16` are the recipe's words; a value given is honoured. Otherwise the card's compute capability
    decides: bfloat16 from 8.0 on, float16 below (bfloat16 would be emulated there), float32 on CPU.
    Raises UserError for fp16 on CPU.
    """
    if fp16 and place.device == "cpu":
        raise UserError("training.fp16: half precision needs a GPU; leave it out and this machine trains in float32")
    if bf16 is not None or fp16 is not None:
        return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    if place.device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(place.device) >= (8, 0) else torch.float16


def join_processes(place: Place, *, timeout_seconds: float) -> "Meeting":
    """Starts the process group (NCCL between cards, gloo between CPUs) and gives back the meeting point of all ranks.

    Collectives wait at most `timeout_seconds`. A single process starts nothing.
    """
    if place.world_size == 1:
        return Meeting(place, None)
    address, port = os.environ.get("MASTER_ADDR", ""), _number(os.environ, "MASTER_PORT", 0)
    if not address or not port:
        raise UserError(
            "MASTER_ADDR or MASTER_PORT is not set, so the processes cannot meet. "
            f"Start: {LAUNCH.format(processes=place.world_size)}, or torchrun --standalone"
        )
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=place.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
        cards = _meet(place, store)
    except dist.DistError as error:
        raise UserError(
            f"rank {place.rank} could not meet all of {place.world_size} processes at {address}:{port} within "
            f"{MEETING_SECONDS} s; is the port taken or blocked, or was a process not started? ({str(error).splitlines()[0]})"
        ) from error
    _refuse_shared_cards(cards)
    on_gpu = place.device != "cpu"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device(place.device) if on_gpu else None,
    )
    return Meeting(place, store)


def _meet(place: Place, store: dist.Store) -> list[str]:
    """Waits for every rank; gives the driver's identifier of each rank's card, "cpu" without one, by rank."""
    card = "cpu" if place.device == "cpu" else str(torch.cuda.get_device_properties(place.device).uuid)
    store.set(f"card/{place.rank}", card)
    keys = [f"card/{rank}" for rank in range(place.world_size)]
    store.wait(keys, timedelta(seconds=MEETING_SECONDS))
    return [store.get(key).decode() for key in keys]


def _refuse_shared_cards(cards: list[str]) -> None:
    """Two processes with one masked card each may have been given the same one."""
    if "cpu" not in cards and len(set(cards)) < len(cards):
        raise UserError(
            f"two processes share one GPU (cards by rank: {', '.join(cards)}): one process a GPU. "
            f"Start: {LAUNCH.format(processes=len(set(cards)))}"
        )


class Meeting:
    """Work that the main process does for all ranks: the others poll for its result, inside no collective and no time limit."""

    def __init__(self, place: Place, store: dist.Store | None):
        self.place = place
        self._store = store
        self._count = 0

    def once(self, work: Callable[[], bytes]) -> bytes:
        """Runs `work` (no arguments, gives bytes) on the main process; gives its result on every rank.

        A UserError raised by the work ends the other ranks too, silently: the main process alone talks.
        """
        key = f"once/{self._count}"
        self._count += 1
        if self._store is None:
            return work()
        if self.place.is_main:
            try:
                result = work()
            except UserError:
                self._store.set(key, b"!")
                raise
            self._store.set(key, b"=" + result)
            return result
        while not self._store.check([key]):
            time.sleep(0.2)
        answer = self._store.get(key)
        if answer[:1] == b"!":
            raise UserError()
        return answer[1:]


def peak_memory_gib(place: Place) -> float:
    """The most memory this process has taken, in GiB: reserved by the allocator on a card, resident on a CPU."""
    if place.device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.cuda.max_memory_reserved(place.device) / 2**30


# --- checks ------------------------------------------------------------------------------------------------------


def find_strays(tensors: Iterator[tuple[str, torch.Tensor]], device: str) -> list[str]:
    """Names, with their device, of the tensors that are not on `device`."""
    home = torch.device(device)
    return [f"{name} on {tensor.device}" for name, tensor in tensors if tensor.device != home]


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, and the tensors that 8-bit and 4-bit layers hide in their state (codes and scales)."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        four_bit = getattr(weight, "quant_state", None)
        hidden = [(owner, word, "") for owner in (getattr(module, "state", None), weight) for word in ("CB", "SCB")]
        hidden += [(four_bit, word, "quant_state.") for word in ("absmax", "code", "offset")]
        # The scales of double quantisation are quantised themselves.
        hidden += [(getattr(four_bit, "state2", None), word, "quant_state.state2.") for word in ("absmax", "code")]
        for owner, word, path in hidden:
            tensor = getattr(owner, word, None)
            if isinstance(tensor, torch.Tensor):
                yield f"{name}.{path}{word}", tensor


def check_placement(tensors: Iterator[tuple[str, torch.Tensor]], place: Place, *, what: str) -> None:
    """Raises RuntimeError naming every tensor of `what` that is not on this process's own device."""
    strays = find_strays(tensors, place.device)
    if strays:
        more = f" and {len(strays) - 5} more" if len(strays) > 5 else ""
        raise RuntimeError(f"{what}: not on {place.device}: {', '.join(strays[:5])}{more}")
