"""What the files beside a checkpoint's weights say about its use: each key is followed, known as harmless, or refused.

sentence-transformers describes a model as a pipeline (``modules.json``): each entry names a class and a folder with its
own settings. A step that isn't followed here changes every number without any sign of it, so an unknown module, class
or key is refused by name. The same holds for the keys of ``config.json`` that transformers doesn't write for a family.

Sources: sentence-transformers (models/*.py, SentenceTransformer.py, cross_encoder/CrossEncoder.py), and the keys that
transformers 4.57 and 5.24 write for BertConfig, ModernBertConfig, Qwen3Config and LlamaConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.checkpoint.read import CheckpointError, held, only, quoted, read_json, read_json_list, read_optional
from engines.protocol.messages import Pooling

if TYPE_CHECKING:
    from engines.checkpoint.dense import Module
    from engines.checkpoint.families.base import Config

_FLAGS: Final[dict[str, Pooling]] = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_NAMES: Final[dict[str, Pooling]] = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
_POOLING_KEYS: Final = {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"}
_ARGUMENTS: Final = ("model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs", "config_kwargs")
"""What sentence-transformers hands to transformers when it loads the model."""
_HARMLESS_ARGUMENTS: Final = {
    *("trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "device_map", "use_safetensors", "use_fast"),
    *("padding_side", "cache_dir", "revision", "token", "local_files_only", "low_cpu_mem_usage"),
}
_SENTENCE_HELD: Final[dict[str, tuple[Any, ...]]] = {
    "transformer_task": (None, "feature-extraction", "sequence-classification", "text-generation"),
    "module_output_name": (None, "token_embeddings", "scores", "causal_logits"),
    # 'message' would put each text into the chat template.
    "modality_config": (
        None,
        *({"text": {"method": "forward", "method_output_name": name}} for name in ("last_hidden_state", "logits")),
    ),
    "processing_kwargs": (None, {}),
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
}
"""Keys that version 6 of sentence-transformers writes, with the values that are what is done here."""
_SENTENCE_KEYS: Final = {
    *("max_seq_length", "do_lower_case", "cache_dir", "backend", "unpad_inputs"),
    *_ARGUMENTS,
    *_SENTENCE_HELD,
}
_PROMPT_KEYS: Final = {
    *("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name", "activation_fn"),
    *("truncate_dim", "keep_in_fp32_modules"),
}
_NORMALIZE_HELD: Final = dict.fromkeys(("module_input_name", "module_output_name"), (None, "sentence_embedding"))
_MODULE_KEYS: Final = {"idx", "name", "path", "type", "kwargs"}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``modules.json`` as served here: ``pooling`` None where it names none, ``normalize`` as its last module says."""

    pooling: Pooling | None
    normalize: bool
    score_folder: Path | None = None
    """Where a reranker's LogitScore module keeps its settings."""
    dense: tuple[Module, ...] = ()
    """Layers between pooling and normalisation."""


