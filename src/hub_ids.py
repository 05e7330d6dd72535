"""Is a name meant for the Hub? What cannot be an id there is a path, and is told before anything is looked up."""

from huggingface_hub.utils import HFValidationError, validate_repo_id


def is_hub_id(name: str) -> bool:
    """Whether the Hub could have a repository of that name: letters, digits, - _ . and at most one slash."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
