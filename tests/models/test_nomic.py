"""An architecture that no builder here knows, from somebody else's GGUF: nomic-bert, and its forward pass in numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from synapse_host import SyncHost
from synapse_host.models import from_gguf
from tests.support import toy_models

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = [pytest.mark.process, pytest.mark.llama]

HIDDEN, FFN, VOCAB, LAYERS, HEADS, BASE = 64, 128, 128, 2, 4, 1000.0
Weights = dict[str, np.ndarray]


def weights() -> Weights:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    made = {"token_embd.weight": matrix(VOCAB, HIDDEN) * 8, "token_types.weight": matrix(2, HIDDEN) * 8}
    norms = ["token_embd_norm"]
    for layer in (f"blk.{n}" for n in range(LAYERS)):
        made |= {f"{layer}.attn_qkv.weight": matrix(3 * HIDDEN, HIDDEN)}
        made |= {f"{layer}.attn_output.weight": matrix(HIDDEN, HIDDEN), f"{layer}.ffn_gate.weight": matrix(FFN, HIDDEN)}
        made |= {f"{layer}.ffn_up.weight": matrix(FFN, HIDDEN), f"{layer}.ffn_down.weight": matrix(HIDDEN, FFN)}
        norms += [f"{layer}.attn_output_norm", f"{layer}.layer_output_norm"]
    for norm in norms:
        made[f"{norm}.weight"] = (1 + rng.standard_normal(HIDDEN) / 10).astype(np.float32)
        made[f"{norm}.bias"] = (rng.standard_normal(HIDDEN) / 10).astype(np.float32)
    return made


def write(file: Path, stored: Weights) -> Path:
    toy_models.write_wordpiece_tokenizer(file.parent, VOCAB)
    entries = json.loads((file.parent / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(file, "nomic-bert")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_rope_freq_base(BASE)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([t if t[0] == "[" else t[2:] if t[:2] == "##" else f"\u2581{t}" for t in entries])
    writer.add_token_types([3] * 5 + [1] * (VOCAB - 5))
    for role, id in {"bos": 2, "seperator": 3, "unknown": 1, "padding": 0}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", id)
    for name, array in stored.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rotated(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(half) / half)
    cosine, sine, left, right = np.cos(angles)[:, None], np.sin(angles)[:, None], x[..., :half], x[..., half:]
    return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], -1)


def computed(w: Weights, ids: list[int]) -> np.ndarray:
    """Rotary positions, layer norms behind each sum, SiLU-gated layers without biases; the mean, of length one."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True)) * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = norm(w["token_embd.weight"][ids] + w["token_types.weight"][0], "token_embd_norm")
    for n in range(LAYERS):
        layer = f"blk.{n}"
        parts = np.split(x @ w[f"{layer}.attn_qkv.weight"].T, 3, axis=-1)
        q, k, v = (part.reshape(len(ids), HEADS, -1) for part in parts)
        scores = np.exp(np.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / (HIDDEN / HEADS) ** 0.5)
        seen = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(len(ids), HIDDEN)
        x = norm(x + seen @ w[f"{layer}.attn_output.weight"].T, f"{layer}.attn_output_norm")
        gate = x @ w[f"{layer}.ffn_gate.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (x @ w[f"{layer}.ffn_up.weight"].T)
        x = norm(x + inner @ w[f"{layer}.ffn_down.weight"].T, f"{layer}.layer_output_norm")
    pooled = x.mean(0)
    return pooled / np.linalg.norm(pooled)


def test_nomic_bert_embeds_from_its_gguf(tmp_path: Path) -> None:
    stored = weights()
    bundle = from_gguf.build(write(tmp_path / "nomic.gguf", stored), tmp_path / "out", model_id="nomic")
    made = bundle.manifest
    assert (made.family, made.task, made.pooling, made.max_tokens) == ("nomic-bert", "embed", "mean", 64)
    rows = [[2, 9, 3], [2, *range(5, 60), 3], [2, 20, 30, 40, 3]]
    with SyncHost.open(models={"nomic": bundle.root}) as host:
        vectors = host.embed_ids("nomic", rows)
        assert host.embed("nomic", ["the cat sat"]).shape == (1, HIDDEN)
    for vector, row in zip(vectors, rows, strict=True):
        assert vector @ computed(stored, row) > 0.9999
