"""A recipe is read strictly: every mistake is one line with its place and the right word, and all are told at once."""

import json
import re
import string

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import config
from config import Recipe, accumulation_steps, best_metric, build_parser, dump_recipe, language_code, load_recipe
from faults import UserError

GOOD = """\
model:
  name: toy
  language: fr
lora:
  r: 4
data:
  train: train.jsonl
  validation:
    dev: dev.jsonl
run:
  baseline: false
training:
  output_dir: out
  max_steps: 10
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A function that gives the recipe for a text and command line words; the file's name is recipe.yaml."""
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"

    def read_recipe(text: str | bytes, *words: str) -> Recipe:
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return load_recipe(["--config", str(path), *words])

    return read_recipe


@pytest.fixture(scope="module")
def complain(read):
    """A function that gives the problems of a recipe, with the folder of the file left out."""

    def find_problems(text: str | bytes, *words: str) -> list[str]:
        with pytest.raises(UserError) as caught:
            read(text, *words)
        return [re.sub(r"(?<!\S)/\S*/(?=recipe\.yaml)", "", problem) for problem in caught.value.problems]

    return find_problems


def replaced(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


# --- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("max_steps", "max_step", "recipe.yaml:14: training.max_step: unknown key; did you mean training.max_steps?"),
        ("language: fr", "langauge: fr", "recipe.yaml:3: model.langauge: unknown key; did you mean model.language?"),
        ("  r: 4", "  rank: 4\n  alpha: 3", "recipe.yaml:6: lora.alpha: write lora.lora_alpha"),
        ("baseline: false", "seed: 1", "recipe.yaml:11: run.seed: unknown key; did you mean training.seed?"),
        ("max_steps: 10", "use_dora: true", "recipe.yaml:14: training.use_dora: unknown key; did you mean lora.use_dora?"),
        ("lora:", "lra:", "recipe.yaml:4: lra: there is no such section; did you mean lora?"),
        ("training:", "traning:", "recipe.yaml:12: traning: there is no such section; did you mean training?"),
        ("run:", "wandb:", "recipe.yaml:10: wandb: there is no such section"),
        ("run:\n  baseline", "language", "recipe.yaml:10: language: there is no such section; did you mean model.language?"),
        ("train: train.jsonl", "train: [{pth: a}]", "recipe.yaml:7: data.train[0].pth: unknown key; did you mean data.train[0].path?"),
        ("dev: dev.jsonl", "dev:\n      fiel: a", "recipe.yaml:10: data.validation.dev.fiel: unknown key"),
        ("    dev: dev.jsonl", "    dev: {}", "recipe.yaml:9: data.validation.dev.path: is missing; the manifest; or hub: a set on the Hub"),
    ],
)
def test_a_wrong_key_is_told_with_its_line_and_the_nearest_right_one(complain, old, new, problem):
    assert problem in complain(replaced(old, new))


@pytest.mark.parametrize("key", ["foo", "zzz", "x"])
def test_a_key_like_no_other_is_told_without_a_guess(complain, key):
    assert complain(f"{GOOD}  {key}: 3\n") == [f"recipe.yaml:15: training.{key}: unknown key"]


def test_a_key_written_twice_is_told_with_both_lines(complain):
    assert complain(GOOD + "  max_steps: 20\n") == ["recipe.yaml:15: training.max_steps: is there twice (first on line 14)"]


def test_a_section_written_twice_is_told_with_both_lines(complain):
    assert complain(GOOD + "lora:\n  r: 8\n") == ["recipe.yaml:15: lora: is there twice (first on line 4)"]


def test_a_key_written_twice_within_a_list_is_told_by_its_place(complain):
    problems = complain(replaced("train.jsonl", "\n    - path: a.jsonl\n      path: b.jsonl"))
    assert problems == ["recipe.yaml:9: data.train[0].path: is there twice (first on line 8)"]


def test_a_key_written_twice_within_an_override_is_told(complain):
    problems = complain(GOOD, "--data.validation", "{dev: a.jsonl, dev: b.jsonl}")
    assert problems == ["--data.validation:1: dev: is there twice (first on line 1)"]


@pytest.mark.parametrize("section", ["model", "data", "run", "training"])
def test_a_section_that_is_no_mapping_is_told_once(complain, section):
    text = re.sub(rf"^{section}:\n(  .*\n)+", f"{section}: [1]\n", GOOD, flags=re.MULTILINE)
    (problem,) = complain(text)
    assert problem.endswith(f"{section}: a section of keys is expected, not [1]")


