"""Who talks? The main process alone, in plain lines."""

import logging
import sys
import warnings

import datasets
import transformers

_is_main = True


def quieten(*, is_main: bool) -> None:
    """Lets the main process alone talk and keeps libraries' known, harmless remarks out of its way."""
    global _is_main
    _is_main = is_main
    transformers.logging.set_verbosity(logging.WARNING if is_main else logging.ERROR)
    if not is_main:
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    # Remarks on calls between libraries, which no user can change.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    logging.getLogger("transformers.generation.utils").addFilter(_is_for_the_user)
    # On checkpointing that chooses what it keeps: nothing in a layer is changed in place.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    manifests = logging.getLogger("manifest")  # tells which columns it took
    manifests.setLevel(logging.INFO if is_main else logging.ERROR)
    manifests.addHandler(logging.StreamHandler(sys.stdout))


def _is_for_the_user(remark: logging.LogRecord) -> bool:
    return "Passing `generation_config` together with" not in remark.getMessage()


def say(*lines: str) -> None:
    """Prints lines at once, on the main process only; empty ones are left out."""
    for line in lines:
        if _is_main and line:
            print(line, flush=True)
