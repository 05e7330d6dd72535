"""Fixtures of several test files."""

import datasets
import pytest


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Sets that are loaded and measures of clips are kept in folders of the test file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hub-cache"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("measures")))
        yield
