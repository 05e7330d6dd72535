"""Libraries outside of the tested versions are named before anything is loaded; the ranges are the same wherever they are written."""

import json
import re
import sys

import pytest
from packaging.version import Version

import versions
from faults import UserError
from launching import ROOT
from versions import TESTED, check_versions, find_untested, library_versions

LOWEST = {name: f"{lowest}.0" for name, (lowest, _) in TESTED.items()}


def test_what_is_installed_here_is_tested():
    found = library_versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found.keys() == TESTED.keys()
    check_versions()


@pytest.mark.parametrize("found", ["2.11.0", "2.13.9", "2.13.0+cu130", "2.12.0a0+git1"])
def test_patches_and_builds_belong_to_their_version(found):
    assert find_untested(LOWEST | {"torch": found}) == []


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("python", "3.10.12", "3.11 to 3.12 is tested: PYTHON=python3.11 bash scripts/setup.sh"),
        ("python", "3.13.0", "3.11 to 3.12 is tested"),
        ("torch", "2.10.1", "2.11 to 2.13 is tested: pip install -r requirements.txt"),
        ("torch", "2.14.0", "2.11 to 2.13 is tested"),
        ("torch", "3.0.0", "2.11 to 2.13 is tested"),
        ("transformers", "4.57.0", "5.17 to 5.24 is tested"),
        ("transformers", "5.100.0", "5.17 to 5.24 is tested"),
        ("peft", "0.9.0", "0.21 or later is tested"),
    ],
)
def test_a_version_outside_is_named_with_library_range_and_what_to_do(name, found, said):
    (problem,) = find_untested(LOWEST | {name: found})
    assert problem.startswith(f"{name} {found} is installed, {said}")


def test_newer_versions_of_libraries_without_an_upper_end_pass():
    assert find_untested(LOWEST | {"peft": "1.0.0", "bitsandbytes": "0.60.0"}) == []


def test_all_problems_are_told_at_once(monkeypatch):
    monkeypatch.setattr(versions, "library_versions", lambda: {n: v for n, v in LOWEST.items() if n != "jiwer"} | {"torch": "2.1.0"})
    with pytest.raises(UserError) as caught:
        check_versions()
    assert [problem.split()[0] for problem in caught.value.problems] == ["torch", "jiwer"]


def test_requirements_pin_versions_of_the_table():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))
    assert find_untested({"python": "3.11.0"} | pins) == []
    for name, (lowest, highest) in TESTED.items():
        if name != "python":
            # Nothing newer than what is pinned can have been tested, and nothing older where no range was.
            assert Version(pins[name]).release[:2] == Version(highest or lowest).release


@pytest.mark.parametrize("file", ["README.md", "requirements.txt"])
def test_the_ranges_that_are_written_are_those_of_the_table(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    (line,) = re.findall(r"^(?:Tested together|# Tested together).*$", text, re.M)
    for name in ("torch", "transformers"):
        assert f"{name} {TESTED[name][0]} to {TESTED[name][1]}" in line
    assert f"Python {TESTED['python'][1]}" in line
    assert f"Python {TESTED['python'][0]}" in text


def test_the_notebook_keeps_a_torch_of_the_table():
    cells = json.loads((ROOT / "scripts" / "two_t4.ipynb").read_text(encoding="utf-8"))["cells"]
    source = "".join(line for cell in cells for line in cell["source"])
    assert all(end.replace(".", ", ") in source or end in source for end in TESTED["torch"])
