"""Scores: normalising, error rates of whole sets, decoding, and that nothing outside the texts has a say."""

import os
import subprocess
import sys
import unicodedata
import zlib
from pathlib import Path

import jiwer
import numpy as np
import pytest
from hypothesis import given, settings, strategies

import scores
from scores import SCORE_NAMES, compute_scores, count_word_errors, decode_ids, normalize, normalizer_name, paired_p_value

HINDI = "मेरी किताब कहाँ है"
LANGUAGES = ["en", "hi", "ar", "th", "de", "tr", "el", None]

of_whole_sets = settings(max_examples=25, deadline=None)  # a set takes 50 ms, most of it evaluate's

texts = strategies.text(max_size=20)
plain_words = strategies.lists(strategies.sampled_from("a b c भाषा है é".split()), min_size=1, max_size=8).map(" ".join)
rows = strategies.lists(strategies.tuples(plain_words | strategies.just(""), plain_words | strategies.just("")), min_size=1, max_size=8)


def score(pairs, language="de"):
    references, hypotheses = zip(*pairs)
    return compute_scores(references, hypotheses, languages=[language] * len(pairs))


def error_rates(pairs, language="de"):
    result = score(pairs, language)
    return {name: result[name] for name in SCORE_NAMES}


# Normalising: only case, punctuation and invisible characters change.


@pytest.mark.parametrize(
    "language, text, expected",
    [
        ("hi", HINDI, HINDI),
        ("hi", "मेरी किताब, कहाँ है।", HINDI),
        ("hi", "विद्\u200dया", "विद्या"),
        ("th", "ภาษาไทยที่นี่", "ภาษาไทยที่นี่"),
        ("ar", "العَرَبِيَّةُ", "العَرَبِيَّةُ"),
        ("ar", "كيف حالك؟", "كيف حالك"),
        ("fa", "می\u200cخواهم", "میخواهم"),
        ("ta", "நன்றி!", "நன்றி"),
        ("bo", "བོད་སྐད།", "བོད སྐད"),
        ("de", "Er hat zwanzig Äpfel.", "er hat zwanzig äpfel"),
        ("de", "Maße", "maße"),
        ("de", "Do\u00adnau-Schiff", "donau schiff"),
        ("fr", "L’été", "l été"),
        ("fr", "l'été", "l été"),
        ("fr", "Cafe\u0301 nai\u0308ve", "café naïve"),
        ("fr", "«\u00a0Oui\u202f!\u00a0»", "oui"),
        ("es", "¿Qué\ttal?\n", "qué tal"),
        ("tr", "IŞIK İstanbul", "ışık istanbul"),
        ("turkish", "DİŞ", "diş"),
        ("el", "ΟΔΟΣ, ΟΔΟΣ", "οδος οδος"),
        ("ja", "こんにちは、世界。", "こんにちは 世界"),
        (None, "Café naïve", "café naïve"),
        (None, "ok ❤\ufe0f 5 € \ufffd", "ok 5"),
        (None, "e\u200d\u0301", "é"),
        (None, " ... ", ""),
        ("en", "I'm 20", "i am 20"),
        ("English", "Café, twenty dollars!", "cafe $20"),
        ("en", "colour", "colour"),
        ("en", "[laughter] hmm", ""),
    ],
)
def test_normalize(language, text, expected):
    assert normalize(text, language) == expected


@pytest.mark.parametrize("text, words", [(HINDI, 4), ("ภาษาไทยที่นี่", 1), ("العَرَبِيَّةُ", 1), ("Café naïve", 2)])
def test_words_stay_whole_where_marks_matter(text, words):
    for language in ["hi", "th", "ar", "fr", None]:
        assert len(normalize(text, language).split()) == words


@pytest.mark.parametrize(
    "language, name",
    [
        ("en", "whisper-english-without-spelling-table"),
        ("English", "whisper-english-without-spelling-table"),
        ("hi", "marks-kept"),
        ("german", "marks-kept"),
        (None, "marks-kept"),
        ("az", "marks-kept-dotless-i"),
    ],
)
def test_normalizer_name(language, name):
    assert normalizer_name(language) == name


# Not for English: Whisper's rules read '½' as 'one 2' and that, in a second pass, as '12'.
@settings(max_examples=1000, deadline=None)
@given(texts, strategies.sampled_from([language for language in LANGUAGES if language != "en"]))
def test_normalizing_twice_changes_nothing_more(text, language):
    once = normalize(text, language)
    assert normalize(once, language) == once


@settings(deadline=None)
@given(texts, strategies.sampled_from(LANGUAGES))
def test_composed_and_decomposed_text_are_the_same(text, language):
    assert normalize(unicodedata.normalize("NFD", text), language) == normalize(unicodedata.normalize("NFC", text), language)


@settings(deadline=None)
@given(strategies.text(strategies.characters(categories=["L", "M"]), max_size=20))
def test_no_accent_or_vowel_sign_is_lost(text):
    def marks(of):
        decomposed = unicodedata.normalize("NFD", of.lower())
        return [c for c in decomposed if unicodedata.category(c)[0] == "M" and "VARIATION SELECTOR" not in unicodedata.name(c, "")]

    assert sorted(marks(normalize(text, "hi"))) == sorted(marks(unicodedata.normalize("NFC", text)))