@pytest.mark.parametrize(
    ("section", "key", "value", "word"),
    [
        ("model", "load_in_8bit", "true", "model.quantization: 8bit"),
        ("model", "load_in_4bit", "true", "model.quantization: 4bit"),
        ("model", "torch_dtype", "float16", "training.fp16"),
        ("model", "forced_decoder_ids", "null", "model.language and model.task"),
        ("lora", "rank", "8", "lora.r"),
        ("data", "max_duration_in_seconds", "30", "data.max_duration_seconds"),
        ("data", "text_column_name", "sentence", "data.text_column"),
        ("training", "evaluation_strategy", "steps", "training.eval_strategy"),
        ("training", "per_gpu_train_batch_size", "4", "training.per_device_train_batch_size"),
        ("training", "no_cuda", "true", "training.use_cpu"),
        ("training", "warmup_ratio", "0.1", "training.warmup_steps"),
        ("training", "resume_from_checkpoint", "out/checkpoint-3", "run.resume: auto"),
        ("training", "overwrite_output_dir", "true", "run.resume: auto"),
        ("training", "deepspeed", "zero3.json", "one whole copy"),
        ("training", "fsdp", "full_shard", "one whole copy"),
    ],
)
def test_a_key_of_an_older_trainer_is_refused_with_the_word_to_use(complain, section, key, value, word):
    (problem,) = complain(GOOD, f"--{section}.{key}", value)
    assert problem.startswith(f"command line: {section}.{key}: ") and word in problem


def test_every_old_key_is_refused_or_known_only_as_not_set(complain):
    for key in config.OLD_KEYS:
        (problem,) = complain(GOOD, f"--{key}", "1")
        assert problem == f"command line: {key}: {config.OLD_KEYS[key]}"


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("training.max_steps", "many", 'expected int, got "many"'),
        ("training.max_steps", "true", "expected int, got true"),
        ("training.max_steps", "1.5", "expected int, got 1.5"),
        ("training.learning_rate", "[1e-5]", "expected float, got [1e-05]"),
        ("training.bf16", "maybe", 'expected bool, got "maybe"'),
        ("training.eval_strategy", "often", 'expected no | steps | epoch, got "often"'),
        ("training.output_dir", "{a: 1}", 'expected str, got {"a": 1}'),
        ("model.quantization", "16bit", 'expected 8bit | 4bit | none, got "16bit"'),
        ("model.task", "translat", 'expected transcribe | translate, got "translat"'),
        ("model.suppress_tokens", "3", "expected list, got 3"),
        ("model.name", "3", "expected str, got 3"),
        ("lora.r", "big", 'expected int, got "big"'),
        ("lora.bias", "some", 'expected none | all | lora_only, got "some"'),
        ("data.on_bad_row", "keep", 'expected drop | fail, got "keep"'),
        ("data.validation", "[a.jsonl]", 'expected dict, got ["a.jsonl"]'),
        ("run.resume", "always", 'expected never | auto, got "always"'),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_what_was_expected_and_given(complain, key, value, expected):
    assert complain(GOOD, f"--{key}", value) == [f"command line: {key}: {expected}"]


def test_all_problems_of_a_recipe_are_told_at_once_and_each_once(complain):
    text = GOOD.replace("10", "many").replace("r: 4", "r: four").replace("name: toy", "nam: toy").replace("fr", "xx")
    problems = complain(text + "  lr: 3\n  max_steps: 4\n", "--run.max_eval_samples", "0")
    keys = ["training.max_steps", "model.nam", "training.lr"]
    keys += ["lora.r", "training.max_steps", "model.language", "run.max_eval_samples"]
    assert [re.sub(r"^(recipe.yaml:\d+|command line): ([\w.]+): .*", r"\2", problem) for problem in problems] == keys
    assert len(set(problems)) == len(problems)


def test_no_is_norwegian_and_not_false(read):
    assert read(replaced("language: fr", "language: no")).model.language == "no"


@pytest.mark.parametrize(("text", "number"), [("1e-5", 1e-5), ("1E5", 1e5), (".5", 0.5), ("3", 3.0), ("+2.", 2.0)])
def test_numbers_are_read_as_people_write_them(read, text, number):
    assert read(GOOD, "--training.learning_rate", text).training["learning_rate"] == number


@pytest.mark.parametrize("word", ["None", "'None'", "null", "'null'", "~", "''", ""])
@pytest.mark.parametrize(("key", "unset"), [("model.language", None), ("model.adapter", None), ("run.resume", "never")])
def test_none_null_and_empty_mean_not_set(read, key, unset, word):
    section, _, name = key.partition(".")
    text = replaced("  language: fr\n", "").replace(f"{section}:\n", f"{section}:\n  {name}: {word}\n")
    assert value_of(read(text), key) == value_of(read(GOOD, f"--{key}", word), key) == unset


def value_of(recipe: Recipe, key: str):
    section, _, name = key.partition(".")
    part = getattr(recipe, section)
    return part[name] if isinstance(part, dict) else getattr(part, name)


@pytest.mark.parametrize(
    ("key", "default"),
    [("training.max_steps", -1), ("training.seed", 42), ("model.task", "transcribe"), ("run.baseline", True), ("lora.r", 32)],
)
def test_null_for_a_key_that_needs_a_value_is_the_default(read, key, default):
    assert value_of(read(GOOD, f"--{key}", "null"), key) == default


