"""How good is the text? Word and character error rates of a whole set, raw and normalised, and the share of texts that repeat themselves.

Scores depend on the texts alone: not on the order of the rows, on batches, ranks, the network or a cache folder.
"""

import functools
import tempfile
import unicodedata
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jiwer
import numpy as np
from rapidfuzz.distance import Levenshtein

# The error rates in `compute_scores`' result; percent, lower is better.
SCORE_NAMES = ("wer", "cer", "wer_raw", "cer_raw")

# A text that zlib shortens by more than this repeats itself: `compression_ratio_threshold` in openai/whisper `whisper/transcribe.py`.
COMPRESSION_RATIO_THRESHOLD = 2.4

# What torch's cross entropy skips in labels; `generate` results of unequal length are joined with it as well.
IGNORED_ID = -100

_ENGLISH_RULES = "whisper-english-without-spelling-table"
_DOTLESS_I_RULES = "marks-kept-dotless-i"
NORMALIZERS = {  # what each does, for readers of scores
    _ENGLISH_RULES: "Whisper's English rules, without turning British spellings into American ones",
    "marks-kept": "lower case and no punctuation; every accent and vowel sign stays",
    _DOTLESS_I_RULES: "lower case, with i and ı kept apart, and no punctuation; every accent stays",
}
_RULES = {
    **dict.fromkeys(["en", "english"], _ENGLISH_RULES),
    **dict.fromkeys(["tr", "turkish", "az", "azerbaijani"], _DOTLESS_I_RULES),
}


def normalizer_name(language: str | None) -> str:
    """Returns the name of the rules that `normalize` uses for a language (code or English name, None: not known).

    `whisper-english-without-spelling-table`: Whisper's English rules, except that British spellings are not turned into American ones.
    The table for that is a file of the model folder, which folders of fine-tuned models often lack; scores must not depend on it.
    `marks-kept`: every other language. `marks-kept-dotless-i`: the same with the lower case of Turkish and Azerbaijani.
    """
    return _RULES.get((language or "").lower(), "marks-kept")


def normalize(text: str, language: str | None) -> str:
    """Returns `text` with only those differences left that count as errors; words are separated by single blanks.

    English goes through transformers' `EnglishTextNormalizer`: it removes what stands in brackets, fillers and accents, and writes out
    contractions. Everywhere else its rules (and those of `BasicTextNormalizer`, which puts blanks in place of vowel signs:
    https://github.com/openai/whisper/pull/2849) destroy words. There punctuation, symbols and control characters become blanks, letters
    become lower case, invisible format characters go, and every accent, vowel sign and virama stays. Lower case rather than case
    folding, which would also make 'Maße' and 'Masse' the same word. The result is NFC.
    """
    text = unicodedata.normalize("NFC", text)
    rules = normalizer_name(language)
    if rules == _ENGLISH_RULES:
        return " ".join(_english_normalizer()(text).split())
    text = "".join(map(_without_punctuation, text))
    if rules == _DOTLESS_I_RULES:
        text = text.replace("I", "ı").replace("İ", "i")
    # Once more NFC: a letter and its accent may have had an invisible character between them.
    return " ".join(unicodedata.normalize("NFC", text.lower()).split())


def compute_scores(
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    languages: Sequence[str | None] | None,
    at_length_limit: Sequence[bool] | None = None,
) -> dict[str, float | int | list[str]]:
    """Returns the scores of one whole set; row i of each argument belongs to the same recording.

    `languages` choose the normaliser of each row (None: not known); `at_length_limit` says which hypotheses generation had to cut off.

    - `wer`, `cer`: percent, after `normalize`; `wer_raw`, `cer_raw`: percent, of the texts as written (NFC, outer blanks stripped).
      Edits (insertions, deletions, substitutions) of all rows over the words or characters of all references, so long rows weigh more
      and over 100 is possible. Characters are code points, the blanks between words included. An empty reference adds each word of its
      hypothesis as an insertion. Without any reference word in the set a rate is 0 where nothing was heard, else 100.
    - `rows_scored`: number of rows; `empty_references`: how many of them have no text after `normalize` (silence, '...', or in
      English '[laughter]'), so that they can only add insertions to `wer`.
    - `repetition_rate`: percent of hypotheses that repeat themselves (compression ratio over 2.4) or ran into the length limit.
      Texts under about 27 characters cannot reach that ratio.
    - `normalizers`: names of the rules used, sorted.

    Raises ValueError when there are no rows or when the arguments differ in length.
    """
    languages = [None] * len(references) if languages is None else languages
    at_length_limit = [False] * len(references) if at_length_limit is None else at_length_limit
    lengths = [len(column) for column in (references, hypotheses, languages, at_length_limit)]
    if len(set(lengths)) > 1:
        raise ValueError("references, hypotheses, languages and at_length_limit have {}, {}, {} and {} rows".format(*lengths))
    if not lengths[0]:
        raise ValueError("no rows to score")
    raw_references, raw_hypotheses = [*map(_as_written, references)], [*map(_as_written, hypotheses)]
    normal_references = [*map(normalize, raw_references, languages)]
    normal_hypotheses = [*map(normalize, raw_hypotheses, languages)]
    normal = _compute_error_rates(normal_references, normal_hypotheses)
    raw = _compute_error_rates(raw_references, raw_hypotheses)
    repetitions = sum(
        bool(cut_off) or _compression_ratio(text) > COMPRESSION_RATIO_THRESHOLD
        for text, cut_off in zip(raw_hypotheses, at_length_limit)
    )
    return {
        **normal,
        **{f"{name}_raw": rate for name, rate in raw.items()},
        "rows_scored": len(references),
        "empty_references": normal_references.count(""),
        "repetition_rate": 100 * repetitions / len(references),
        "normalizers": sorted({*map(normalizer_name, languages)}),
    }