def read_pipeline(folder: Path) -> Pipeline | None:
    """Return the pipeline of a checkpoint folder, None where it has no ``modules.json``.

    Raises CheckpointError naming file, module and key for everything that would change a vector and isn't done here.
    """
    file = folder / "modules.json"
    if not file.exists():
        return None
    pooling: Pooling | None = None
    normalize, score, seen = False, None, []
    dense: list[Module] = []
    for number, module in enumerate(read_json_list(file)):
        kind, path = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise CheckpointError(f"{file}: module {number} has no type or path")
        only(file, set(module) - _MODULE_KEYS, "what a module does")
        held(file, module, {"kwargs": (None, [])})
        home = _inside(folder, path, file)
        # Another package's Transformer or Pooling is another program.
        name = kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind
        seen.append(name)
        if name == "Transformer" and number == 0:
            if home != folder:
                raise CheckpointError(f"{file}: the transformer's files lie in {path!r}: build that folder")
        elif name == "Pooling" and seen == ["Transformer", "Pooling"]:
            pooling = read_pooling(home / "config.json")
            included = read_json(home / "config.json").get("include_prompt") is not False
            if not included and any(read_prompts(folder)[0].values()):
                raise CheckpointError(
                    f"{home / 'config.json'}: include_prompt is false, so a prompt's tokens would have to be left out "
                    "of the pooling, which isn't done here. Without config_sentence_transformers.json there is none"
                )
        elif name == "Dense" and pooling is not None and not normalize:
            from engines.checkpoint.dense import read_module  # the host imports this module, and it needs no numpy

            dense.append(read_module(home))
        elif name == "Normalize" and pooling is not None and not normalize:
            conf = read_optional(home / "config.json")
            only(home / "config.json", set(conf) - set(_NORMALIZE_HELD), "what is normalised")
            held(home / "config.json", conf, _NORMALIZE_HELD)
            normalize = True
        elif name == "LogitScore" and seen == ["Transformer", "LogitScore"]:
            score = home
        else:
            raise CheckpointError(
                f"{file}: module {number} is a {name} after {', '.join(seen[:-1]) or 'nothing'}, which isn't served: "
                "it would be left out of every vector. Served: Transformer, Pooling (mean, cls, last token), "
                "then Dense of sentence_transformers, then Normalize"
            )
    return Pipeline(pooling, normalize, score, tuple(dense))


def read_pooling(file: Path) -> Pooling:
    """Return the one pooling of a Pooling module's config.json; other and several modes are refused."""
    conf = read_json(file)
    unknown = {key for key in conf if key not in _POOLING_KEYS and not key.startswith("pooling_mode_")}
    only(file, unknown, "how vectors are pooled")
    on = [key for key, value in conf.items() if key.startswith("pooling_mode_") and value not in (False, None)]
    named = conf.get("pooling_mode")
    if not on and isinstance(named, str) and named in _NAMES:
        return _NAMES[named]
    if len(on) != 1 or on[0] not in _FLAGS or named is not None:
        raise CheckpointError(
            f"{file}: pooling {on or named or 'none'} is not supported, only one of mean, cls, last token"
        )
    return _FLAGS[on[0]]


