"""Which versions of the libraries is this made for? Those it was tested with; others stop before anything is loaded."""

import platform
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from faults import UserError

# Lowest and highest version tested, both included; None: no newer one is known to break.
TESTED: dict[str, tuple[str, str | None]] = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", None),
    "peft": ("0.21", None),
    "bitsandbytes": ("0.50", None),
    "datasets": ("5.2", None),
    "evaluate": ("0.4", None),
    "jiwer": ("4.0", None),
    "librosa": ("0.11", None),
}


def library_versions() -> dict[str, str]:
    """Library name -> version, Python included; a library that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in TESTED.keys() - {"python"}:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return {name: found[name] for name in TESTED if name in found}


def find_untested(found: dict[str, str]) -> list[str]:
    """One message for each library of the table that is missing in `found` (name -> version) or outside of what was tested."""
    problems = []
    for name, (lowest, highest) in TESTED.items():
        is_range = f"{lowest} to {highest}" if highest else f"{lowest} or later"
        mend = "PYTHON=python3.11 bash scripts/setup.sh" if name == "python" else "pip install -r requirements.txt"
        if name not in found:
            problems.append(f"{name} is not installed, {is_range} is needed: {mend}")
            continue
        # 2.13.1 belongs to 2.13, and so do builds such as 2.13.0+cu130 or 2.13.0a0 of a container.
        release = Version(found[name]).release[:2]
        if release < Version(lowest).release or (highest and release > Version(highest).release):
            problems.append(f"{name} {found[name]} is installed, {is_range} is tested: {mend}")
    return problems


def check_versions() -> None:
    """Raises UserError naming every library of this environment that is outside of the tested versions."""
    problems = find_untested(library_versions())
    if problems:
        raise UserError(*problems)
