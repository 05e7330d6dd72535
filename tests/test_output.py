"""What a run leaves behind is whole or not there; an earlier run is never overwritten."""

import json
import os
import re
from pathlib import Path

import output
import pytest
import toy
import torch
import yaml
from config import ModelConfig, dump_recipe, load_recipe
from device import Place
from faults import UserError
from manifest import Row
from model import load_model, read_base_model
from output import (
    check_files_can_be_read_back,
    compare_recipes,
    describe_gain,
    prepare_output_dir,
    write_json,
    write_results,
    write_text,
)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> Path:
    return toy.build_whisper(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def recipe_for(tmp_path, base_folder):
    """A function that gives the recipe of a run into the folder `out`, with command line words."""
    path = tmp_path / "recipe.yaml"
    data = "data: {train: a.jsonl, validation: {dev: b.jsonl}}"
    path.write_text(f"model: {{name: {base_folder}}}\n{data}\ntraining: {{output_dir: {tmp_path / 'out'}}}\n")
    return lambda *words: load_recipe(["--config", str(path), *words])


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


# --- the folder --------------------------------------------------------------------------------------------------


def test_a_folder_is_made_with_its_parents(tmp_path, recipe_for):
    assert prepare_output_dir(tmp_path / "a" / "b", recipe_for()) == ""
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [".lock"]


@pytest.mark.parametrize("held", ["recipe.yaml", "results.json", "checkpoint-3"])
def test_a_folder_with_an_earlier_run_is_refused_unless_the_recipe_resumes(out, recipe_for, held):
    (out / held).mkdir() if held.startswith("checkpoint") else (out / held).write_text("{}")
    with pytest.raises(UserError) as caught:
        prepare_output_dir(out, recipe_for())
    (problem,) = caught.value.problems
    assert problem.startswith(f"training.output_dir: {out} holds an earlier run ({held}). ") and "--run.resume auto" in problem
    prepare_output_dir(out, recipe_for("--run.resume=auto"))


def test_scoring_never_replaces_the_results_of_training(out, recipe_for):
    (out / "results.json").write_text("{}")
    scoring = recipe_for("--run.resume=auto", "--training.do_train=false")
    assert prepare_output_dir(out, scoring) == "", "those of scoring are"
    (out / "adapter_model.safetensors").write_text("")
    with pytest.raises(UserError, match="holds a trained model, and scoring would replace its results"):
        prepare_output_dir(out, scoring)


@pytest.mark.parametrize("held", [["data_report.json", "data_report.html", ".lock"], ["checkpoint-best"], ["notes.txt", "runs"], []])
def test_what_a_check_leaves_is_no_earlier_run(out, recipe_for, held):
    for name in held:
        (out / name).write_text("")
    assert prepare_output_dir(out, recipe_for()) == ""
    assert {path.name for path in out.iterdir()} == {*held, ".lock"}


def test_a_folder_that_cannot_be_made_or_written_is_the_users_mistake(tmp_path, recipe_for):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError, match=rf"^training\.output_dir: {folder} cannot be written: "):
            prepare_output_dir(folder, recipe_for())


def test_resuming_shows_every_setting_that_differs(out, recipe_for):
    write_text(out / "recipe.yaml", dump_recipe(recipe_for("--lora.r=8")))
    recipe = recipe_for("--run.resume=auto", "--training.max_steps=70", "--lora.r=16", "--data.validation={dev: c.jsonl}")
    assert prepare_output_dir(out, recipe).splitlines() == [
        "differs from the run that is resumed: lora.r: 8 -> 16",
        'differs from the run that is resumed: data.validation: {"dev": {"path": "b.jsonl"}} -> {"dev": {"path": "c.jsonl"}}',
        "differs from the run that is resumed: training.max_steps: -1 -> 70",
    ]


def test_resuming_with_the_same_settings_shows_nothing(out, recipe_for):
    write_text(out / "recipe.yaml", dump_recipe(recipe_for()))
    assert prepare_output_dir(out, recipe_for("--run.resume=auto")) == ""


