"""runtime_config: defaults, every key's bounds, and what another backend gets."""

from __future__ import annotations

import pytest

from engines.llama.config import LlamaConfig, parse
from engines.protocol.errors import EngineError, ErrorCode


def test_every_key_is_read_and_unknown_ones_are_not() -> None:
    assert parse({"artifact_path": "x"}, backend="cpu", cores=4) == LlamaConfig(threads=2)
    values: dict[str, object] = {
        "threads": 3, "ctx_size": 1024, "batch_size": 64, "ubatch_size": 32, "gpu_layers": 7,
        "flash_attention": "disabled", "forward_pass": "decode", "microllm_max_tokens": 9, "encode_chunk_tokens": 128,
        "contexts": 4, "pooling_implementation": "manual",
    }  # fmt: skip
    given = {key: str(value) for key, value in values.items()} | {"backend": " cpu "}
    assert parse(given, backend="cpu", cores=8) == LlamaConfig(**values)  # type: ignore[arg-type]
    assert parse({"contexts": "auto"}, backend="cpu", cores=8).contexts == 0


@pytest.mark.parametrize(("cores", "given", "threads"), [(1, {}, 1), (3, {}, 2), (2, {"threads": "64"}, 2)])
def test_threads_are_half_the_cores_and_never_more_than_all(cores: int, given: dict[str, str], threads: int) -> None:
    assert parse(given, backend="cpu", cores=cores).threads == threads


def test_an_accelerator_takes_all_layers_and_larger_chunks() -> None:
    metal, cpu = (parse({}, backend=backend, cores=1) for backend in ("metal", "cpu"))
    assert (metal.gpu_layers, cpu.gpu_layers) == (99, 0)
    assert metal.encode_chunk_tokens > cpu.encode_chunk_tokens


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