def read_limit(folder: Path, *, tokenizer_lowers: bool | None) -> int | None:
    """Return ``max_seq_length`` of sentence_bert_config.json, None where nothing is said.

    *tokenizer_lowers*: what the tokenizer does itself; a ``do_lower_case`` that it doesn't do is refused.
    """
    file = folder / "sentence_bert_config.json"
    conf = read_optional(file)
    only(file, set(conf) - _SENTENCE_KEYS, "a vector or a limit")
    held(file, conf, _SENTENCE_HELD)
    for key in _ARGUMENTS:
        only(file, set(conf.get(key) or {}) - _HARMLESS_ARGUMENTS, "a vector or a limit")
    if conf.get("do_lower_case") and not tokenizer_lowers:
        raise CheckpointError(
            f"{file}: do_lower_case is true, and the tokenizer keeps capitals: texts would have to be lowered before "
            "it, which isn't done here. Give tokenizer.json a lower-casing normalizer, or set do_lower_case to false"
        )
    said = conf.get("max_seq_length")
    return said if type(said) is int and said > 0 else None


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a model by name, and the name of the one that is put before every text by default."""
    file = folder / "config_sentence_transformers.json"
    conf = read_optional(file)
    only(file, set(conf) - _PROMPT_KEYS, "a vector")
    prompts, default = conf.get("prompts") or {}, conf.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{file}: prompts must map names to texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(f"{file}: default_prompt_name {default!r} is none of the prompts {quoted(prompts)}")
    return prompts, default


def read_dimensions(folder: Path, dims: int) -> int | None:
    """Return ``truncate_dim``, the first how many of *dims* numbers a vector has by default; None for all of them."""
    file = folder / "config_sentence_transformers.json"
    said = read_optional(file).get("truncate_dim")
    if said is not None and (type(said) is not int or said < 1):
        raise CheckpointError(f"{file}: truncate_dim is {said!r}, must be a whole number from 1")
    return None if said is None or said >= dims else said


def read_score(config: Mapping[str, Any], file: Path) -> str:
    """Return ``sigmoid`` or ``identity``: what a cross-encoder makes of its logit; *config* is its config.json.

    The spellings of sentence-transformers: ``sbert_ce_default_activation_function``, since version 4
    ``sentence_transformers.activation_fn``, and over both, since version 5.4, ``activation_fn`` of
    config_sentence_transformers.json. Without one it is a sigmoid, as there.
    """
    nested = config.get("sentence_transformers")
    said = config.get("sbert_ce_default_activation_function")
    key = "sbert_ce_default_activation_function"
    if isinstance(nested, dict) and nested.get("activation_fn") is not None:
        said, key = nested["activation_fn"], "sentence_transformers.activation_fn"
    beside = file.with_name("config_sentence_transformers.json")
    own = read_optional(beside)
    if own.get("model_type", "CrossEncoder") == "CrossEncoder":
        prompts, default = read_prompts(file.parent)
        if default is not None and prompts[default]:
            raise CheckpointError(
                f"{beside}: default_prompt_name is {default!r}: a prompt before every pair, which isn't done here. "
                "Without that key none is"
            )
        if own.get("activation_fn") is not None:
            said, key, file = own["activation_fn"], "activation_fn", beside
    if said is None:
        return "sigmoid"
    name = str(said).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{file}: {key} is {said!r}, only Sigmoid and Identity are served")
    return name.lower()


# --- config.json ------------------------------------------------------------------------------------------------------

_USED: Final = (
    "rope_scaling rope_parameters use_sliding_window layer_types model_type architectures bos_token_id eos_token_id "
    "pad_token_id cls_token_id sep_token_id mask_token_id unk_token_id yes_token_id no_token_id num_labels id2label "
    "label2id sbert_ce_default_activation_function sentence_transformers dim hidden_dim n_layers n_heads activation"
)
"""Followed beside the fields of the family's class."""
_TRAINING: Final = (
    "attention_probs_dropout_prob attention_dropout classifier_dropout embedding_dropout hidden_dropout_prob "
    "mlp_dropout initializer_range initializer_cutoff_factor gradient_checkpointing problem_type finetuning_task "
    "repad_logits_with_grad sparse_pred_ignore_index decoder_bias use_bfloat16 dropout attention_dropout qa_dropout "
    "seq_classif_dropout sinusoidal_pos_embds tie_weights_"
)
_RUNNING: Final = (
    "_name_or_path name_or_path transformers_version torch_dtype dtype torchscript return_dict use_cache auto_map "
    "output_attentions output_hidden_states output_scores output_past chunk_size_feed_forward tokenizer_class prefix "
    "deterministic_flash_attn reference_compile _attn_implementation attn_implementation _attn_implementation_autoset "
    "pretraining_tp tf_legacy_loss task_specific_params transformers.js_config unsloth_version unsloth_fixed "
    "max_window_layers sliding_window is_llama_config model_max_length position_embedding_type layer_norm_eps "
    "tie_word_embeddings"
)
_GENERATING: Final = (
    "bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p"
)
"""Older checkpoints repeat these here; what a generation follows is generation_config.json."""
_POOLER: Final = (
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
)
"""Left over from the first BERT conversions; no class of transformers reads them."""
_KNOWN: Final = frozenset(" ".join((_USED, _TRAINING, _RUNNING, _GENERATING, _POOLER)).split())
_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False, None),
    "sparse_prediction": (False, True, None),
    "is_causal": (None,),
    "use_bidirectional_attention": (False, None),
}
"""Keys that may stand there with these values only; another one changes the forward pass."""


