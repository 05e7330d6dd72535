"""What is a language called? Whisper's codes, its English names for them, and the nearest ones to a word it does not know."""

import difflib

from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE


def language_code(language: str | None) -> str | None:
    """The two- or three-letter code of a language given as code or English name in any case; None for not set.

    A name that Whisper does not know comes back unchanged, for the caller to refuse.
    """
    word = (language or "").strip().lower()
    if word in ("", "none", "null"):
        return None
    return TO_LANGUAGE_CODE.get(word, word)


def nearest_languages(language: str) -> str:
    """The advice for a language that Whisper has no token for: nearest names and how to borrow another's token."""
    names = [*LANGUAGES, *TO_LANGUAGE_CODE]
    close = difflib.get_close_matches(language.lower(), names, n=3, cutoff=0.5)
    nearest = f"; nearest: {', '.join(close)}" if close else ""
    return f"Whisper has no language {language!r}{nearest}. To teach a new one, borrow the token of a related language"