def test_adapters_against_none_differ(recipe_for):
    saved = yaml.safe_load(dump_recipe(recipe_for()))
    lines = compare_recipes(saved, dump_recipe(recipe_for("--lora=null", "--model.quantization=none")))
    assert "differs from the run that is resumed: lora.r: 32 -> null" in lines


def test_a_resumed_run_without_the_adapter_it_went_on_from_is_refused_in_one_line(out, recipe_for):
    write_text(out / "recipe.yaml", dump_recipe(recipe_for("--model.adapter=runs/first")))
    (out / "checkpoint-3").mkdir()
    with pytest.raises(UserError) as caught:
        prepare_output_dir(out, recipe_for("--run.resume=auto"))
    (problem,) = caught.value.problems
    assert 'model.adapter: "runs/first" -> null; a run goes on with the model it began with' in problem


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n", "a: \0\n"])
def test_resuming_with_a_damaged_recipe_says_so(out, recipe_for, text):
    (out / "recipe.yaml").write_text(text)
    assert prepare_output_dir(out, recipe_for("--run.resume=auto")).startswith(f"warning: {out / 'recipe.yaml'} cannot be read")


# --- files -------------------------------------------------------------------------------------------------------


class DiskFull(OSError):
    pass


@pytest.mark.parametrize("step", ["write", "replace"])
@pytest.mark.parametrize("before", [None, "old"])
def test_a_write_that_fails_leaves_the_old_file_or_none(out, monkeypatch, step, before):
    path = out / "results.json"
    if before:
        path.write_text(before)

    def fail(self, text, **how):
        with open(self, "w") as file:
            file.write(text[:3])
        raise DiskFull

    def fail_to_replace(*_):
        raise DiskFull

    if step == "write":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(os, "replace", fail_to_replace)
    with pytest.raises(DiskFull):
        write_text(path, "new and long")
    assert [(file.name, file.read_text()) for file in out.iterdir()] == ([("results.json", "old")] if before else [])


