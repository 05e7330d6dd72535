"""README.md says what is true: its commands run, and the keys, files, reasons and messages that it names are the program's own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import config
import fetch_demo
import train
from audio import measure_audio
from config import DataSource
from data_check import check_rows
from hub import open_hub_set
from launching import ROOT, execute, write_recipe
from manifest import KNOWN_COLUMNS, Row, read_manifest
from toy import build_whisper, write_clip, write_speech

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [*re.finditer(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)]
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
PROGRAMS = ("accelerate", "bash", "python", "source", "torchrun", "unset")
# Started for real by test_faults.py (the first two) and by launching.launch, in these words but for port and number.
STARTED_ELSEWHERE = [
    ["accelerate", "launch"],
    ["torchrun", "--standalone", "--nproc_per_node", "2"],
    ["accelerate", "launch", "--config_file", "accelerate_config.yaml"],
    ["python"],
]
# Two of them wait for each other; started for real by test_machines.py, on one machine.
SEVERAL_MACHINES = ("--multi_gpu", "--num_machines", "--machine_rank", "--main_process_ip")
LAUNCHER_OPTIONS = ("--num_processes", "--main_process_port", "--config_file", "--standalone", "--nproc_per_node", *SEVERAL_MACHINES)


def spans(text: str) -> list[str]:
    """What stands between back ticks."""
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PROSE, re.M | re.S).group(1)


def table(title: str, first_column: str) -> list[list[str]]:
    """The rows of the table below a heading whose first column is called so."""
    body = re.search(rf"^\| {first_column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section(title), re.M).group(1)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()]


def commands() -> list[list[str]]:
    """Every command line as words, each once: those of the bash blocks in their order, then those within the text."""
    lines = [line for block in BLOCKS if block[1] == "bash" for line in block[2].splitlines()]
    lines += [span for span in spans(PROSE) if span.split()[0] in PROGRAMS and " " in span]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for number, line in enumerate(words) if line and line not in words[:number]]


def kind(words: list[str]) -> str | None:
    """The rule that a command line falls under; None: there is none."""
    if "src/train.py" in words:
        return "train"
    if words[0] == "bash" and len(words) == 2 and re.fullmatch(r"scripts/\w+\.sh", words[1]):
        return "script"
    if words[:2] == ["python", "scripts/fetch_demo.py"]:
        return "fetch"
    return {"source .venv/bin/activate": "activate", "unset RANK WORLD_SIZE": "unset"}.get(" ".join(words))


def of_kind(name: str) -> list[list[str]]:
    return [words for words in commands() if kind(words) == name]


def split_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """The words in front of src/train.py, and those behind it."""
    place = words.index("src/train.py")
    return words[:place], words[place + 1 :]


# --- commands ----------------------------------------------------------------------------------------------------


def test_every_command_falls_under_a_rule():
    assert [words for words in commands() if kind(words) is None] == []
    assert {kind(words) for words in commands()} == {"train", "script", "fetch", "activate", "unset"}
    assert {block[1] for block in BLOCKS} <= {"bash", "csv", "json", "python"}  # a command must not hide in a block of another kind


def shrink(path: Path, world: Path) -> list[str]:
    """Writes a recipe of configs/ into the toy world, with a toy model and two steps; gives the manifests that it names."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    if recipe["model"]["name"].startswith("openai/"):
        recipe["model"]["name"] = "models/toy"
    if not (world / recipe["model"]["name"]).exists():
        build_whisper(world / recipe["model"]["name"])
    small = {"max_steps": 2, "eval_steps": 1, "save_steps": 1, "warmup_steps": 0, "generation_max_length": 4}
    recipe["training"] |= small | {"dataloader_num_workers": 0, "report_to": "none", "disable_tqdm": True}
    (world / "configs").mkdir(exist_ok=True)
    (world / "configs" / path.name).write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return [source["path"] for source in (*recipe["data"]["train"], *recipe["data"]["validation"].values())]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A working directory with toy recipes, models and speech under the names that the README uses."""
    world = tmp_path_factory.mktemp("readme")
    words = [word for line in of_kind("train") for word in line]
    recipes = {"configs/demo.yaml", *(word for word in words if word.startswith("configs/"))}
    manifests = {path for recipe in sorted(recipes) for path in shrink(ROOT / recipe, world)}
    for path in sorted(manifests | {word for word in words if word.endswith(".jsonl")}):
        count = 16 if Path(path).stem == "train" else 3
        write_speech(world / Path(path).parent, [f"{Path(path).stem} {i}" for i in range(count)], name=Path(path).stem)
    return world


@pytest.fixture(scope="module")
def results(world) -> dict[str, dict | None]:
    """Every training command, run in the README's order by one process, this one: its words -> results.json."""
    found: dict[str, dict | None] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        patch.setattr(config, "DEMO_RECIPE", world / "configs" / "demo.yaml")
        patch.setenv("XDG_CACHE_HOME", str(world / "cache"))
        for words in of_kind("train"):
            argv = split_launcher(words)[1]
            if shlex.join(argv) in found:
                continue
            if argv == ["--help"]:
                with pytest.raises(SystemExit) as ended:
                    train.main(argv)
                assert not ended.value.code
                found["--help"] = None
                continue
            out = Path(config.load_recipe(argv).training["output_dir"])
            if "--run.resume" in argv:
                shutil.rmtree(out / "checkpoint-2")
                (out / "results.json").unlink()
            train.main(list(argv))
            written = out / "results.json"
            found[shlex.join(argv)] = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else None
    return found