@pytest.mark.parametrize("key", ["training.save_total_limit", "training.generation_max_length", "training.report_to"])
def test_null_for_a_key_that_may_be_null_is_null(read, key):
    assert value_of(read(GOOD), key) is not None
    assert value_of(read(GOOD, f"--{key}", "null"), key) is None


@pytest.mark.parametrize("word", ["Hindi", "hi", "HI", "hindi", " Hindi ", "'hi'"])
def test_a_language_is_its_code_or_its_english_name_in_any_case(read, word):
    assert read(GOOD, "--model.language", word).model.language == "hi"


@pytest.mark.parametrize(("word", "code"), [(None, None), ("None", None), ("Castilian", "es"), ("Mandarin", "zh"), ("xx", "xx")])
def test_language_code_knows_other_names_and_leaves_strange_words_as_they_are(word, code):
    assert language_code(word) == code


def test_an_unknown_language_is_refused_with_nearest_names_and_how_to_borrow(complain):
    (problem,) = complain(replaced("language: fr", "language: hakka"))
    assert problem.startswith("recipe.yaml:3: model.language: ") and "'hakka'" in problem
    assert "nearest: hausa" in problem and "borrow the token of a related language" in problem


def test_a_plain_path_is_a_set_of_that_path(read):
    assert dump_recipe(read(GOOD)) == dump_recipe(
        read(replaced("train.jsonl", "[{path: train.jsonl}]").replace("dev: dev.jsonl", "dev: {path: dev.jsonl}"))
    )


def test_several_training_sets_keep_their_order(read):
    recipe = read(replaced("train.jsonl", "[b.jsonl, {path: a.jsonl}]"))
    assert [source.path for source in recipe.data.train] == ["b.jsonl", "a.jsonl"]


def test_a_plain_validation_path_is_the_set_validation(read):
    assert list(read(GOOD, "--data.validation", "dev.jsonl").data.validation) == ["validation"]


@pytest.mark.parametrize("name", ["train", "a b", "a/b", "_dev", "é", "a.b"])
def test_a_set_whose_name_no_metric_can_have_is_refused(complain, name):
    (problem,) = complain(replaced("dev: dev", f"{name}: dev"))
    assert problem.startswith(f"recipe.yaml:9: data.validation.{name}: ")


# --- the command line --------------------------------------------------------------------------------------------


def test_the_last_override_wins(read):
    assert read(GOOD, "--training.max_steps", "20", "--training.max_steps=30").training["max_steps"] == 30


def test_the_last_override_wins_over_one_of_its_section(read):
    recipe = read(GOOD, "--lora.r", "2", "--lora", "null", "--lora.r", "8")
    assert recipe.lora["r"] == 8
    assert read(GOOD, "--model.quantization", "none", "--lora.r", "2", "--lora", "null").lora is None


@pytest.mark.parametrize("words", [["--training.learning_rate=1e-3"], ["--training.learning_rate", "1e-3"]])
def test_an_override_is_written_with_a_blank_or_an_equals_sign(read, words):
    assert read(GOOD, *words).training["learning_rate"] == 1e-3


def test_a_value_may_hold_equals_signs_and_be_negative(read):
    recipe = read(GOOD, "--training.run_name=a=b", "--training.max_steps", "-1")
    assert (recipe.training["run_name"], recipe.training["max_steps"]) == ("a=b", -1)


def test_an_override_may_be_a_list_or_a_mapping(read):
    recipe = read(GOOD, "--lora.target_modules", "[q_proj, fc1]", "--data.validation", "{a: a.jsonl, b: {path: b.jsonl}}")
    assert recipe.lora["target_modules"] == ["q_proj", "fc1"]
    assert {name: source.path for name, source in recipe.data.validation.items()} == {"a": "a.jsonl", "b": "b.jsonl"}


def test_an_override_may_go_into_a_section_that_the_recipe_lacks(read):
    text = GOOD.replace("lora:\n  r: 4\n", "").replace("run:\n  baseline: false\n", "")
    recipe = read(text, "--run.resume", "auto", "--lora.r", "5")
    assert (recipe.run.resume, recipe.lora["r"]) == ("auto", 5)


def test_an_override_may_add_one_set(read):
    recipe = read(GOOD, "--data.validation.other", "other.jsonl")
    assert list(recipe.data.validation) == ["dev", "other"]


def test_lora_null_with_unquantised_weights_is_full_fine_tuning(read):
    assert read(GOOD, "--lora", "null", "--model.quantization", "none").lora is None


def test_a_misspelt_override_is_told_as_typed(complain):
    problems = complain(GOOD, "--training.max_step", "3")
    assert problems == ["command line: training.max_step: unknown key; did you mean training.max_steps?"]
    assert complain(GOOD, "--foo.bar", "3") == ["command line: foo: there is no such section"]