def test_text_is_written_as_utf_8_into_a_folder_made_for_it(tmp_path):
    write_text(tmp_path / "a" / "b.txt", "é हिन्दी\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == "é हिन्दी\n".encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_no_json(out, number):
    with pytest.raises(ValueError):
        write_json(out / "results.json", {"wer": number})
    assert list(out.iterdir()) == []


# --- before step 1 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True])
def test_files_of_a_base_model_survive_saving(tmp_path, bare):
    folder = toy.build_whisper(tmp_path / "base", text_tokens=50257 if bare else 256, bare_generation_config=bare)
    check_files_can_be_read_back(read_base_model(ModelConfig(name=str(folder), language="fr"), max_new_tokens=225, num_beams=2))


@pytest.mark.parametrize("setting", [{"temperature": 0.5}, {"num_return_sequences": 3}, {"early_stopping": "sometimes"}])
def test_a_generation_config_that_cannot_be_saved_is_refused_in_one_line(base_folder, setting):
    base = read_base_model(ModelConfig(name=str(base_folder)), max_new_tokens=225, num_beams=1)
    for key, value in setting.items():
        setattr(base.generation_config, key, value)
    with pytest.raises(UserError) as caught:
        check_files_can_be_read_back(base)
    (problem,) = caught.value.problems
    assert problem.startswith(f"model.name: the files of {base_folder} cannot be saved: ") and next(iter(setting)) in problem
    assert len(problem.splitlines()) == 1


def test_a_generation_config_that_comes_back_changed_is_refused(base_folder):
    base = read_base_model(ModelConfig(name=str(base_folder)), max_new_tokens=225, num_beams=1)
    base.generation_config._from_model_config = True  # read back without lang_to_id
    with pytest.raises(UserError, match="does not survive saving"):
        check_files_can_be_read_back(base)


# --- results -----------------------------------------------------------------------------------------------------


def scores(wer: float, cer: float) -> dict:
    return {"wer": wer, "cer": cer, "rows_scored": 3, "rows_total": 4, "normalizers": ["marks-kept"]}


RESULTS = {
    "world_size": 2,
    "global_batch_size": 16,
    "quantization": "8bit",
    "compute_type": "bfloat16",
    "baseline": {"dev": scores(50.0, 20.0)},
    "final": {"dev": scores(12.5, 4.0), "other": scores(33.333, 11.0)},
    "train": {"steps": 60},
    "paired_p_value": {},
}
HISTORY = [
    {"step": 1, "loss": 3.0},
    {"step": 30, "eval_dev_wer": 20.0, "eval_other_wer": 40.0},
    {"step": 60, "loss": 1.0},
    {"step": 60, "eval_dev_wer": 12.5, "eval_other_wer": 33.3},
]


def read_card(folder: Path) -> tuple[dict, str]:
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_results_card_and_curves_are_written(out, recipe_for):
    write_results(out, recipe_for(), RESULTS, history=HISTORY)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "curves.png", "results.json"]
    assert json.loads((out / "results.json").read_text()) == RESULTS
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_card_shows_scores_before_and_after_and_what_was_not_measured(out, recipe_for, base_folder):
    write_results(out, recipe_for(), RESULTS, history=HISTORY)
    front, text = read_card(out)
    assert front["library_name"] == "peft" and "base_model" not in front, "the path of a folder says nothing elsewhere"
    assert "| dev | 50.00 | 12.50 | 20.00 | 4.00 | 3 of 4 |" in text
    assert "| other | not measured | 33.33 | not measured | 11.00 | 3 of 4 |" in text
    assert "timestamps of this model are worth little" in text
    assert str(base_folder.parent) not in text and 'from_pretrained("toy", dtype="float32")  # put here' in text
    assert "frozen weights in 8 bit, computed in bfloat16" in text and '"Before" is the score of the untouched model.' in text
    assert "`marks-kept`: lower case and no punctuation" in text and "Language: as each row says." in text


def test_the_card_names_language_base_and_the_adapter_that_was_scored_before(out, recipe_for):
    recipe = recipe_for("--model.name=openai/whisper-tiny", "--model.language=hi", "--model.adapter=runs/first")
    write_results(out, recipe, RESULTS, history=HISTORY)
    front, text = read_card(out)
    assert (front["base_model"], front["language"]) == ("openai/whisper-tiny", ["hi"])
    assert 'from_pretrained("openai/whisper-tiny", dtype="float32")\n' in text and "Language: hi." in text
    assert '"Before" is the score of the adapter `first`' in text


def test_results_are_written_last(out, recipe_for, monkeypatch):
    def fail(*_, **__):
        raise DiskFull

    monkeypatch.setattr(output, "draw_curves", fail)
    with pytest.raises(DiskFull):
        write_results(out, recipe_for(), RESULTS, history=HISTORY)
    assert not (out / "results.json").exists()


def test_a_run_that_only_scores_writes_results_alone(out, recipe_for):
    write_results(out, recipe_for("--training.do_train=false"), RESULTS | {"train": {}, "baseline": {}}, history=[])
    assert [path.name for path in out.iterdir()] == ["results.json"]


@pytest.mark.parametrize("history", [[], HISTORY[:1], HISTORY[1:2]])
@pytest.mark.parametrize("baseline", [{}, {"dev": scores(50.0, 20.0)}])
def test_curves_are_drawn_of_whatever_was_measured(out, history, baseline):
    output.draw_curves(out, history, RESULTS | {"baseline": baseline})
    assert [path.name for path in out.iterdir()] == ["curves.png"]


def test_a_single_loss_is_a_mark(out, monkeypatch):
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    output.draw_curves(out, HISTORY[:1], RESULTS)
    (line,) = drawn[0].axes[0].lines
    assert line.get_marker() not in ("", "None", None)


