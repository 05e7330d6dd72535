"""A row's label is the same ids whatever the batch, made by name for the loaded tokenizer; padding comes from lengths."""

from dataclasses import replace

import pytest
import torch
import toy
from config import ModelConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from labels import LabelBuilder
from manifest import Row
from model import BaseModel, read_base_model, token_id
from scores import decode_ids
from speech import collate
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import shift_tokens_right

# Ids of the 51865-token vocabulary; letters are those of GPT-2: ! is 0, h 71, i 72, the blank 220.
END, START, EN, FR, HI, TRANSLATE, TRANSCRIBE, NO_TIMES = 50257, 50258, 50259, 50265, 50276, 50358, 50359, 50363


def build_base(folder, *, text_tokens=50257, language=None, **changes) -> BaseModel:
    toy.build_whisper(folder, text_tokens=text_tokens, bare_generation_config=True, **changes)
    return read_base_model(ModelConfig(name=str(folder), language=language), max_new_tokens=225, num_beams=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    """A multilingual model with a max_length of 20 in its config, as large-v3 has."""
    return build_base(tmp_path_factory.mktemp("base"), max_length=20)


@pytest.fixture(scope="module")
def english(tmp_path_factory) -> BaseModel:
    """An English-only model: 51864 tokens."""
    return build_base(tmp_path_factory.mktemp("english"), text_tokens=50256)


def row(text: str = "hi", **columns) -> Row:
    return Row("clip.wav", text, "train.jsonl", 1, **columns)


def builder(base: BaseModel, *, language: str | None = "en", task: str = "transcribe", **how) -> LabelBuilder:
    return LabelBuilder(base, ModelConfig(language=language, task=task), **how)


def join(*labels: list[int], start: int = START, pad: int = END) -> dict:
    rest = {"input_features": torch.zeros(80, 3000).numpy(), "row_id": [0], "seconds": 1.0, "language": None, "task": None}
    return collate([{"labels": ids} | rest for ids in labels], start=start, pad=pad)


def batch_of(labels: LabelBuilder, *rows: Row) -> dict:
    config = labels.base.config
    return join(*map(labels.build, rows), start=config.decoder_start_token_id, pad=config.pad_token_id)


# --- ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "ids"),
    [
        (row("hi"), [EN, TRANSCRIBE, NO_TIMES, 220, 71, 72, END]),
        (row("hi", language="fr"), [FR, TRANSCRIBE, NO_TIMES, 220, 71, 72, END]),
        (row("hi", language="Hindi"), [HI, TRANSCRIBE, NO_TIMES, 220, 71, 72, END]),
        (row("hi", language="HI", task="translate"), [HI, TRANSLATE, NO_TIMES, 220, 71, 72, END]),
        (row("hi", language="None"), [EN, TRANSCRIBE, NO_TIMES, 220, 71, 72, END]),
        (row("hi", language=""), [EN, TRANSCRIBE, NO_TIMES, 220, 71, 72, END]),
        (row("!"), [EN, TRANSCRIBE, NO_TIMES, 220, 0, END]),
        (row(""), [EN, TRANSCRIBE, NO_TIMES, END]),
        (row(" \n"), [EN, TRANSCRIBE, NO_TIMES, END]),
    ],
)
def test_golden_labels_of_the_51865_token_vocabulary(base, own, ids):
    assert builder(base).build(own) == ids


def test_the_recipes_language_and_task_are_for_rows_without_their_own(base):
    labels = builder(base, language="fr", task="translate")
    assert labels.build(row())[:2] == [FR, TRANSLATE]
    assert labels.build(row(language="en", task="transcribe"))[:2] == [EN, TRANSCRIBE]
    assert (labels.language_of(row()), labels.task_of(row())) == ("fr", "translate")


def test_ids_are_looked_up_by_name_in_a_vocabulary_with_one_language_more(tmp_path):
    base = build_base(tmp_path, languages=100)
    assert base.config.vocab_size == 51866
    assert builder(base).build(row()) == [EN, TRANSCRIBE + 1, NO_TIMES + 1, 220, 71, 72, END]
    assert builder(base, language="yue").build(row())[0] == 50358


@pytest.mark.parametrize("text", ["hello", " hello", "hello ", "\u3000hello\n", "\thello"])
def test_a_transcript_is_stripped_and_given_one_leading_blank(base, text):
    labels = builder(base)
    assert labels.tokenizer.decode(labels.build(row(text))[3:-1]) == " hello"


def test_a_name_the_tokenizer_lacks_is_no_other_token(base):
    for name in ("<|xx|>", "<|notimestamp|>", ""):
        with pytest.raises(KeyError):
            token_id(base.processor.tokenizer, name)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("<|>/.0123en ") | st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["<|en|>", "<|0.00|>"]))
