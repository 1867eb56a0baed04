"""What a checkpoint's tokenizer files say: the frame of a text and of a pair, capitals, the limit, the chat template.

Only ``tokenizer.json`` is run; what ``tokenizer_config.json`` says beside it is followed or refused, for transformers'
own classes follow it. Sources: transformers (tokenization_utils_base.py, models/*/tokenization_*_fast.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from engines.checkpoint.read import CheckpointError, quoted, read_bytes, read_json, read_optional

_OTHER_TOKENIZERS: Final = (
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
_PAIR_POST: Final = {"RobertaProcessing": 2, "BertProcessing": 1}


def pair_separators(folder: Path) -> int:
    """Return how many special tokens the tokenizer puts between query and document: BERT's one, or RoBERTa's two.

    One where tokenizer.json doesn't say it, as BERT was trained. CheckpointError for other numbers.
    """
    file = folder / "tokenizer.json"
    for step in _steps(read_optional(file)):
        if (kind := step.get("type")) in _PAIR_POST:
            return _PAIR_POST[kind]
        pair = step.get("pair")
        if kind == "TemplateProcessing" and isinstance(pair, list):
            texts = [at for at, part in enumerate(pair) if isinstance(part, dict) and "Sequence" in part]
            between = texts[1] - texts[0] - 1 if len(texts) == 2 else 0
            if between not in (1, 2):
                raise CheckpointError(f"{file}: its template puts {between} tokens between the texts of a pair")
            return between
    return 1


def _steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a tokenizer.json does behind its model, step by step."""
    post = document.get("post_processor")
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def with_end(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return a token and tokenizer.json with that token put behind every text; None where nothing is to be added.

    ``add_eos_token`` of tokenizer_config.json asks for it. The code that comes with gte-Qwen2 adds it to what
    tokenizer.json says, and so does transformers' class for Llama. CheckpointError where the token has no id.
    """
    conf, file = read_optional(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    if conf.get("add_eos_token") is not True or not file.exists():
        return None
    token, document = conf.get("eos_token"), read_json(file)
    token = token.get("content") if isinstance(token, dict) else token
    added = [one for one in document.get("added_tokens") or [] if isinstance(one, dict)]
    ids = [one.get("id") for one in added if one.get("content") == token]
    if not ids:
        raise CheckpointError(f"{folder}: add_eos_token is true, and eos_token {token!r} is no token of tokenizer.json")
    steps = _steps(document)
    end = {"SpecialToken": {"id": token, "type_id": 0}}
    if any(step.get("single", [])[-1:] == [end] for step in steps):
        return None
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    template = {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, end, second, {"SpecialToken": {"id": token, "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": ids[:1], "tokens": [token]}},
    }
    return str(token), document | {"post_processor": {"type": "Sequence", "processors": [*steps, template]}}


def check_tokenizer_files(folder: Path) -> bool | None:
    """Return whether the tokenizer lowers capitals, None where there is no tokenizer.json.

    Refuses a folder that has a tokenizer in another form, and a ``do_lower_case`` that contradicts tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
        if others:
            raise CheckpointError(
                f"{folder}: the tokenizer is in {', '.join(others)}, and only tokenizer.json is read. Make it once "
                "with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        return None
    lowers = _lowers(read_json(file).get("normalizer"))
    settings = folder / "tokenizer_config.json"
    conf = read_optional(settings)
    said = conf.get("do_lower_case")
    # Bert's fast tokenizers put this over what tokenizer.json says.
    if isinstance(said, bool) and said != lowers and "Bert" in str(conf.get("tokenizer_class")):
        raise CheckpointError(
            f"{settings}: do_lower_case is {str(said).lower()}, and tokenizer.json "
            f"{'lowers' if lowers else 'keeps'} capitals: transformers follows the first, here the second is run. "
            "Save the tokenizer once with transformers so that both say the same"
        )
    return lowers


def _lowers(normalizer: Any) -> bool:
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowers(part) for part in normalizer.get("normalizers") or [])
    return normalizer.get("type") == "Lowercase" or normalizer.get("lowercase") is True


def tokenizer_limit(folder: Path) -> int | None:
    """Return ``model_max_length`` of tokenizer_config.json; None where it is absent or the huge 'no limit'."""
    said = read_optional(folder / "tokenizer_config.json").get("model_max_length")
    return int(said) if isinstance(said, int | float) and 0 < said < 2**31 else None


def chat_template(folder: Path) -> str | None:
    """Return the chat template: ``chat_template.jinja``, ``chat_template.json``, else tokenizer_config.json's.

    Of a list of named templates the one called ``default`` is taken, as transformers does.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return read_bytes(file).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as exc:
            raise CheckpointError(f"{file} is not UTF-8: {exc}") from exc
    found: Any = None
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        found = read_optional(file).get("chat_template") if found is None else found
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
        if found is None:
            raise CheckpointError(f"{file}: chat_template has {quoted(map(str, named))}, and none is called 'default'")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{file}: chat_template must be a text, or a list of names and texts")
    return found