def test_every_training_command_runs(results):
    assert len(results) >= 6
    for words, result in results.items():
        assert (result is None) == bool({"--check", "--help"} & {*words.split()}), words
        assert result is None or result["status"] == "finished", words
    for words in of_kind("train"):
        assert shlex.join(split_launcher(words)[1]) in results


def test_the_command_that_only_scores_trains_nothing_and_scores_both_sets(results):
    (result,) = [result for words, result in results.items() if "--training.do_train false" in words]
    assert (result["train"], result["baseline"], {*result["final"]}) == ({}, {}, {"dev", "test"})


def test_every_launcher_is_given_words_that_it_knows():
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    for words in of_kind("train"):
        launcher = split_launcher(words)[0]
        if launcher[:2] == ["accelerate", "launch"]:
            assert launch_command_parser().parse_args(words[2:]).training_script == "src/train.py"
        elif launcher[0] == "torchrun":
            assert get_args_parser().parse_args(words[1:]).training_script == "src/train.py"
        else:
            assert launcher == ["python"]


def new_launchers() -> list[list[str]]:
    launchers = [shlex.join(split_launcher(words)[0]).replace(" --main_process_port 0", "") for words in of_kind("train")]
    found = [words for words in map(shlex.split, dict.fromkeys(launchers)) if words not in STARTED_ELSEWHERE]
    return [words for words in found if not {*words} >= {*SEVERAL_MACHINES}]


@pytest.mark.parametrize("launcher", new_launchers(), ids=shlex.join)
def test_every_launcher_starts_the_program(launcher, tmp_path):
    build_whisper(tmp_path / "model")
    for name in ("train", "dev"):
        write_speech(tmp_path, ["one", "two"], name=name)
    program = str(Path(sys.executable).parent / launcher[0])
    port = ["--main_process_port", "0"] if launcher[0] == "accelerate" else []
    train_words = [str(ROOT / "src" / "train.py"), "--config", str(write_recipe(tmp_path)), "--check"]
    run = execute([program, *launcher[1:], *port, *train_words], CUDA_VISIBLE_DEVICES="")
    assert run.status == 0, run.tail
    assert run.stdout.count("--check: this run can start") == 1