def check_config(raw: Mapping[str, Any], file: Path, kind: type[Config]) -> None:
    """Refuse a key of config.json that isn't followed here and may change what a *kind* computes, and an adapter."""
    adapter = file.with_name("adapter_config.json")
    if adapter.exists():
        raise CheckpointError(f"{adapter}: an adapter isn't served; merge it by peft: model.merge_and_unload()")
    known = _KNOWN.union(kind.__struct_fields__, kind.ignored)
    for key, value in raw.items():
        if key in _ONLY and key not in kind.__struct_fields__:
            if value not in _ONLY[key]:
                raise CheckpointError(f"{file}: {key} is {value!r}, which isn't served: it changes the forward pass")
        elif key not in known:
            raise CheckpointError(
                f"{file}: {key!r} isn't known here and may change what the model computes. If it doesn't, remove it "
                "from the file"
            )


# --- generation -------------------------------------------------------------------------------------------------------

_HELD: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "stop_strings"), (None, [])),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), (None, [])),
    **dict.fromkeys(("constraints", "sequence_bias", "exponential_decay_length_penalty"), (None, [], {})),
    **dict.fromkeys(("dola_layers", "watermarking_config", "token_healing"), (None, False, {})),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("penalty_alpha", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("num_beams", "guidance_scale", "encoder_repetition_penalty"), (None, 1)),
}
_NOTED: Final = (
    "_from_model_config transformers_version trust_remote_code transformers.js_config use_model_defaults "
    "generation_kwargs bos_token_id eos_token_id pad_token_id decoder_start_token_id max_length max_new_tokens "
    "max_time use_cache cache_implementation cache_config return_legacy_cache low_memory prefill_chunk_size "
    "compile_config disable_compile output_attentions output_hidden_states output_scores output_logits "
    "return_dict_in_generate num_return_sequences renormalize_logits remove_invalid_values repetition_penalty "
    "early_stopping length_penalty num_beam_groups diversity_penalty epsilon_cutoff eta_cutoff top_h is_assistant "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size"
)
"""Keys of generation_config.json that are followed or noted, or change no greedy answer: beams, sampling, drafts."""
_SAMPLING: Final = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")


def end_ids(folder: Path, config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Return every id that ends a generation: config.json's and generation_config.json's, in rising order."""
    ids: set[int] = set()
    file = folder / "generation_config.json"
    sources = [(folder / "config.json", config), (file, read_optional(file))]
    for source, conf in sources:
        said = conf.get("eos_token_id")
        for id in said if isinstance(said, list) else [said]:
            if id is None:
                continue
            if type(id) is not int or not 0 <= id < vocab_size:
                raise CheckpointError(f"{source}: eos_token_id {id!r} is outside the vocabulary of {vocab_size}")
            ids.add(id)
    return sorted(ids)


def check_generation(folder: Path) -> list[str]:
    """Refuse what would have to change a greedy answer and isn't done; return notes about what is left out."""
    file = folder / "generation_config.json"
    conf = read_optional(file)
    only(file, set(conf) - {*_NOTED.split(), *_HELD, *_SAMPLING}, "a greedy answer")
    held(file, conf, _HELD)
    notes = []
    left = [key for key in _SAMPLING if conf.get(key) not in (None, False)]
    if conf.get("do_sample") and left:
        notes.append(f"generation is greedy: {', '.join(left)} of generation_config.json are not used")
    if conf.get("repetition_penalty") not in (None, 1, 1.0):
        notes.append(f"generation is greedy: repetition_penalty {conf['repetition_penalty']} is not applied")
    return notes


def _inside(folder: Path, path: str, file: Path) -> Path:
    if path.startswith(("/", "\\")) or ".." in Path(path).parts or ":" in path:
        raise CheckpointError(f"{file}: {path!r} must be a folder beside it")
    return folder / path if path else folder
