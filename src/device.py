"""Where does this process live? One function turns the environment into one device, before any CUDA call."""

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from faults import UserError

ONE_PROCESS = "accelerate launch src/train.py"
LAUNCH = "accelerate launch --num_processes {processes} src/train.py"
_THIS_MACHINE = ("", "127.0.0.1", "localhost", "::1")
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
    Raises UserError for ranks set by hand without LOCAL_RANK, for a launcher of several machines that gave no rank, and for
    more local processes than cards.
    """
    world_size = _number(environ, "WORLD_SIZE", 1)
    if "LOCAL_RANK" not in environ and (world_size > 1 or _number(environ, "RANK", 0) > 0):
        raise UserError(
            "LOCAL_RANK is missing, but WORLD_SIZE or RANK is set: the other processes would be waited for in vain. "
            f"Leave the ranks to the launcher: {LAUNCH.format(processes=world_size)}"
        )
    address = environ.get("MASTER_ADDR", "")
    if not {"LOCAL_RANK", "RANK", "WORLD_SIZE"} & environ.keys() and address not in _THIS_MACHINE:
        raise UserError(
            f"MASTER_ADDR is {address}, but this process was given no rank: each machine would train by itself. "
            "On several machines add --multi_gpu to accelerate launch; else: unset MASTER_ADDR"
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