def test_words_that_are_not_understood_are_all_told(complain):
    problems = complain(GOOD, "stray", "--training.max_steps", "--model.name")
    assert [problem.partition(":")[0] for problem in problems] == ["stray", "--training.max_steps", "--model.name"]
    assert "a value is missing" in problems[1] and "a value is missing" in problems[2]


def test_an_override_that_is_not_yaml_is_told_by_its_key(complain):
    (problem,) = complain(GOOD, "--lora.target_modules", "[q_proj")
    assert problem.startswith("--lora.target_modules:1:8: not valid YAML: ")


def test_a_source_that_the_command_line_put_in_place_is_not_told_by_a_line_of_the_file(complain):
    assert complain(GOOD, "--data.train", "[{path: a.jsonl, weight: 0}]") == ["command line: data.train[0].weight: must be above 0"]


def test_check_is_known_without_a_value(read):
    assert read(GOOD, "--check").check_only and not read(GOOD).check_only


def test_overrides_without_a_config_apply_to_the_demo_recipe():
    recipe = load_recipe(["--training.max_steps", "7"])
    assert recipe.training["max_steps"] == 7
    assert recipe.model.name == yaml.safe_load(config.DEMO_RECIPE.read_text())["model"]["name"]


def test_a_recipe_given_stands_alone(read, complain):
    assert read(GOOD).training["eval_steps"] is None, "the demo recipe sets it"
    missing = complain("model:\n  quantization: none\n")
    assert [problem.split(": ")[1] for problem in missing] == ["model.name", "data.train", "data.validation", "training.output_dir"]


def test_nothing_but_recipe_and_command_line_is_merged(read, tmp_path, monkeypatch):
    assert build_parser().default_config_files == []
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    build_parser.cache_clear()
    config._defaults.cache_clear()
    prefix = build_parser().prog.upper()
    for name in (f"{prefix}_LORA__R", "ACCELERATE_LAUNCH_SRC/TRAIN_LORA__R", "TRAIN_LORA__R", "LORA__R"):
        monkeypatch.setenv(name, "77")
    text = GOOD.replace("lora:\n  r: 4\n", "")
    assert read(text).lora["r"] == config.LORA_DEFAULTS["r"]
    build_parser.cache_clear()


def test_help_offers_no_key_that_is_refused_and_no_way_in_that_is_not_there():
    text = config.describe_keys()
    offered = set(re.findall(r"--([\w.]+)", text))
    refused = {f"training.{key}" for key in (*config.UNTESTED, *config.FIXED)} | {f"lora.{key}" for key in config.UNTESTED_LORA}
    assert not offered & (refused | {*config.OLD_KEYS})
    assert "+" not in "".join(re.findall(r"--\S+", text)) and "Path to a configuration file" not in text
    assert {*config._known_keys()} - refused - {*config.OLD_KEYS} <= offered


def test_a_key_of_one_entry_of_a_list_is_told_how_to_be_given(complain, read):
    (problem,) = complain(replaced("train: train.jsonl", "train: [a.jsonl, b.jsonl]"), "--data.train.weight", "2")
    assert problem == (
        "--data.train.weight: data.train is a list, and its entries have no names here; give all of it, "
        "--data.train '[{path: a.jsonl, weight: 0.5}, b.jsonl]', or edit the recipe"
    )
    recipe = read(GOOD, "--data.train.weight", "2", "--data.validation.dev.text_column", "words")
    assert (recipe.data.train[0].path, recipe.data.train[0].weight) == ("train.jsonl", 2)
    assert (recipe.data.validation["dev"].path, recipe.data.validation["dev"].text_column) == ("dev.jsonl", "words")


