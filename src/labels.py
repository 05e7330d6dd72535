"""What is a row's label? Token ids by name for the loaded tokenizer, one function for every row."""

import re
import unicodedata
from collections.abc import Iterable

from transformers.models.whisper.tokenization_whisper import LANGUAGES

from config import ModelConfig
from languages import language_code, nearest_languages
from manifest import Row
from model import BaseModel, token_id

# Anything that reads like a special token: their ids would be taken for marks, not for text.
_MARK = re.compile(r"<\|[^<>|]*\|>")
# Written without a blank between sentences. Thai, Lao, Khmer and Burmese have none between words, but have one there.
_WITHOUT_BLANKS = ("zh", "yue", "ja")


class LabelBuilder:
    """Builds labels for one base model.

    The recipe's language and task count for rows without their own. English-only models take neither.
    """

    def __init__(self, base: BaseModel, model: ModelConfig, *, allow_empty_text: bool = False):
        self.base = base
        self.tokenizer = base.processor.tokenizer
        self.is_multilingual = base.is_multilingual
        self.language, self.task = model.language, model.task
        self.allow_empty_text = allow_empty_text
        self.max_length = base.config.max_target_positions
        self.end = token_id(self.tokenizer, "<|endoftext|>")

    def language_of(self, row: Row) -> str | None:
        """The code of the row's language, its own or the recipe's; None when neither says one."""
        return language_code(row.language) or self.language or (None if self.is_multilingual else "en")

    def task_of(self, row: Row) -> str:
        """transcribe or translate."""
        return row.task or self.task

    def prefix(self, row: Row) -> list[int]:
        """Token ids between the start token and the text: language, task, no-timestamps; only the last for English-only models."""
        names = ["<|notimestamps|>"]
        if self.is_multilingual:
            names = [f"<|{self.language_of(row)}|>", f"<|{self.task_of(row)}|>", *names]
        return [token_id(self.tokenizer, name) for name in names]

    def build(self, row: Row, *others: Row) -> list[int]:
        """Label ids of a row: prefix, text, end. The start token is not among them: the decoder's input begins with it.

        The text is stripped and given one leading blank, as the base models were trained. With `others`, rows of the same
        language and task heard behind it in one window, their texts follow, joined as `blank_between` says.
        """
        ids, before = self.prefix(row), ""
        for each in (row, *others):
            # One text after another: tokens never reach over a join, so that those of a window are counted before it is made.
            text = each.text.strip()
            if text:
                ids += self._encode(self.blank_between(before, text, row=row) + text)
                before = text
        return [*ids, self.end]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def blank_between(self, before: str, after: str, *, row: Row) -> str:
        """What stands between two texts of the row's language and task, or ("" before) at the very beginning: a blank.

        Chinese, Cantonese and Japanese have none beside a wide character; a translation is English.
        """
        if not before or not self._has_no_blanks(row):
            return " "
        return "" if any(unicodedata.east_asian_width(letter) in "WF" for letter in (before[-1], after[0])) else " "

    def _has_no_blanks(self, row: Row) -> bool:
        return self.task_of(row) == "transcribe" and self.language_of(row) in _WITHOUT_BLANKS

    def count_tokens(self, row: Row) -> int:
        """The most tokens that the row's text takes in a label, with or without a blank in front."""
        text = row.text.strip()
        if not text:
            return 0
        forms = (f" {text}", text) if self._has_no_blanks(row) else (f" {text}",)
        return max(len(self._encode(form)) for form in forms)

    def describe_translation(self, rows: Iterable[Row]) -> list[str]:
        """A warning for the log when rows are to be translated by a model whose decoder was cut down, such as turbo."""
        config = self.base.config
        if 2 * config.decoder_layers > config.encoder_layers or all(self.task_of(row) != "translate" for row in rows):
            return []
        return [
            f"warning: rows have the task translate, and {self.base.name} looks like turbo or a distilled model "
            f"({config.encoder_layers} encoder layers, {config.decoder_layers} in the decoder), which were not trained to translate"
        ]

    def find_problem(self, row: Row) -> tuple[str, str] | None:
        """What makes the row's text unusable: a reason in the report's fixed words and a detail; None when it is fine."""
        text = row.text.strip()
        if not text and not self.allow_empty_text:
            return "empty_text", "the transcript is empty"
        marks = _MARK.findall(text)
        if marks:
            return "special_tokens", f"{' '.join(marks[:5])} in the text; the marks are added by the program"
        problem = self._find_language_problem(row)
        if problem:
            return "unknown_language", problem
        length = len(self.build(row))
        if length > self.max_length:
            return "label_too_long", f"{length} tokens, the model takes {self.max_length}"
        return None

    def _find_language_problem(self, row: Row) -> str | None:
        language = self.language_of(row)
        if not self.is_multilingual:
            if language not in (None, "en"):
                return f"{language}: this model knows English only"
            if self.task_of(row) != "transcribe":
                return "this model knows English only and cannot translate"
        elif language is None:
            return "the row names no language and model.language is not set; --model.language hi gives it to all rows without their own"
        elif f"<|{language}|>" not in self.base.generation_config.lang_to_id:
            return f"this model has no token for {language}" if language in LANGUAGES else nearest_languages(language)
        return None
