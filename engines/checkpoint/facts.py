"""What a checkpoint folder says beyond its weights: pooling, normalisation, length limit, special ids, head.

How each file beside the weights is read, and what is refused: :mod:`engines.checkpoint.pipeline`. Nothing here needs
the tokenizers package.

Shapes of what goes into a manifest:

``special_ids``
    any of ``cls, sep, bos, eos, pad, unk, mask`` -> id; for encoders ``bos`` is ``cls`` and ``eos`` is ``sep``.
``head`` (rerank only)
    bert: ``{"kind": "pooler"}``, tanh pooler on the first token, then classifier;
    modernbert: ``{"kind": "dense", "pooling": "cls" | "mean"}``, dense, gelu, norm, classifier;
    qwen3: ``{"kind": "yes_no", "yes": id, "no": id}``, logit = yes row minus no row of the output matrix, last real
    token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.checkpoint import pipeline, tokenizer
from engines.checkpoint.read import Checkpoint, CheckpointError, read_optional
from engines.protocol.messages import Pooling

if TYPE_CHECKING:
    from engines.checkpoint.dense import Module

_ROLES: Final = ("cls", "sep", "bos", "eos", "pad", "unk", "mask")


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
    pair_separators: int = 1
    """Special tokens between query and document, of a reranker."""
    score: str | None = None
    """``sigmoid`` or ``identity``, of a reranker."""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    """The name of the prompt that is put before every text where a caller names none."""
    truncate_dim: int | None = None
    """How many of ``dims`` numbers a vector has where a caller says nothing; None: all."""
    dense: tuple[Module, ...] = ()
    end_ids: tuple[int, ...] = ()
    """Every id that ends a generation."""
    notes: tuple[str, ...] = ()
    """What the person who builds this should know: sentences."""


def of_checkpoint(checkpoint: Checkpoint) -> Facts:
    """Read the facts of an opened checkpoint. Raises CheckpointError for what would silently change its numbers."""
    config, known, task, folder = checkpoint.config, checkpoint.known, checkpoint.task, checkpoint.folder
    # A package has no folder of its own: its config stands in the manifest, checked when it was built.
    raw = read_optional(folder / "config.json") or config
    pipeline.check_config(raw, folder / "config.json", type(known))
    lowers = tokenizer.check_tokenizer_files(folder)
    steps = pipeline.read_pipeline(folder)
    embed, generate = task == "embed", task == "generate"
    prompts, default = pipeline.read_prompts(folder) if embed else ({}, None)
    notes = _prompt_notes(prompts, default) if embed else pipeline.check_generation(folder) if generate else []
    if embed and (ended := tokenizer.with_end(folder)) is not None:
        notes.append(f"add_eos_token: {ended[0]!r} is put behind every text, which tokenizer.json didn't say")
    dense, width = steps.dense if steps is not None and embed else (), config["hidden_size"]
    for module in dense:
        if module.layer.in_features != width:
            raise CheckpointError(f"{module.folder}: takes {module.layer.in_features} numbers, {width} are before it")
        width = module.layer.out_features
    short = pipeline.read_dimensions(folder, width) if embed else None
    if short is not None:
        notes.append(f"vectors have the first {short} of {width} numbers by default; --dimensions N asks for others")
    limits = [known.positions, pipeline.read_limit(folder, tokenizer_lowers=lowers)]
    limits.append(None if generate else tokenizer.tokenizer_limit(folder))
    return Facts(
        dims=1 if task == "rerank" else width,
        max_tokens=min(limit for limit in limits if limit),
        pooling=(steps and steps.pooling) or known.pooling if embed else None,
        normalize=(steps is None or steps.normalize) if embed else None,
        special_ids=special_ids(checkpoint),
        head=head(checkpoint, steps) if task == "rerank" else None,
        token_types=True if task == "rerank" and known.token_types else None,
        pair_separators=tokenizer.pair_separators(folder) if task == "rerank" and not known.causal else 1,
        chat_template=tokenizer.chat_template(folder) if generate else None,
        score=pipeline.read_score(raw, folder / "config.json") if task == "rerank" else None,
        prompts=prompts,
        default_prompt=default,
        truncate_dim=short,
        dense=dense,
        end_ids=tuple(pipeline.end_ids(folder, raw, config["vocab_size"])) if generate else (),
        notes=tuple(notes),
    )


def _prompt_notes(prompts: dict[str, str], default: str | None) -> list[str]:
    said = ", ".join(f"{name}: {text!r}" for name, text in prompts.items() if text)
    usual = "by default none is" if default is None else f"by default {default!r} is"
    return [f"the model has prompts, {usual} put before a text; --prompt NAME names another: {said}"] if said else []


def special_ids(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the ids of the special tokens that the tokenizer names, checked against the vocabulary size."""
    folder, config = checkpoint.folder, checkpoint.config
    names: dict[str, str] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        conf = read_optional(file)
        for role in _ROLES:
            token = conf.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[role] = token
    vocabulary = _vocabulary(folder)
    ids = {role: vocabulary[token] for role, token in names.items() if token in vocabulary}
    causal = checkpoint.known.causal
    for role in _ROLES:
        # A decoder's config.json says how the model was trained; its tokenizer may name the chat's end instead.
        if (causal or role not in ids) and type(config.get(f"{role}_token_id")) is int:
            ids[role] = config[f"{role}_token_id"]
    if not causal:
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


def head(checkpoint: Checkpoint, steps: pipeline.Pipeline | None) -> dict[str, Any]:
    """Return what the manifest says about a reranker's head."""
    if (own := checkpoint.known.head) is not None:
        return own
    # Without a pipeline the folder's usual name counts: older exports have the module's settings and no modules.json.
    module = steps.score_folder if steps is not None and steps.score_folder else checkpoint.folder / "1_LogitScore"
    file = module / "config.json"
    conf = read_optional(file)
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


def _vocabulary(folder: Path) -> dict[str, int]:
    conf = read_optional(folder / "tokenizer.json")
    model = conf.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = {k: v for k, v in vocabulary.items() if type(v) is int} if isinstance(vocabulary, dict) else {}
    for token in conf.get("added_tokens") or []:
        if isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int:
            ids[token["content"]] = token["id"]
    return ids