def test_help_names_every_section_and_ends_well(capsys):
    with pytest.raises(SystemExit) as ended:
        load_recipe(["--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert all(f"--{section}." in shown for section in config.SECTIONS)


# --- settings that do not go together ----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_automatic_placement_is_refused_by_its_key(complain, word):
    (problem,) = complain(replaced("language: fr", f"device_map: {word}"))
    assert problem.startswith("recipe.yaml:3: model.device_map: ") and "one whole copy" in problem


CHECKPOINTING = "training.gradient_checkpointing_kwargs"


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (["--lora=null"], "lora", "model.quantization: none"),
        (["--lora.task_type=SEQ_2_SEQ_LM"], "lora.task_type", "input_ids"),
        ([f"--{CHECKPOINTING}={{use_reentrant: true}}"], CHECKPOINTING, "convolutions"),
        ([f"--{CHECKPOINTING}.use_reentrant=true"], CHECKPOINTING, "convolutions"),
        ([f"--{CHECKPOINTING}=word"], CHECKPOINTING, "a mapping"),
        (["--lora=null", "--model.quantization=none", "--model.adapter=a"], "model.adapter", "full fine-tuning"),
        (["--training.bf16=true", "--training.fp16=true"], "training.fp16", "choose one"),
        (["--training.ddp_find_unused_parameters=true"], "training.ddp_find_unused_parameters", "leave it out"),
        (["--training.remove_unused_columns=true"], "training.remove_unused_columns", "leave it out"),
        (["--training.label_names=[label]"], "training.label_names", "labels"),
        (["--training.predict_with_generate=false"], "training.predict_with_generate", "generated text"),
        (["--training.metric_for_best_model=werr"], "training.metric_for_best_model", "did you mean dev_wer? there are dev_wer, "),
        (["--training.metric_for_best_model=test_wer"], "training.metric_for_best_model", "did you mean dev_wer?"),
        (["--training.metric_for_best_model=accuracy"], "training.metric_for_best_model", "is not measured; there are dev_wer"),
        (["--training.greater_is_better=true"], "training.greater_is_better", "better when lower"),
        (["--training.eval_strategy=no"], "training.eval_strategy", "load_best_model_at_end"),
        (["--training.eval_strategy=steps"], "training.save_strategy", "eval_strategy (steps)"),
        (["--training.save_strategy=no"], "training.save_strategy", "eval_strategy (epoch)"),
        (["--training.torch_compile=true", "--model.quantization=4bit"], "training.torch_compile", "4-bit weights in 16 bit"),
        (["--training.torch_compile_mode=max-autotune"], "training.torch_compile_mode", "not supported"),
        (["--training.push_to_hub=true"], "training.push_to_hub", "not supported"),
        (["--training.auto_find_batch_size=true"], "training.auto_find_batch_size", "not supported"),
        (["--training.per_device_train_batch_size=0"], "training.per_device_train_batch_size", "at least 1"),
        (["--data.max_duration_seconds=31"], "data.max_duration_seconds", "at most 30"),
        (["--data.max_dropped_share=2"], "data.max_dropped_share", "between 0 and 1"),
        (["--training.generation_max_length=0"], "training.generation_max_length", "at least 1"),
        (["--run.global_batch_size=0"], "run.global_batch_size", "at least 1"),
        (["--run.max_skipped_steps=-1"], "run.max_skipped_steps", "0, which stops at the first"),
        (["--run.global_batch_size=8", "--training.gradient_accumulation_steps=2"], "run.global_batch_size", "accumulation"),
        (
            ["--run.early_stopping_patience=2", "--training.eval_strategy=no", "--training.load_best_model_at_end=false"],
            "run.early_stopping_patience",
            "eval_strategy",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_key_and_reason(complain, words, key, reason):
    (problem,) = complain(GOOD, *words)
    assert problem.startswith(f"command line: {key}: ") or problem.startswith(f"recipe.yaml:12: {key}: ")
    assert reason in problem


STEPS = ["--training.eval_strategy=steps", "--training.save_strategy=steps"]


@pytest.mark.parametrize(
    ("evaluate", "save", "fits"), [(5, 5, True), (5, 10, False), (5, 12, False), (0.2, 0.2, True), (0.1, 0.3, False)]
)
def test_saves_fall_on_evaluations_when_the_best_model_is_kept(read, evaluate, save, fits):
    words = [*STEPS, f"--training.eval_steps={evaluate}", f"--training.save_steps={save}"]
    if fits:
        read(GOOD, *words)
    else:
        with pytest.raises(UserError, match="training.save_steps: must equal eval_steps"):
            read(GOOD, *words)
    read(GOOD, *words, "--training.load_best_model_at_end=false")


@pytest.mark.parametrize("name", ["dev_wer", "eval_dev_wer", "dev_cer_raw", "dev_loss", "other_wer"])
def test_a_measured_score_may_choose_the_best_model(read, name):
    recipe = read(GOOD, "--data.validation.other=o.jsonl", f"--training.metric_for_best_model={name}")
    assert best_metric(recipe) == name.removeprefix("eval_")


def test_the_wer_of_the_first_set_chooses_the_best_model(read):
    assert best_metric(read(GOOD, "--data.validation={b: b.jsonl, a: a.jsonl}")) == "b_wer"


def test_a_recipe_that_only_scores_needs_no_training_set(read):
    assert read(replaced("  train: train.jsonl\n", ""), "--training.do_train=false").data.train == []


@pytest.mark.parametrize(
    ("whole", "world_size", "each", "steps"), [(16, 2, 4, 2), (16, 1, 4, 4), (16, 4, 4, 1), (None, 4, 4, 3), (24, 3, 4, 2)]
)
def test_accumulation_follows_from_the_global_batch_size(read, whole, world_size, each, steps):
    words = [f"--run.global_batch_size={whole}"] if whole else ["--training.gradient_accumulation_steps=3"]
    recipe = read(GOOD, *words, f"--training.per_device_train_batch_size={each}")
    assert accumulation_steps(recipe, world_size) == steps


@pytest.mark.parametrize(("whole", "world_size"), [(16, 3), (4, 2), (15, 1)])
def test_a_global_batch_that_cannot_be_split_is_refused_with_the_sum(read, whole, world_size):
    recipe = read(GOOD, f"--run.global_batch_size={whole}", "--training.per_device_train_batch_size=4")
    with pytest.raises(UserError) as caught:
        accumulation_steps(recipe, world_size)
    (problem,) = caught.value.problems
    assert problem.startswith(f"run.global_batch_size: {whole} is no multiple of {world_size * 4} ({world_size} process")
    assert problem.endswith("per_device_train_batch_size 4)")


# --- the file ----------------------------------------------------------------------------------------------------


def test_a_byte_order_mark_is_no_part_of_the_first_key(read):
    assert dump_recipe(read("\ufeff" + GOOD)) == dump_recipe(read(GOOD))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (GOOD + "  bad: [1, 2\n", "recipe.yaml:16:1: not valid YAML: "),
        (replaced("  r: 4", "\tr: 4"), "recipe.yaml:5:1: not valid YAML: "),
        (replaced("language: fr", "language: fr: fr"), "recipe.yaml:3:15: not valid YAML: "),
        (GOOD + "---\na: 1\n", "recipe.yaml:15:1: not valid YAML: "),
        (GOOD + "  a: *nothing\n", "recipe.yaml:15:6: not valid YAML: "),
        (GOOD + "  a: \0\n", "recipe.yaml:15: not valid YAML: "),
        (replaced("lora:", "lora: &a").replace("r: 4", "r: *a"), "recipe.yaml: not valid YAML: "),
        (GOOD + "  a: " + "[" * 500, "recipe.yaml: not valid YAML: "),
    ],
)
def test_broken_yaml_is_told_by_its_line(complain, text, where):
    (problem,) = complain(text)
    assert problem.startswith(where)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- model\n", "model\n", "3\n"])
def test_a_file_that_is_no_mapping_is_told_what_a_recipe_is(complain, text):
    (problem,) = complain(text)
    assert problem == "recipe.yaml: a recipe is a mapping of the sections model, lora, data, run, training"


def test_a_key_that_is_no_word_is_told_by_its_line(complain):
    assert complain(GOOD + "? [a, b]\n: 3\n") == ["recipe.yaml:15: a key must be a word"]


def test_a_file_in_another_encoding_is_told_by_its_name(complain):
    (problem,) = complain(GOOD.replace("toy", "modèle").encode("latin-1"))
    assert problem.startswith("--config recipe.yaml: cannot be read: ")


@pytest.mark.parametrize("path", ["nowhere.yaml", "."])
def test_a_recipe_that_is_not_there_is_told_by_its_name(tmp_path, path):
    with pytest.raises(UserError, match=re.escape(f"--config {tmp_path / path}: ")):
        load_recipe(["--config", str(tmp_path / path)])


# --- the resolved recipe -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--lora=null", "--model.quantization=none"],
        ["--run.global_batch_size=16"],
        ["--training.gradient_accumulation_steps=4"],
        ["--training.report_to=[tensorboard, wandb]"],
        ["--training.report_to=none", "--training.lr_scheduler_type=cosine", "--training.max_grad_norm=.inf"],
        ["--training.gradient_checkpointing=true", "--training.gradient_checkpointing_kwargs={use_reentrant: false}"],
        ["--training.lr_scheduler_kwargs={num_cycles: 3}", "--training.optim_args=a=b"],
        ["--lora.target_modules=.*decoder.*(q|v)_proj", "--lora.rank_pattern={q_proj: 8}", "--lora.init_lora_weights=gaussian"],
        ["--lora.use_dora=true", "--lora.layers_to_transform=[0, 1]", "--lora.layers_pattern=layers"],
        ["--model.apply_spec_augment=true", "--model.mask_time_prob=0.05", "--model.suppress_tokens=[]"],
        ["--model.language=no", "--data.validation={no: a.jsonl, 'on': b.jsonl, '08': c.jsonl, 1e5: d.jsonl}"],
        ["--training.run_name='1e5'", "--training.output_dir='08'", "--model.name='1_0'"],
        ["--training.do_train=false", "--model.adapter=runs/a"],
        ["--data.max_dropped_share=1", "--data.allow_empty_text=true", "--data.text_column=phrase à dire"],
    ],
)
def test_a_resolved_recipe_reads_as_the_same(read, words):
    recipe = read(GOOD, *words)
    again = read(dump_recipe(recipe))
    assert again == recipe
    assert dump_recipe(again) == dump_recipe(recipe)