def test_the_commands_for_several_machines_differ_in_the_number_of_the_machine_alone():
    launchers = [shlex.join(split_launcher(words)[0]) for words in of_kind("train") if "--machine_rank" in words]
    assert [re.sub("machine_rank [01] ", "", line) for line in launchers] == [launchers[0].replace("machine_rank 0 ", "")] * 2
    assert all(option in launchers[1] for option in SEVERAL_MACHINES) and "machine_rank 1 " in launchers[1]


def test_every_script_is_valid_and_the_test_command_is_what_ci_runs():
    assert {words[1] for words in of_kind("script")} == {"scripts/quickstart.sh", "scripts/test.sh", "scripts/setup.sh"}
    for words in of_kind("script"):
        assert subprocess.run(["bash", "-n", ROOT / words[1]]).returncode == 0
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text()


def test_setup_makes_what_the_readme_activates():
    assert '-m venv .venv\n' in (ROOT / "scripts" / "setup.sh").read_text()
    assert "${PYTHON:-python3}" in (ROOT / "scripts" / "setup.sh").read_text()  # PYTHON=python3.11 in front is heard


@pytest.fixture
def run_script(tmp_path):
    """Runs a script in a folder where python and accelerate only note how they were called; gives the notes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\nexport PATH="$PWD/bin:$PATH"\n')
    for name in ("python", "accelerate"):
        stub = tmp_path / "bin" / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >> notes\ncase "$1" in scripts/*) exit "$FETCH_STATUS";; esac\n')
        stub.chmod(0o755)

    def run(script: str, *words: str, fetch_status: int = 0) -> list[str]:
        (tmp_path / "notes").unlink(missing_ok=True)
        shutil.copy(ROOT / script, tmp_path / script)
        subprocess.run(["bash", script, *words], cwd=tmp_path, env=os.environ | {"FETCH_STATUS": str(fetch_status)}, check=True)
        return (tmp_path / "notes").read_text().splitlines()

    return run


def test_quickstart_fetches_and_trains_and_goes_on_after_an_interruption(run_script, tmp_path):
    fetch, start = "python scripts/fetch_demo.py", "accelerate launch src/train.py"
    assert [line.strip() for line in run_script("scripts/quickstart.sh")] == [fetch, start]
    out = tmp_path / "runs" / "demo"
    out.mkdir(parents=True)
    (out / "recipe.yaml").touch()
    assert run_script("scripts/quickstart.sh", "--training.seed", "7")[1] == f"{start} --run.resume auto --training.seed 7"
    (out / "results.json").touch()
    assert run_script("scripts/quickstart.sh")[1].strip() == start
    assert not out.exists() and len([*out.parent.glob("demo-*/results.json")]) == 1


@pytest.mark.parametrize(("fetch_status", "marks"), [(0, "not long"), (1, "not long and not fetched")])
def test_the_test_command_runs_the_tests_with_or_without_fetched_data(run_script, fetch_status, marks):
    fetched, tested = run_script("scripts/test.sh", fetch_status=fetch_status)
    assert fetched == "python scripts/fetch_demo.py"
    assert tested.startswith(f"python -m pytest tests -m {marks} -")


def test_the_demo_data_is_fetched_with_the_words_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    languages = []
    monkeypatch.setattr(fetch_demo, "fetch_weights", lambda folder: False)
    monkeypatch.setattr(fetch_demo, "fetch_speech", lambda folder, language: False)
    monkeypatch.setattr(fetch_demo, "write_manifests", lambda folder, *, language, heldout: languages.append(language))
    for words in of_kind("fetch"):
        assert fetch_demo.main(words[2:]) == 0
    assert languages == ["fr"]


# --- names -------------------------------------------------------------------------------------------------------


def key_table(title: str) -> dict[str, str]:
    """Key -> default as written, from the table of a recipe's section."""
    return {key: row[1].strip("`") for row in table(f"`{title}`", "key") for key in spans(row[0])}


