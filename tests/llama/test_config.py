"""runtime_config: defaults, every key's bounds, and what another backend gets."""

from __future__ import annotations

import pytest

from engines.llama.config import LlamaConfig, parse
from engines.protocol.errors import EngineError, ErrorCode


def test_defaults_and_unknown_keys() -> None:
    expected = LlamaConfig(threads=2)
    assert parse({}, backend="cpu", cores=4) == expected
    assert parse({"artifact_path": "x", "tokenizer": "y"}, backend="cpu", cores=4) == expected
    assert parse({}, backend="metal", cores=1).gpu_layers == 99
    assert (
        parse({}, backend="metal", cores=1).encode_chunk_tokens > parse({}, backend="cpu", cores=1).encode_chunk_tokens
    )
    assert parse({}, backend="cpu", cores=1).threads == 1
    assert parse({}, backend="cpu", cores=3).threads == 2, "half, rounded up"


def test_values_are_read() -> None:
    values = {
        "backend": " cpu ",
        "ctx_size": "1024",
        "batch_size": "64",
        "ubatch_size": "32",
        "gpu_layers": "7",
        "threads": "3",
        "pooling_implementation": "manual",
        "flash_attention": "disabled",
        "forward_pass": "decode",
        "microllm_max_tokens": "9",
        "encode_chunk_tokens": "128",
        "contexts": "4",
    }
    assert parse(values, backend="cpu", cores=8) == LlamaConfig(
        threads=3,
        ctx_size=1024,
        batch_size=64,
        ubatch_size=32,
        gpu_layers=7,
        flash_attention="disabled",
        forward_pass="decode",
        microllm_max_tokens=9,
        encode_chunk_tokens=128,
        contexts=4,
    )


def test_threads_never_exceed_the_quota() -> None:
    assert parse({"threads": "64"}, backend="cpu", cores=2).threads == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, value)
            for key in ("ctx_size", "batch_size", "ubatch_size", "threads")
            for value in ("0", "-1", "x", "")
        ),
        ("encode_chunk_tokens", "0"),
        ("gpu_layers", "4294967296"),
        ("gpu_layers", "-1"),
        ("microllm_max_tokens", "1.5"),
        *(("threads", value) for value in ("١", "1e2", "1.0", "+1", "0x2")),
        ("ctx_size", "9" * 40),
        ("contexts", "0"),
        ("contexts", "all"),
        ("contexts", "65"),
        ("pooling_implementation", "builtin"),
        ("flash_attention", "on"),
        ("forward_pass", "both"),
        ("backend", "  "),
    ],
)
def test_bad_values_name_the_key(key: str, value: str) -> None:
    with pytest.raises(EngineError, match=key) as caught:
        parse({key: value}, backend="cpu", cores=2)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("key", ["backend", "compiled_backend"])
def test_another_backend_is_missing(key: str) -> None:
    with pytest.raises(EngineError) as caught:
        parse({key: "metal"}, backend="cpu", cores=2)
    assert caught.value.code is ErrorCode.BACKEND_MISSING
    assert caught.value.msg.startswith("backend_unavailable")
