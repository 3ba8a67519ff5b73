"""The Hub is asked once: where it does not answer, names come from the cache, or end at once in one line.

``huggingface_hub`` asks for every file up to six times, with pauses: 23 s a file where nothing listens, and more than
six minutes where a server never answers (2.4, measured). So one request decides whether the process goes offline.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError

from memsave_recipes.core.errors import InputError, packages_of
from memsave_recipes.core.text import first_line

with packages_of("vision,text", "names on the Hub"):
    import datasets

ANSWERS_WITHIN_S = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", 5))  # that library's variable for slow networks
MISSING_WHILE_OFFLINE = (ConnectionError, LocalEntryNotFoundError)

datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # or every local file that it reads is counted on a server

logger = logging.getLogger(__name__)
_why_silent: dict[str, str | None] = {}  # by endpoint; None for one that has answered


def ask_hub_for(name: str) -> None:
    """Go offline where ``name`` is not a folder or file and the Hub does not answer."""
    if os.path.exists(name) or constants.is_offline_mode():
        return
    if constants.ENDPOINT not in _why_silent:
        _why_silent[constants.ENDPOINT] = _ask(constants.ENDPOINT)
    if why := _why_silent[constants.ENDPOINT]:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning("note: %s, so names are looked up in the cache alone", why)


def folder_of(name: str) -> Path:
    """Return the files of a model that has been loaded: ``name``, or its newest snapshot in the cache."""
    config = None if os.path.isdir(name) else try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else Path(name)


@contextmanager
def loading_by_name(name: str, source: str, hint: str) -> Iterator[None]:
    """Load ``name``, which ``source`` (a flag and its value) gave, inside; raise ``InputError`` where that fails."""
    ask_hub_for(name)
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # HTTP libraries and the parsers of damaged files raise nearly anything
        raise InputError(f"{source} cannot be loaded: {reason(error)}; {hint}") from error


def open_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool) -> Any:
    """Open the tokenizer of a folder or of the Hub, with the tokens that it was saved with.

    ``AutoTokenizer`` takes the class that belongs to some types of models (Qwen 2, Qwen 3.5), which splits words in its
    own way, also where ``tokenizer.json`` holds another tokenizer, such as one that was trained from scratch. It raises
    ``OSError``, ``ValueError`` and whatever else of damaged files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    entries = get_tokenizer_config(str(name_or_path))
    is_whole = entries.get("tokenizer_class") == "TokenizersBackend"  # which ``tokenizer.json`` describes alone
    if is_whole and "auto_map" not in entries:
        return PreTrainedTokenizerFast.from_pretrained(name_or_path)
    return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)


def reason(error: BaseException) -> str:
    """Say why something could not be loaded, in one line."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which is not run unless you read it and pass --trust_remote_code"
    if constants.is_offline_mode() and any(isinstance(cause, MISSING_WHILE_OFFLINE) for cause in _behind(error)):
        return f"it is not in the cache, and {_why_silent.get(constants.ENDPOINT) or 'HF_HUB_OFFLINE is set'}"
    while isinstance(error, datasets.exceptions.DatasetGenerationError | StrictDataclassError) and error.__cause__:
        error = error.__cause__  # it says itself only that there was one
    return first_line(error)


def _ask(endpoint: str) -> str | None:
    """Say why the Hub does not answer; ``None`` where it does."""
    try:
        status = get_session().head(endpoint, timeout=ANSWERS_WITHIN_S).status_code
    except Exception as error:  # of the HTTP library, which is not always the same one
        return f"{endpoint} does not answer ({str(error) or type(error).__name__})"
    return f"{endpoint} answers with error {status}" if status >= 500 else None


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