def defaults(title: str) -> dict:
    made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config.SECTIONS[title])}
    return made | (config.LORA_DEFAULTS if title == "lora" else {})


OWN_KEYS = {
    "model": {f.name for f in fields(config.ModelConfig)},
    "lora": {*config.LORA_DEFAULTS},
    "data": {f.name for f in fields(config.DataConfig)},
    "run": {f.name for f in fields(config.RunConfig)},
    "training": {*vars(config.TrainingConfig)["__annotations__"]},
}


@pytest.mark.parametrize("title", config.SECTIONS)
def test_the_table_of_a_section_holds_its_keys_with_their_defaults(title):
    written = key_table(title)
    assert {*written} == OWN_KEYS[title]
    assert {f"{title}.{key}" for key in written} <= {*config._known_keys()}
    for key, cell in written.items():
        if cell == "needed":
            assert not defaults(title)[key], key
        else:
            assert config._read_yaml(cell, config._Reader("README.md")) == defaults(title)[key], key


def test_the_table_of_sources_holds_their_keys_with_their_defaults():
    rows = table("Sources", "key")
    written = {key: row[1].strip("`") for row in rows for key in spans(row[0])}
    assert {key: config._read_yaml(cell, config._Reader("README.md")) for key, cell in written.items()} == {
        f.name: f.default for f in fields(config.DataSource)
    }


def test_every_key_in_the_text_is_one_of_the_schema():
    known = {*config._known_keys()}
    words = [word for span in spans(PROSE) for word in span.split()] + [word for line in commands() for word in line]
    options = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--") and word not in LAUNCHER_OPTIONS}
    assert {option for option in options if "." not in option} <= {"config", "check", "help", "language", "lora"}  # --lora null
    keys = {option for option in options if "." in option}
    keys |= {word.rstrip(":") for word in words if re.fullmatch(rf"({'|'.join(config.SECTIONS)})\.\w+:?", word)}
    assert {".".join(key.split(".")[:2]) for key in keys} <= known


def test_every_refused_training_key_is_named():
    named = {span.partition(":")[0] for span in spans(section("`training`").partition("Refused")[2])}
    assert {*config.UNTESTED, *config.FIXED} <= named
    known = {*config._known_keys()} | {*config.OLD_KEYS}
    assert {key for key in named if "." not in key and f"training.{key}" not in known} <= {*config.UNTESTED}


def test_every_lora_key_is_either_named_as_tested_or_as_refused():
    tested, refused = (({*spans(part)}) for part in section("`lora`").split("Refused", 1))
    named = {f.name for f in fields(config.LoraConfig)}
    assert refused & named - {"init_lora_weights"} == {*config.UNTESTED_LORA}
    assert {span.partition(":")[0] for span in tested} & named == named - {*config.UNTESTED_LORA}


def source(*names: str) -> str:
    """Source text with literals that continue on the next line joined."""
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names))


def test_the_reasons_are_those_of_the_report():
    found = {*re.findall(r'return "([a-z_]+)", ', source("src/data_check.py", "src/labels.py"))}
    found |= {*re.findall(r'AudioError\("([a-z_]+)"', source("src/audio.py"))}
    found |= {*re.findall(r'"(bad_field)"', source("src/manifest.py"))}
    assert {reason for row in table("Manifests", "reason") for reason in spans(row[0])} == found
    assert {*re.findall(r'yield "([a-z_]+)", ', source("src/data_check.py"))} <= {*spans(section("Manifests"))}


def test_every_message_is_one_that_is_told():
    own = [str(path.relative_to(ROOT)) for folder in ("src", "scripts") for path in sorted((ROOT / folder).iterdir()) if path.is_file()]
    launcher = Path(find_spec("accelerate").origin).parent / "utils" / "launch.py"
    told = source(*own) + launcher.read_text(encoding="utf-8")
    messages = [message for row in table("When it does not start", "message") for message in spans(row[0])]
    assert len(messages) > 20
    for message in messages:
        pieces = [piece.strip() for piece in re.split(r"\.\.\.|; ", message)]
        assert [piece for piece in pieces if len(piece) > 2 and piece not in told] == [], message