# The same in every run; a failure isn't shrunk for minutes.
QUICK = settings(deadline=None, derandomize=True, phases=[Phase.generate])
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
NAMES = st.text(string.ascii_letters + string.digits, min_size=1, max_size=6).filter(lambda name: name != "train")


@settings(QUICK, max_examples=10)
@given(
    texts=st.fixed_dictionaries(dict.fromkeys(["training.run_name", "training.output_dir", "model.name", "data.audio_column"], WORDS)),
    numbers=st.fixed_dictionaries({
        "training.learning_rate": st.floats(1e-9, 1e3),
        "training.max_grad_norm": st.floats(allow_nan=False),
        "training.seed": st.integers(0, 2**64),
        "data.min_duration_seconds": st.floats(0, 30),
    }),
    sets=st.dictionaries(NAMES, WORDS, min_size=1, max_size=3),
)
def test_a_resolved_recipe_reads_as_the_same_whatever_its_values(read, texts, numbers, sets):
    values = texts | numbers | {"data.validation": sets}
    words = {key: json.dumps(value, ensure_ascii=False).replace("Infinity", ".inf") for key, value in values.items()}
    recipe = read(GOOD, *(f"--{key}={word}" for key, word in words.items()))
    again = read(dump_recipe(recipe))
    assert again == recipe
    assert {name: source.path for name, source in again.data.validation.items()} == sets


