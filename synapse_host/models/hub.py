"""Checkpoints by name from the Hugging Face hub, by the library that its users have: huggingface_hub.

Only the files that a build reads are fetched, weights as safetensors only, never a pickle. The library's own cache,
``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` work as everywhere. The commit that was fetched is
the bundle's ``source``, so that a bundle says what it was made of.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from synapse_host.errors import BackendMissing, InvalidRequest, UnknownModel

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?")
"""``owner/name`` or ``owner/name@revision``."""
WANTED: Final = (
    *("config.json", "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json"),
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("additional_chat_templates/*.jinja", "*.safetensors", "*.safetensors.index.json"),
    *("?_*/config.json", "?_*/*.safetensors"),
)
"""What a build reads of a repository."""


def is_name(text: str) -> bool:
    """Return whether *text* is a name on the hub and no folder here."""
    return NAME.fullmatch(text) is not None and not Path(text).exists()


def fetch(name: str, *, bars: bool = False) -> tuple[Path, str]:
    """Return the folder of the checkpoint ``owner/name[@revision]`` in the hub's cache, and its ``source``.

    That is ``hub:owner/name@commit``. What is in the cache isn't fetched again. *bars*: show progress.

    Raises BackendMissing without huggingface_hub, UnknownModel where the hub has no such checkpoint or can't be asked,
    InvalidRequest for one without safetensors.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as exc:
        raise BackendMissing(
            f"{name} is fetched with huggingface_hub, which isn't installed. Install it: "
            "pip install 'synapse-workers[hub]', or give a checkpoint's folder",
            details={"missing": "huggingface_hub"},
        ) from exc
    repository, _, revision = name.partition("@")
    details: dict[str, Any] = {"model": name}
    try:
        if not bars:
            disable_progress_bars()
        wanted = list(WANTED)
        folder = Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except Exception as exc:  # its own errors, those of its HTTP library, and what an answer that isn't the hub's does
        match exc:
            case errors.GatedRepoError():
                why = f"{repository} is gated: accept its terms on the hub and set HF_TOKEN"
            case errors.RepositoryNotFoundError() | errors.RevisionNotFoundError():
                why = f"the hub has no {name} (or it is private: set HF_TOKEN). A folder here is given as ./{name}"
            case errors.LocalEntryNotFoundError():
                why = f"{name} is not in the cache, and the hub can't be reached. Connect, or give a folder"
            case _:
                why = f"{name} can't be fetched: {type(exc).__name__}: {exc}"
        raise UnknownModel(why, details=details) from exc
    if not any(folder.glob("*.safetensors")):
        raise InvalidRequest(
            f"{name} has no safetensors: weights in another form are not read (a pickle may run anything). "
            "Convert it first, or choose a revision that has them: owner/name@refs/pr/N",
            details=details,
        )
    return folder, f"hub:{repository}@{folder.name}"