def test_a_text_that_is_not_refused_has_no_special_token_among_its_ids(base, text):
    labels = builder(base, allow_empty_text=True)
    ids = labels.build(row(text))
    if labels.find_problem(row(text)) is None:
        assert all(token < END for token in ids[3:-1])
        assert labels.tokenizer.decode(ids[3:-1]).strip() == text.strip()


# --- batches -----------------------------------------------------------------------------------------------------


ROWS = [row("hello world"), row("hi", language="fr"), row("", language="hi", task="translate"), row("a longer text of another length")]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_decoder_hears_exactly_one_start_token_and_then_the_labels(base, count):
    batch = batch_of(builder(base), *ROWS[:count])
    inputs, labels = batch["decoder_input_ids"], batch["labels"]
    assert (inputs == START).sum(dim=1).tolist() == [1] * count and (inputs[:, 0] == START).all()
    assert not (labels == START).any()
    assert torch.equal(inputs, shift_tokens_right(labels, base.config.pad_token_id, base.config.decoder_start_token_id))


def test_labels_begin_with_language_task_and_no_timestamps_and_end_with_the_end_then_minus_100(base):
    labels = batch_of(builder(base), *ROWS)["labels"]
    assert labels[:, 0].tolist() == [EN, FR, HI, EN]
    assert labels[:, 1].tolist() == [TRANSCRIBE, TRANSCRIBE, TRANSLATE, TRANSCRIBE]
    assert (labels[:, 2] == NO_TIMES).all()
    for own, ids in zip(ROWS, labels, strict=True):
        length = len(builder(base).build(own))
        assert ids[length - 1] == END and (ids[:length] != -100).all() and (ids[length:] == -100).all()


def test_padding_comes_from_lengths_and_not_from_the_pad_id(base):
    assert base.config.pad_token_id == END
    labels = join([EN, END, END], [EN, 1, 2, 3, END])["labels"]
    assert labels.tolist() == [[EN, END, END, -100, -100], [EN, 1, 2, 3, END]]


def test_a_rows_labels_do_not_depend_on_its_batch(base):
    labels = builder(base)
    together = batch_of(labels, *ROWS)["labels"]
    for own, ids in zip(ROWS, together, strict=True):
        (alone,) = batch_of(labels, own)["labels"]
        assert torch.equal(ids[ids != -100], alone)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>hello<|endoftext|>",
        "<|en|>hello",
        "hello<|endoftext|>",
        "<|0.00|> hello <|1.20|>",
        "<|anything else|>",
    ],
)
def test_a_text_that_carries_special_tokens_is_a_bad_row(base, text):
    reason, detail = builder(base).find_problem(row(text))
    assert reason == "special_tokens" and "<|" in detail


@pytest.mark.parametrize("text", ["hello", "a <b> c", "2 < 3 | 4 > 1", "<UNK>", "|>", "अ", "0.00"])
def test_an_ordinary_text_is_no_problem(base, text):
    assert builder(base).find_problem(row(text)) is None


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_an_empty_text_is_a_bad_row_unless_the_recipe_teaches_silence(base, text):
    assert builder(base).find_problem(row(text))[0] == "empty_text"
    assert builder(base, allow_empty_text=True).find_problem(row(text)) is None


@pytest.mark.parametrize(("letters", "fits"), [(30, True), (443, True), (444, False)])
def test_a_labels_limit_is_the_models_positions_whatever_its_max_length(base, letters, fits):
    problem = builder(base).find_problem(row("a" * letters))
    assert problem is None if fits else problem == ("label_too_long", "449 tokens, the model takes 448")


def test_an_unknown_language_of_a_row_is_a_bad_row_with_nearest_names(base):
    reason, detail = builder(base).find_problem(row(language="hakka"))
    assert reason == "unknown_language" and "'hakka'; nearest: hausa" in detail


def test_a_language_whisper_knows_and_this_model_does_not_is_told_so(base):
    assert builder(base).find_problem(row(language="yue")) == ("unknown_language", "this model has no token for yue")


@pytest.mark.parametrize("language", [None, "None", ""])
def test_a_row_without_a_language_needs_the_recipes(base, language):
    reason, detail = builder(base, language=None).find_problem(row(language=language))
    assert reason == "unknown_language" and "model.language is not set" in detail
    assert builder(base).find_problem(row(language=language)) is None


# --- English-only models -----------------------------------------------------------------------------------------


def test_an_english_only_model_takes_neither_language_nor_task(english):
    labels = builder(english, language=None)
    assert english.config.vocab_size == 51864 and not labels.is_multilingual
    for own in (row(), row(language="en"), row(language="English", task="transcribe")):
        assert labels.find_problem(own) is None
        assert labels.build(own) == [50362, 220, 71, 72, 50256]
        assert batch_of(labels, own)["decoder_input_ids"].tolist() == [[50257, 50362, 220, 71, 72]]