@pytest.mark.parametrize("words", [[], ["--lora=null", "--model.quantization=none"]], ids=["adapter", "full"])
def test_the_cards_own_lines_transcribe_and_generate_with_language_and_timestamps(tmp_path, recipe_for, monkeypatch, words):
    base_folder = toy.build_whisper(tmp_path / "bare", text_tokens=50257, bare_generation_config=True)
    recipe = recipe_for(f"--model.name={base_folder}", *words)
    base = read_base_model(recipe.model, max_new_tokens=225, num_beams=1)
    out = tmp_path / "out"
    out.mkdir()
    output.save_model(out, load_model(recipe, base, Place("cpu"), compute_type=torch.float32), base)
    write_results(out, recipe, RESULTS, history=HISTORY)
    (code,) = re.findall(r"```python\n(.*?)```", read_card(out)[1], flags=re.DOTALL)
    toy.write_clip(out / "clip.wav")
    monkeypatch.chdir(out)
    names: dict = {}
    exec(code.replace('"bare"', repr(str(base_folder))).replace("generate(features)", "generate(features, max_new_tokens=3)"), names)
    features = names["processor"]([0.1] * 16_000, sampling_rate=16_000, return_tensors="pt").input_features
    for how in ({"language": "fr"}, {"return_timestamps": True}):
        names["model"].eval().generate(features, max_new_tokens=3, **how)


def test_saving_replaces_and_leaves_nothing_beside(out, recipe_for):
    recipe = recipe_for()
    base = read_base_model(recipe.model, max_new_tokens=225, num_beams=1)
    model = load_model(recipe, base, Place("cpu"), compute_type=torch.float32)
    for _ in range(2):
        output.save_model(out, model, base)
    names = {path.name for path in out.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {"processor_config.json", "preprocessor_config.json"} <= names, "converters look for the second"
    assert not [name for name in names if name.startswith(".")]


def test_the_gain_is_told_for_each_set_and_a_loss_plainly():
    first, second = describe_gain(RESULTS | {"baseline": {"dev": scores(10.0, 3.0)}, "paired_p_value": {"dev": 0.04321}})
    assert first.startswith("dev: WER 10.00 -> 12.50 %, CER 3.00 -> 4.00 %") and first.endswith("(3 of 4 rows)")
    assert "training made it worse" in first and "p = 0.0432" in first
    assert second == "other: WER 33.33 %, CER 11.00 % (3 of 4 rows)"
    assert "worse" not in describe_gain(RESULTS)[0] and "chance" not in first
    by_luck = describe_gain(RESULTS | {"paired_p_value": {"dev": 1.0}})[0]
    assert "p = 1.0000, within chance" in by_luck


def rows_with(*texts: str, file: str = "dev.jsonl") -> list[tuple[Row, str, str]]:
    return [(Row(f"{i}.wav", "cat dog", file, i), text, "en") for i, text in enumerate(texts, 1)]


def test_predictions_hold_both_texts_and_the_word_errors_of_every_row(out):
    output.write_predictions(out, "final", {"dev": rows_with("cat dog", "cat\u2028fish", "")})
    lines = (out / "predictions" / "final-dev.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    assert [(row["line"], row["reference"], row["hypothesis"], row["errors"], row["words"]) for row in rows] == [
        (1, "cat dog", "cat dog", 0, 2),
        (2, "cat dog", "cat\u2028fish", 1, 2),
        (3, "cat dog", "", 2, 2),
    ]


def test_predictions_of_the_same_clips_alone_are_compared(out):
    output.write_predictions(out, "baseline", {"dev": rows_with("", "cat\u2028"), "other": rows_with("cat"), "new": rows_with("cat")})
    output.write_predictions(out, "final", {"dev": rows_with("cat dog", "cat"), "other": rows_with("cat", file="o.jsonl")})
    chances = output.compare_predictions(out, ["dev", "other", "new"])
    assert list(chances) == ["dev"] and 0 < chances["dev"] <= 1