# Error rates


def test_a_wrong_vowel_sign_is_an_error():
    assert score([(HINDI, HINDI.replace("मेरी", "मेरा"))], "hi")["wer"] == 25.0


def test_rates_are_percent_of_the_whole_set():
    result = score([("a b c d e f g h i j", "a b c d e f g h i x"), ("a", "b")])
    assert result["wer"] == result["wer_raw"] == pytest.approx(100 * 2 / 11)
    assert result["cer"] == pytest.approx(100 * 2 / 20)  # blanks between words are characters


def test_composed_and_decomposed_text_score_zero():
    assert set(error_rates([("été", unicodedata.normalize("NFD", "été"))], "fr").values()) == {0.0}


def test_english_rules_apply_to_english_rows_only():
    result = compute_scores(["I'm 20", "Äpfel"], ["I am twenty", "apfel"], languages=["en", "de"])
    assert result["wer"] == 25.0
    assert result["wer_raw"] == pytest.approx(100 * 4 / 3)
    assert result["normalizers"] == ["marks-kept", "whisper-english-without-spelling-table"]


def test_raw_rates_keep_case_and_punctuation():
    result = score([(" Ja, gut. ", "ja gut")])
    assert result["wer"] == result["cer"] == 0.0
    assert result["wer_raw"] == 100.0
    assert result["cer_raw"] == pytest.approx(100 * 3 / 8)


@pytest.mark.parametrize(
    "pairs, wer, empty",
    [
        ([("", "")], 0.0, 1),
        ([("", "vielen dank")], 100.0, 1),
        ([("", "vielen dank"), ("...", "")], 100.0, 2),
        ([("", "x"), ("a", "a")], 100.0, 1),
        ([("", "x y z"), ("a b", "a c")], 200.0, 1),
        ([("", ""), ("a b", "a")], 50.0, 1),
        ([("a b", "")], 100.0, 0),
    ],
)
def test_empty_references_add_what_was_heard_as_insertions(pairs, wer, empty):
    result = score(pairs)
    assert result["wer"] == wer
    assert result["empty_references"] == empty
    assert result["rows_scored"] == len(pairs)


@of_whole_sets
@given(strategies.lists(strategies.tuples(plain_words, plain_words), min_size=1, max_size=8))
def test_equals_jiwer_where_every_reference_has_words(pairs):
    references, hypotheses = map(list, zip(*pairs))
    result = score(pairs)
    assert result["wer_raw"] == pytest.approx(100 * jiwer.wer(references, hypotheses))
    assert result["cer_raw"] == pytest.approx(100 * jiwer.cer(references, hypotheses))