def test_a_secret_is_neither_taken_nor_told_nor_in_the_resolved_recipe(read, complain):
    (problem,) = complain(GOOD, "--training.hub_token=hf_secret")
    assert problem.startswith("command line: training.hub_token: ") and "hf_secret" not in problem
    recipe = read(GOOD)
    recipe.training["hub_token"] = "hf_secret"
    assert "hub_token" not in dump_recipe(recipe)


def test_a_resolved_recipe_is_complete(read):
    sections = yaml.safe_load(dump_recipe(read(GOOD)))
    for key in config._known_keys():
        section, _, name = key.partition(".")
        assert name in sections[section] or name in config.SECRETS, key


# --- whatever the text -------------------------------------------------------------------------------------------


SIGNS = ["\n", " ", "  ", ":", ": ", "- ", "[", "]", "{", "}", "#", "'", '"', "&a ", "*a", "!", "|", ">", "?", "~", "\t", "é", "\0"]
PIECES = st.sampled_from([*SIGNS, "no", "null", "-1", "1e5", *GOOD.split()]) | WORDS
CHANGES = st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 8), PIECES), min_size=1, max_size=4)


@settings(QUICK, max_examples=150)
@given(changes=CHANGES)
def test_any_text_is_a_recipe_or_the_users_mistake_told_in_single_lines(read, changes):
    text = GOOD
    for at, length, piece in changes:
        text = text[:at] + piece + text[at + length :]
    try:
        recipe = read(text)
    except UserError as error:
        assert error.problems and len(set(error.problems)) == len(error.problems)
        for problem in error.problems:
            assert len(problem.splitlines()) == 1
            assert re.match(r"(--config )?/\S+/recipe\.yaml(:\d+)?(:\d+)?: \S", problem), problem
    else:
        assert isinstance(recipe, Recipe)
        assert read(dump_recipe(recipe)) == recipe


@pytest.fixture(scope="module")
def remembering():
    """The parser judges one value of one key at a time and alike each time, so what it said of a value is not asked twice."""
    parser, said = build_parser(), {}
    parse = parser.parse_object

    def remember(given, **how):
        key = repr(given)
        if key not in said:
            try:
                said[key] = parse(given, **how)
            except Exception as error:
                said[key] = error
        if isinstance(said[key], Exception):
            raise said[key]
        return said[key]

    config._defaults()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "parse_object", remember)
        yield


LINES = GOOD.splitlines()
KEYS = [line.strip().partition(":")[0] for line in LINES]
VALUES = ["", "null", "None", "true", "-1", "0", "1e400", ".nan", "[]", "[1, a]", "{}", "{path: x}", "[[]]", "a b", "é", "'", "*x", "!!python/object:os.system"]


def mutate(lines: list[str], how: str, at: int, other: int) -> list[str]:
    """The lines with the one at a place left out, doubled, after another one, indented, with another value or key, or cut."""
    at %= len(lines)
    key, _, value = lines[at].partition(":")
    indent = key[: len(key) - len(key.lstrip())]
    instead = {
        "out": [],
        "twice": [lines[at]] * 2,
        "after another": [LINES[other % len(LINES)], lines[at]],
        "indented": [" " * (other % 6) + lines[at].lstrip()],
        "value": [f"{key}: {VALUES[other % len(VALUES)]}"],
        "key": [f"{indent}{KEYS[other % len(KEYS)]}:{value}"],
        "cut": [lines[at][: other % (len(lines[at]) + 1)]],
        "sign": [lines[at].replace(" ", SIGNS[other % len(SIGNS)])],
    }[how]
    return lines[:at] + instead + lines[at + 1 :] or [""]


