"""What a checkpoint folder says beyond its weights: pooling, normalisation, length limit, special ids, head.

Sources: ``modules.json`` with ``1_Pooling`` (sentence-transformers), ``sentence_bert_config.json``, ``1_LogitScore``,
``tokenizer.json`` and its ``tokenizer_config.json``, ``config.json``. Nothing here needs the tokenizers package.

Shapes of what goes into a manifest:

``special_ids``
    any of ``cls, sep, bos, eos, pad, unk, mask`` -> id; for BERT and ModernBERT ``bos`` is ``cls`` and ``eos`` is
    ``sep``.
``head`` (rerank only)
    bert: ``{"kind": "pooler"}``, tanh pooler on the first token, then classifier;
    modernbert: ``{"kind": "dense", "pooling": "cls" | "mean"}``, dense, gelu, norm, classifier;
    qwen3: ``{"kind": "yes_no", "yes": id, "no": id}``, logit = yes row minus no row of the output matrix, last real
    token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engines.bundle.checkpoint import Checkpoint, CheckpointError, read_json
from engines.protocol.messages import Pooling

_ROLES: Final = ("cls", "sep", "bos", "eos", "pad", "unk", "mask")
_POOLING_FLAGS: Final[dict[str, Pooling]] = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_POOLING_NAMES: Final[dict[str, Pooling]] = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
_POOLING_BY_FAMILY: Final[dict[str, Pooling]] = {
    "bert": Pooling.MEAN,
    "modernbert": Pooling.CLS,
    "qwen3": Pooling.LAST,
    "llama": Pooling.LAST,
}


@dataclass(frozen=True)
class Facts:
    """What a manifest says about a checkpoint's use. ``pooling`` and ``normalize`` are None unless it embeds."""

    dims: int
    max_tokens: int
    pooling: Pooling | None = None
    normalize: bool | None = None
    special_ids: dict[str, int] = field(default_factory=dict)
    head: dict[str, Any] | None = None
    token_types: bool | None = None
    chat_template: str | None = None


def of_checkpoint(checkpoint: Checkpoint) -> Facts:
    """Read the facts of an opened checkpoint. Raises CheckpointError where a file contradicts itself."""
    config, family, task = checkpoint.config, checkpoint.family, checkpoint.task
    special = special_ids(checkpoint)
    embed = task == "embed"
    return Facts(
        dims=1 if task == "rerank" else config["hidden_size"],
        max_tokens=max_tokens(checkpoint),
        pooling=pooling(checkpoint) if embed else None,
        normalize=normalize(checkpoint) if embed else None,
        special_ids=special,
        head=head(checkpoint) if task == "rerank" else None,
        token_types=True if family == "bert" and task == "rerank" and config["type_vocab_size"] > 1 else None,
        chat_template=chat_template(checkpoint.folder) if task == "generate" else None,
    )


def pooling(checkpoint: Checkpoint) -> Pooling:
    """Return the pooling of ``1_Pooling/config.json``, else the family's own."""
    file = checkpoint.folder / "1_Pooling" / "config.json"
    if not file.exists():
        return _POOLING_BY_FAMILY[checkpoint.family]
    conf = read_json(file)
    on = [key for key, value in conf.items() if key.startswith("pooling_mode_") and value is True]
    named = conf.get("pooling_mode")
    if not on and isinstance(named, str) and named in _POOLING_NAMES:
        return _POOLING_NAMES[named]
    if len(on) != 1 or on[0] not in _POOLING_FLAGS:
        raise CheckpointError(f"{file}: pooling {on or 'none'} is not supported, only one of mean, cls, last token")
    return _POOLING_FLAGS[on[0]]


def normalize(checkpoint: Checkpoint) -> bool:
    """Tell whether vectors are L2-normalised: as ``modules.json`` says, true where there is none."""
    file = checkpoint.folder / "modules.json"
    if not file.exists():
        return True
    try:
        return "Normalize" in file.read_text("utf-8")  # a JSON list of class names; the last part is what counts
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{file}: {exc}") from exc


def max_tokens(checkpoint: Checkpoint) -> int:
    """Return the longest row served, in tokens with specials: the model's own limit, cut to its position table."""
    limit: int = checkpoint.config["max_position_embeddings"]
    file = checkpoint.folder / "sentence_bert_config.json"
    said = read_json(file).get("max_seq_length") if file.exists() else None
    if type(said) is int and said > 0:
        limit = min(limit, said)
    return limit


def special_ids(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the ids of the special tokens that the tokenizer names, checked against the vocabulary size."""
    folder, config = checkpoint.folder, checkpoint.config
    names: dict[str, str] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if not file.exists():
            continue
        conf = read_json(file)
        for role in _ROLES:
            token = conf.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[role] = token
    vocabulary = _vocabulary(folder)
    ids = {role: vocabulary[token] for role, token in names.items() if token in vocabulary}
    decoder = checkpoint.family in ("qwen3", "llama")
    for role in _ROLES:
        # A decoder's config.json says how the model was trained; its tokenizer may name the chat's end instead.
        if (decoder or role not in ids) and type(config.get(f"{role}_token_id")) is int:
            ids[role] = config[f"{role}_token_id"]
    if checkpoint.family in ("bert", "modernbert"):
        for role, token in {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}.items():
            if role not in ids and token in vocabulary:
                ids[role] = vocabulary[token]
        if "cls" in ids:
            ids["bos"] = ids["cls"]
        if "sep" in ids:
            ids["eos"] = ids["sep"]
    for role, value in ids.items():
        if not 0 <= value < config["vocab_size"]:
            raise CheckpointError(
                f"{folder}: {role} token id {value} is outside the vocabulary of {config['vocab_size']}"
            )
    return {role: ids[role] for role in _ROLES if role in ids}


def head(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the manifest says about a reranker's head."""
    if checkpoint.family == "bert":
        return {"kind": "pooler"}
    if checkpoint.family == "modernbert":
        return {"kind": "dense", "pooling": checkpoint.config["classifier_pooling"]}
    file = checkpoint.folder / "1_LogitScore" / "config.json"
    conf = read_json(file) if file.exists() else {}
    ids = {}
    vocabulary = _vocabulary(checkpoint.folder)
    for word, key in (("yes", "true_token_id"), ("no", "false_token_id")):
        value = conf.get(key, checkpoint.config.get(f"{word}_token_id", vocabulary.get(word)))
        if type(value) is not int or not 0 <= value < checkpoint.config["vocab_size"]:
            raise CheckpointError(
                f"{checkpoint.folder}: no id for the answer {word!r}: 1_LogitScore/config.json, config.json and the"
                " tokenizer's vocabulary were looked at"
            )
        ids[word] = value
    return {"kind": "yes_no", **ids}


def chat_template(folder: Path) -> str | None:
    """Return the chat template, from its own file or tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    file = folder / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.exists() else None
    return template if isinstance(template, str) else None


def _vocabulary(folder: Path) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if not file.exists():
        return {}
    conf = read_json(file)
    model = conf.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = {k: v for k, v in vocabulary.items() if type(v) is int} if isinstance(vocabulary, dict) else {}
    for token in conf.get("added_tokens") or []:
        if isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int:
            ids[token["content"]] = token["id"]
    return ids