@of_whole_sets
@given(rows, strategies.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(pairs, generator):
    shuffled = generator.sample(pairs, len(pairs))
    assert score(shuffled) == score(pairs)


@of_whole_sets
@given(rows, rows)
def test_parts_weighted_by_their_words_give_the_whole(one, other):
    def words(pairs):
        return sum(len(reference.split()) for reference, _ in pairs)

    one, other = one + [("a", "a")], other + [("a", "b")]  # a part without any word has no weight
    whole = score(one)["wer"] * words(one) + score(other)["wer"] * words(other)
    assert score(one + other)["wer"] == pytest.approx(whole / words(one + other))


@of_whole_sets
@given(rows)
def test_a_set_scored_twice_over_keeps_its_rates(pairs):
    assert error_rates(pairs * 2) == error_rates(pairs)


@of_whole_sets
@given(strategies.lists(texts, min_size=1, max_size=5), strategies.sampled_from(LANGUAGES))
def test_identical_texts_score_zero_in_every_language(lines, language):
    assert set(error_rates([(line, line) for line in lines], language).values()) == {0.0}


def test_half_a_surrogate_pair_does_not_end_the_evaluation():
    assert score([("ja \ud83d", "ja")])["wer"] == 0.0


@pytest.mark.parametrize("hypotheses, languages, limits", [(["a"], None, None), (["a", "b"], ["de"], None), (["a", "b"], None, [True])])
def test_columns_of_different_length_are_refused(hypotheses, languages, limits):
    with pytest.raises(ValueError, match="rows"):
        compute_scores(["a", "b"], hypotheses, languages=languages, at_length_limit=limits)


def test_a_set_without_rows_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        compute_scores([], [], languages=None)


# Repetition

TAMIL = (
    "தமிழ்நாடு இந்தியாவின் தென்கோடியில் அமைந்துள்ள ஒரு மாநிலமாகும். இங்கு பேசப்படும் முதன்மையான மொழி தமிழ் ஆகும், "
    "இது உலகின் பழமையான செம்மொழிகளில் ஒன்றாகக் கருதப்படுகிறது. மக்கள் பொங்கல் திருநாளை மகிழ்ச்சியுடன் கொண்டாடுகின்றனர்."
)


def test_repetition_rate_counts_loops_and_texts_cut_off():
    hypotheses = ["thank you " * 8, "நன்றி " * 12, "谢谢大家" * 20, "a short text", "cut off", ""]
    limits = [False, False, False, False, True, False]
    result = compute_scores([""] * 6, hypotheses, languages=None, at_length_limit=limits)
    assert result["repetition_rate"] == pytest.approx(100 * 4 / 6)


def test_a_loop_at_the_length_limit_counts_once():
    assert compute_scores([""], ["ja " * 100], languages=None, at_length_limit=np.array([True]))["repetition_rate"] == 100.0


def test_long_faultless_text_in_a_three_byte_script_is_no_repetition():
    assert len(TAMIL.encode()) / len(zlib.compress(TAMIL.encode())) > scores.COMPRESSION_RATIO_THRESHOLD
    assert score([(TAMIL, TAMIL)], "ta")["repetition_rate"] == 0.0


@given(strategies.text(strategies.characters(max_codepoint=127)))
def test_compression_ratio_of_ascii_is_whispers_own(text):
    assert scores._compression_ratio(text) == len(text.encode()) / len(zlib.compress(text.encode()))


# Decoding


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import WhisperTokenizer

    words = ["h", "i", "Ġ", ".", "ĠA"]
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|startofprev|>", "<|notimestamps|>"]
    vocabulary = {token: number for number, token in enumerate(words + special)}
    toy = WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>", additional_special_tokens=special[1:])
    toy.add_tokens(["<|0.00|>", "<|0.02|>"])
    return toy


def as_ids(tokenizer, tokens):
    return [-100 if token == "-100" else tokenizer.convert_tokens_to_ids(token) for token in tokens.split()]


def test_minus_100_is_padding_in_a_copy(tokenizer):
    ids = np.array([as_ids(tokenizer, "<|startoftranscript|> h -100"), as_ids(tokenizer, "<|startoftranscript|> h i")])
    before = ids.copy()
    assert decode_ids(ids, tokenizer) == ["h", "hi"]
    assert (ids == before).all()


@pytest.mark.parametrize(
    "tokens, text",
    [
        ("<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|> ĠA h i <|endoftext|>", "Ahi"),
        ("<|startoftranscript|> <|en|> <|transcribe|> <|0.00|> h i <|0.02|> <|endoftext|>", "hi"),
        ("<|startofprev|> i i <|startoftranscript|> <|en|> h <|endoftext|>", "h"),
        ("-100 -100 <|startoftranscript|> <|en|> h Ġ . -100", "h ."),
        ("-100 -100", ""),
    ],
)
def test_only_spoken_words_are_decoded(tokenizer, tokens, text):
    row = as_ids(tokenizer, tokens)
    assert decode_ids(np.array([row, row]), tokenizer) == [text, text]


# Nothing shared: no network, no cache file, no lock

SOURCE = os.pathsep.join([str(Path(scores.__file__).parent), os.environ.get("PYTHONPATH", "")])
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": SOURCE}

TWENTY_EVALUATIONS = """
import sys, scores
scores.compute_scores(["warm up"], ["warm up"], languages=None)
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    rows = ["a b c d"] * 50
    result = scores.compute_scores(rows, ["a b c x"] * 50, languages=["en"] * 50)
    assert result["wer"] == 25.0, result
print("done", flush=True)
"""


def test_two_processes_with_one_cache_folder_do_not_disturb_each_other(tmp_path):
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", TWENTY_EVALUATIONS], env=environment, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["done\n"] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_scores_without_a_home_folder_to_write_to():
    program = "import scores; print(scores.compute_scores(['a b'], ['a'], languages=None)['wer'])"
    environment = {**os.environ, **OFFLINE, "HF_HOME": "/dev/null/nowhere"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.stdout == "50.0\n", ended.stderr


def test_importing_leaves_the_slow_libraries_for_later():
    program = "import sys, scores; print({'evaluate', 'datasets', 'transformers', 'torch'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, **OFFLINE}, capture_output=True, text=True)
    assert ended.stdout == "set()\n", ended.stderr


def test_row_errors_sum_to_the_word_error_rate():
    references, hypotheses = ["a b c d", "", "e f"], ["a x c", "noise here", "e f"]
    counts = count_word_errors(references, hypotheses, languages=["de"] * 3)
    assert counts == [(0, 1, 1, 4), (2, 0, 0, 0), (0, 0, 0, 2)], "insertions, deletions, substitutions, words"
    expected = compute_scores(references, hypotheses, languages=["de"] * 3)["wer"]
    assert 100 * sum(count.errors for count in counts) / sum(count.words for count in counts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("before", "after", "low", "high"),
    [
        ([3] * 20, [3] * 20, 1.0, 1.0),
        ([3] * 20, [1] * 20, 0.0, 0.001),
        ([2, 0] * 10, [0, 2] * 10, 0.9, 1.0),
        ([1] * 20, [3] * 20, 0.0, 0.001),
    ],
)
def test_the_paired_test_tells_gain_from_chance(before, after, low, high):
    assert low <= paired_p_value(before, after) <= high