def test_every_file_and_link_is_there():
    pattern = r"(?:(?:src|configs|scripts|tests|\.github|\.ci)/[\w./-]+|requirements\.txt|accelerate_config\.yaml|LICENSE)"
    named = {word for span in spans(PROSE) for word in span.split() if re.fullmatch(pattern, word)}
    named |= {word for line in commands() for word in line if re.fullmatch(pattern, word)}
    named |= {*re.findall(r"\]\(([^)#]+)\)", PROSE)}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    headings = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", PROSE, re.M)}
    assert {*re.findall(r"\]\(#([^)]+)\)", PROSE)} <= headings


def test_every_recipe_is_named():
    assert [path.name for path in (ROOT / "configs").iterdir() if f"`configs/{path.name}`" not in TEXT] == []


# --- manifests, output, credits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "csv"])
def test_the_manifest_shown_is_read_and_every_row_is_good(tmp_path, form):
    for shown, ending in (("json", "jsonl"), ("csv", "csv")):
        (example,) = [block[2] for block in BLOCKS if block[1] == shown]
        (tmp_path / f"train.{ending}").write_text(example, encoding="utf-8")
    for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        write_clip(tmp_path / row["audio"], seconds=row.get("end", 1.0))
    rows, bad = read_manifest(str(tmp_path / f"train.{'jsonl' if form == 'json' else form}"))
    assert [(row.text, row.start, row.extra) for row in rows] == [
        (row.text, row.start, row.extra) for row in read_manifest(str(tmp_path / "train.jsonl"))[0]
    ]
    check = check_rows(
        rows, name="train", reader_bad_rows=bad, find_label_problem=lambda row: None, min_seconds=0.1, max_seconds=30.0, cache_folder=None
    )
    assert (len(check.rows), check.bad_rows, check.warnings) == (3, [], [])
    columns = [column for row in table("Manifests", "column") for column in spans(row[0])]
    assert {*columns} <= {f.name for f in fields(Row)}
    other_names = spans(re.search(r"^Other usual names.*$", section("Manifests"), re.M).group())
    assert {*other_names} <= {name for names in KNOWN_COLUMNS.values() for name in names}


def test_the_lines_that_write_a_hub_folder_write_one_that_is_read(tmp_path, monkeypatch, own_cache):
    (code,) = [block[2] for block in BLOCKS if block[1] == "python"]
    clip = write_clip(tmp_path / "clips" / "1.wav")
    (tmp_path / "my-set" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    clip.unlink()
    (row,), _ = open_hub_set(DataSource(hub="my-set", split="train"), "data.train[0]", audio_column=None, text_column=None).read()
    assert row.text == "hello" and measure_audio(row.sound()).seconds == 0.5


def test_a_run_leaves_the_files_of_the_table(results, world):
    out = world / "runs" / "my-data"
    for row in table("What a run leaves", "file"):
        for name in {*spans(row[0])} - {"stall_report.txt"}:  # after a stall alone
            assert [*out.glob(name.rstrip("/").replace("-N", "-*"))], name


def test_the_keys_of_the_results_are_those_named(results):
    named = {*spans(section("What a run leaves").partition("Keys of `results.json`")[2])}
    result = results["--config configs/my-data.yaml"]
    written = {*result, *result["train"], *result["best"], *result["final"]["dev"]}
    assert written <= named
    assert named - written == {"finished", "stopped_early", "why"}


def test_every_voice_of_the_demo_is_credited():
    for voice, licence, _ in fetch_demo.SPEECH.values():
        assert voice in section("Credits and licences") and licence in section("Credits and licences")


def test_no_placeholder_is_left():
    assert re.findall(r"\b[A-Z]+_FIGURES\b", TEXT) == []
