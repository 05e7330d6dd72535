"""Who talks? The main process alone, in plain lines."""

import logging
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
    # 8-bit layers tell in every process that their input is cast, which is what they are for.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")


def say(*lines: str) -> None:
    """Prints lines at once, on the main process only; empty ones are left out."""
    for line in lines:
        if _is_main and line:
            print(line, flush=True)