HOW = st.sampled_from(["out", "twice", "after another", "indented", "value", "key", "cut", "sign"])
MUTATIONS = st.lists(st.tuples(HOW, st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=3)


@settings(QUICK, max_examples=2500)
@given(mutations=MUTATIONS)
def test_rule_4_any_mutated_recipe_is_a_recipe_or_the_users_mistake_with_file_and_line(remembering, read, mutations):
    lines = LINES
    for mutation in mutations:
        lines = mutate(lines, *mutation)
    try:
        recipe = read("\n".join(lines))
    except UserError as error:
        for problem in error.problems:
            # Only what is missing altogether has no line.
            assert re.match(r"/\S+/recipe\.yaml(:\d+){1,2}: \S", problem) or "missing" in problem or "a recipe is a mapping" in problem, problem
            assert len(problem.splitlines()) == 1
    else:
        assert isinstance(recipe, Recipe)
# --- sources -----------------------------------------------------------------------------------------------------


HUB = "{hub: a/b, split: train}"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{hub: a/b}", "data.train[0].split: is missing; such as train or test"),
        ("{split: train}", "data.train[0].path: is missing; the manifest; or hub: a set on the Hub"),
        ("{path: a.jsonl, hub: a/b, split: x}", "data.train[0]: has path and hub; leave one of them out"),
        ("{path: a.jsonl, revision: main}", "data.train[0].revision: belongs to sets from the Hub; a manifest has none"),
        ("{hub: a/b, splt: train}", "data.train[0].splt: unknown key; did you mean data.train[0].split?"),
        ("{hub: a/b, split: train, weight: much}", 'data.train[0].weight: expected float, got "much"'),
        ("{hub: a/b, split: train, weight: 0}", "data.train[0].weight: must be above 0"),
        ("{hub: a/b, split: train, task: asr}", 'data.train[0].task: expected transcribe | translate, got "asr"'),
        ("{hub: a/b, split: 5}", "data.train[0].split: expected str, got 5"),
        ("{hub: a/b, split: train, language: hindu}", "data.train[0].language: Whisper has no language 'hindu'; nearest: hindi"),
        ("{path: a.jsonl, speaker_share: [0.8]}", "data.train[0].speaker_share: two numbers are expected"),
        ("{path: a.jsonl, speaker_share: [0.8, 0.2]}", "data.train[0].speaker_share: two numbers are expected"),
        ("{path: a.jsonl, speaker_share: [0, 1.5]}", "data.train[0].speaker_share: two numbers are expected"),
        ("{path: a.jsonl, speaker_share: []}", "data.train[0].speaker_share: two numbers are expected"),
    ],
)
def test_a_source_is_read_strictly(complain, source, problem):
    problems = complain(replaced("train: train.jsonl", f"train: [{source}]"))
    assert [line for line in problems if line.startswith(f"recipe.yaml:7: {problem}")] and len(problems) == 1


def test_a_scored_set_has_no_weight(complain):
    assert complain(replaced("dev: dev.jsonl", "dev: {path: dev.jsonl, weight: 1}")) == [
        "recipe.yaml:9: data.validation.dev.weight: scored sets are read once; leave it out"
    ]


def test_sources_of_both_kinds_come_back_from_a_dumped_recipe(read):
    keys = "hub: a/b, config: hi_in, split: train, weight: 2, language: Hindi, speaker_column: [who, where], speaker_share: [0, 0.8]"
    recipe = read(replaced("train: train.jsonl", f"train: [a.jsonl, {{{keys}}}]"))
    source = recipe.data.train[1]
    assert (source.name, source.language, source.weight) == ("hub:a/b/hi_in/train", "hi", 2.0)
    assert (source.speaker_column, source.speaker_share) == (["who", "where"], [0, 0.8])
    assert recipe.data.train[0].name == "a.jsonl" and list(recipe.data.sources()) == ["data.train[0]", "data.train[1]", "data.validation.dev"]
    assert read(dump_recipe(recipe)).data == recipe.data


STREAM = replaced("train: train.jsonl", f"train: {HUB}\n  streaming: true")
BY_STEPS = "  eval_strategy: steps\n  save_strategy: steps\n"


def test_a_stream_counts_steps_and_comes_from_the_hub(complain, read):
    assert read(STREAM + BY_STEPS).data.streaming
    assert complain(STREAM) == [
        "recipe.yaml:13: training.eval_strategy: is epoch, which a stream has none of (data.streaming); write steps",
        "recipe.yaml:13: training.save_strategy: is epoch, which a stream has none of (data.streaming); write steps",
    ]
    text = STREAM.replace(f"train: {HUB}", f"train: [{HUB}, b.jsonl]") + BY_STEPS
    (problem,) = complain(text)
    assert problem.startswith("recipe.yaml:7: data.train[1].path: data.streaming reads sets from the Hub only")
    (problem,) = complain(STREAM.replace("  streaming: true", "  streaming: true\n  pack: true") + BY_STEPS)
    assert problem.startswith("recipe.yaml:9: data.pack: needs to know the length of every clip, which a stream does not tell")
    (problem,) = complain(STREAM.replace("  max_steps: 10\n", "") + BY_STEPS)
    assert "training.max_steps: needed with data.streaming: a stream has no known length" in problem