@pytest.mark.parametrize("columns", [{"language": "fr"}, {"task": "translate"}, {"language": "hakka"}])
def test_an_english_only_model_refuses_other_languages_and_tasks(english, columns):
    reason, detail = builder(english, language=None).find_problem(row(**columns))
    assert reason == "unknown_language" and "English only" in detail


# --- whatever the row --------------------------------------------------------------------------------------------

CODES = st.sampled_from(["hi", "Hindi", "en", "yue", "Castilian", None, "", "xx"])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(spare=st.integers(-3, 3), language=CODES, letter=st.sampled_from("aé語"))
def test_rule_6_a_label_is_refused_from_the_first_token_that_has_no_position(base, spare, language, letter):
    labels = builder(base)
    each, prefix = len(letter.encode()), 3  # the toy's tokens are bytes
    room = labels.max_length - prefix - 2 + spare  # the blank in front, the end behind
    own = row("b" * (room % each) + letter * (room // each), language=language)
    problem = labels.find_problem(own)
    if language in ("yue", "xx"):  # this vocabulary has no Cantonese
        assert problem[0] == "unknown_language"
    else:
        assert len(labels.build(own)) == 448 + spare
        assert (problem or ("",))[0] == ("label_too_long" if spare > 0 else "")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40), language=CODES, task=st.sampled_from(["transcribe", "translate", None]))
def test_rule_10_any_label_that_is_not_refused_reads_as_its_text_language_and_task(base, text, language, task):
    labels = builder(base)
    own = row(text, language=language, task=task)
    if labels.find_problem(own):
        return
    ids = labels.build(own)
    assert decode_ids([ids], labels.tokenizer) == [text.strip()]
    code = {"hi": "hi", "Hindi": "hi", "Castilian": "es"}.get(language, "en")
    assert labels.tokenizer.convert_ids_to_tokens(ids[:3]) == [f"<|{code}|>", f"<|{task or 'transcribe'}|>", "<|notimestamps|>"]
# --- translation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "task", "rows", "told"),
    [
        ((32, 4), "translate", [row()], True),
        ((32, 4), "transcribe", [row(), row(task="translate")], True),
        ((32, 2), "translate", [row()], True),
        ((32, 4), "transcribe", [row()], False),
        ((32, 4), "translate", [row(task="transcribe")], False),
        ((32, 32), "translate", [row()], False),
    ],
)
def test_translation_by_a_model_whose_decoder_was_cut_down_is_warned_of(base, layers, task, rows, told):
    labels = builder(base, task=task)
    sizes = dict(zip(("encoder_layers", "decoder_layers"), layers, strict=True))
    labels.base = replace(base, config=WhisperConfig(**sizes))
    lines = labels.describe_translation(rows)
    assert [line.startswith("warning: rows have the task translate") for line in lines] == [True] * told


# --- texts that share a window -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "task", "texts", "joined"),
    [
        ("en", "transcribe", ["Hi.", " you\n"], " Hi. you"),
        ("en", "transcribe", ["", "Hi.", " ", "you"], " Hi. you"),
        ("en", "transcribe", ["", " "], ""),
        ("zh", "transcribe", ["你好。", "世界"], " 你好。世界"),
        ("yue", "transcribe", ["你好", "世界"], " 你好世界"),
        ("ja", "transcribe", ["使うのは", "AI", "です"], " 使うのはAIです"),
        ("ja", "transcribe", ["AI", "GPT"], " AI GPT"),
        ("ja", "translate", ["Hi.", "you"], " Hi. you"),
        ("ko", "transcribe", ["안녕", "하세요"], " 안녕 하세요"),
        ("th", "transcribe", ["สวัสดี", "ครับ"], " สวัสดี ครับ"),
        (None, "transcribe", ["Hi.", "you"], " Hi. you"),
    ],
)
def test_texts_of_one_window_are_joined_as_their_language_is_written(base, english, tmp_path, language, task, texts, joined):
    model = english if language is None else build_base(tmp_path, languages=100) if language == "yue" else base
    labels = builder(model, language=language, task=task)
    rows = [row(text) for text in texts]
    ids = labels.build(*rows)
    prefix = labels.prefix(rows[0])
    assert ids[: len(prefix)] == prefix and ids[-1] == labels.end
    assert labels.tokenizer.decode(ids[len(prefix) : -1]) == joined


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.text(st.sampled_from("aé .'。你") | st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=4), st.sampled_from(["en", "ja", "th"]))
def test_a_window_has_no_more_tokens_than_its_texts_are_counted_for(base, texts, language):
    labels = builder(base, language=language)
    rows = [row(text) for text in texts]
    assert len(labels.build(*rows)) <= len(labels.prefix(rows[0])) + sum(map(labels.count_tokens, rows)) + 1
    assert len(labels.build(rows[0])) <= len(labels.prefix(rows[0])) + labels.count_tokens(rows[0]) + 1