class WordErrors(NamedTuple):
    """Word edits that turn a row's reference into what was said, and the number of its words."""

    insertions: int
    deletions: int
    substitutions: int
    words: int

    @property
    def errors(self) -> int:
        """All edits."""
        return self.insertions + self.deletions + self.substitutions


def count_word_errors(
    references: Sequence[str], hypotheses: Sequence[str], *, languages: Sequence[str | None]
) -> list[WordErrors]:
    """Returns word edits and reference words of each row after `normalize`; summed over a set they give its `wer`."""
    counts = []
    for reference, said in zip(map(normalize, references, languages), map(normalize, hypotheses, languages), strict=True):
        words = reference.split()
        edits = [edit.tag for edit in Levenshtein.editops(words, said.split())]
        counts.append(WordErrors(edits.count("insert"), edits.count("delete"), edits.count("replace"), len(words)))
    return counts


def paired_p_value(before: Sequence[int], after: Sequence[int], *, draws: int = 10_000) -> float:
    """Returns the chance that errors differ this much or more in total if before and after were alike.

    Errors of the same clips in the same order. Two-sided test by random exchange within each clip, as in Koehn, "Statistical
    significance tests for machine translation evaluation" (2004), with add-one; seeded, so the same errors give the same number.
    """
    differences = np.asarray(after) - np.asarray(before)
    differences = differences[differences != 0]
    generator, extreme = np.random.default_rng(0), 0
    for _ in range(draws):  # one at a time: a whole table of signs would fill the memory
        signs = generator.integers(0, 2, len(differences)) * 2 - 1
        extreme += abs(signs @ differences) >= abs(differences.sum())
    return float((extreme + 1) / (draws + 1))


def decode_ids(ids: np.ndarray, tokenizer) -> list[str]:
    """Returns one stripped text for each row of `ids` (rows, positions; integers), without special and time tokens and without a prompt.

    -100 counts as padding (https://github.com/huggingface/transformers/issues/22634); `ids` itself stays as it is.
    """
    padded = np.where(np.asarray(ids) == IGNORED_ID, tokenizer.pad_token_id, ids)
    # Row by row: in transformers 5.24 Whisper's `batch_decode` leaves the words of a prompt in the text. The clean-up would take away
    # blanks that stand before punctuation.
    return [tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip() for row in padded]


@functools.cache
def _english_normalizer():
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer  # takes seconds

    return EnglishTextNormalizer({})


@functools.cache
def _without_punctuation(character: str) -> str:
    """Returns a blank for punctuation, symbols, separators and control characters, nothing for invisible ones, else the character."""
    category = unicodedata.category(character)
    # Variation selectors are marks by category, but belong to the emoji before them and would be left over as words.
    if category == "Cf" or "VARIATION SELECTOR" in unicodedata.name(character, ""):
        return ""
    return " " if category[0] in "PSZ" or category == "Cc" else character


def _as_written(text: str) -> str:
    """Returns the text in NFC and stripped. Half a surrogate pair ('\\ud83d' in a JSON file) becomes '?': it cannot be stored as UTF-8."""
    return unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode("utf-8")).strip()


def _compression_ratio(text: str) -> float:
    """Returns length over length after zlib, as `compression_ratio` in openai/whisper `whisper/utils.py`, with one byte a character.

    In UTF-8 the three bytes of a Tamil or Hindi character repeat each other: faultless text passes 2.4 from 200 to 300 characters on.
    ASCII keeps its bytes, so for English the number is Whisper's own.
    """
    foreign = dict.fromkeys(character for character in text if not character.isascii())
    byte_of = {character: 128 + number % 128 for number, character in enumerate(foreign)}
    encoded = bytes(byte_of.get(character) or ord(character) for character in text)
    return len(encoded) / len(zlib.compress(encoded))


def _compute_error_rates(references: list[str], hypotheses: list[str]) -> dict[str, float]:
    """Returns `wer` and `cer` in percent, computed in memory by an `evaluate` metric.

    A metric object makes a folder even when it keeps its rows in memory; one of its own means that no two processes share a file or
    lock (https://github.com/huggingface/evaluate/issues/540), and that the home folder may be read-only.
    """
    with tempfile.TemporaryDirectory() as folder:
        metric = _error_rates_class()(keep_in_memory=True, cache_dir=folder)
        return metric.compute(predictions=hypotheses, references=references)


@functools.cache
def _error_rates_class() -> type:
    import datasets  # with evaluate ten seconds on a small machine, so not before there is something to score
    import evaluate

    class ErrorRates(evaluate.Metric):
        """WER and CER in percent. `evaluate.load("wer")` would fetch and run a script from the Hub."""

        def _info(self):
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description="Word and character error rate in percent, over the whole set.",
                citation="",
                inputs_description="predictions and references: one text a row.",
                features=datasets.Features({"predictions": text, "references": text}),
            )

        def _compute(self, predictions, references):
            return {
                "wer": _error_percent([text.split() for text in references], [text.split() for text in predictions]),
                "cer": _error_percent([list(text) for text in references], [list(text) for text in predictions]),
            }

    return ErrorRates


def _error_percent(references: list[list[str]], hypotheses: list[list[str]]) -> float:
    """Returns edits in percent of the units (words or characters) in `references`, with jiwer's alignment."""

    def as_they_are(rows):
        return rows  # jiwer's own splitting knows blanks only, not tabs or no-break spaces

    counted = jiwer.process_words(references, hypotheses, as_they_are, as_they_are)
    edits = counted.substitutions + counted.deletions + counted.insertions
    units = counted.substitutions + counted.deletions + counted.hits
    if units == 0:
        return 100.0 if edits else 0.0
    return 100 * edits / units
