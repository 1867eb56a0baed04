"""llama.cpp through llama-cpp-python's low-level API: the only file of a worker that touches the native library.

The high-level ``Llama`` class takes text only and truncates silently, so it is not used. Every foreign call releases
the GIL (``ctypes.CDLL``). Callbacks are kept referenced as long as native code may call them. A status becomes an
EngineError; an abort inside ggml stays fatal by design and leaves ggml's own line with the reason on stderr.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.machine import free_memory
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.llama.config import FlashAttention
    from engines.runtime.batch import FloatArray, IntArray

PACKAGE: Final = "llama_cpp"
POOLING_NONE, POOLING_MEAN, POOLING_CLS, POOLING_LAST, POOLING_RANK = range(5)
PIECE_BYTES: Final = 64
LAYER_NODE: Final = b"ffn_out-"
"""Graph node that ends a layer's work in the BERT and llama families (llama-cuda.md, 3)."""
STATES_NODE: Final = b"result_embd_pooled"
"""Graph node of the states that a call returns: llama.cpp gives it this name in every family."""
CHATTER: Final = ("n_ctx_seq (", "special_eos_id", "special_eog_ids", "default pooling_type", "dummy tokens")
"""Native warnings that say nothing an operator could act on."""

log = logging.getLogger(__name__)
_lock = threading.Lock()
_library: Library | None = None


class Library:
    """The loaded native library and the process-wide callbacks it was given."""

    def __init__(self, api: ModuleType) -> None:
        self.api: Any = api
        self.last_error = ""
        self._level = 0
        self._on_log = api.llama_log_callback(self._log)
        api.llama_log_set(self._on_log, ctypes.c_void_p(0))
        # A symbol of libggml-base, which a POSIX loader finds through the library that needs it. Opening the wheel's
        # libggml-base.so would map a second copy with globals of its own.
        base = ctypes.CDLL(str(Path(api._lib._name).parent / "ggml-base.dll")) if sys.platform == "win32" else api._lib
        self.node_name = base.ggml_get_name
        self.node_name.argtypes, self.node_name.restype = [ctypes.c_void_p], ctypes.c_char_p
        api.llama_backend_init()

    def _log(self, level: int, text: bytes | None, _user: object) -> None:
        # ggml.h: debug 1, info 2, warn 3, error 4, continuation 5. Lower ones would only push reasons out of the ring.
        if level != 5:
            self._level = level
        line = (text or b"").decode("utf-8", "replace").rstrip()
        if self._level < 3 or not line or any(words in line for words in CHATTER):
            return
        if self._level >= 4:
            self.last_error = self.last_error or line  # the first says why, the last only that it failed
        log.log(logging.ERROR if self._level >= 4 else logging.WARNING, "llama.cpp: %s", line)


def library() -> Library:
    """Load the native library on first use.

    Raises EngineError ``backend_missing`` when llama-cpp-python or its shared objects can't be loaded.
    """
    global _library
    with _lock:
        if _library is None:
            # An abort then leaves ggml's own line with the reason on stderr and nothing else: its backtrace printer may
            # start gdb and would push that line out of the host's log tail.
            os.environ.setdefault("GGML_NO_BACKTRACE", "1")
            # ggml's barriers are OpenMP's, which spin for milliseconds by default: beside a busy neighbour two threads
            # then wait up to ten times as long. This many turns cost nothing on a quiet machine (docs/performance.md).
            # libgomp reads it once, when it is loaded; what the matrix sets for the engine wins.
            if "OMP_WAIT_POLICY" not in os.environ:
                os.environ.setdefault("GOMP_SPINCOUNT", "2000")
            try:
                llama_cpp = _bindings()
            except (ImportError, OSError, RuntimeError) as exc:
                raise EngineError(
                    ErrorCode.BACKEND_MISSING, f"llama-cpp-python can't be loaded ({exc}): install the 'llama' extra"
                ) from exc
            _library = Library(llama_cpp)
        return _library


def _bindings() -> ModuleType:
    """Import the low-level module alone: the package around it imports jinja2 and more, 50 ms that nobody here uses."""
    if PACKAGE not in sys.modules and (spec := find_spec(PACKAGE)) is not None:
        bare = ModuleType(PACKAGE)
        bare.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[PACKAGE] = bare
        try:
            return import_module(f"{PACKAGE}.llama_cpp")
        finally:
            del sys.modules[PACKAGE]
    return import_module(f"{PACKAGE}.llama_cpp")


def system_info() -> str:
    """Return llama.cpp's own list of CPU features it was compiled for."""
    return str(library().api.llama_print_system_info().decode("utf-8", "replace"))


def supports_offload() -> bool:
    """Return whether this build can put layers on an accelerator."""
    return bool(library().api.llama_supports_gpu_offload())


class NativeModel:
    """A loaded GGUF. Close its contexts first, then the model."""

    def __init__(self, descriptor: int, *, gpu_layers: int, on_tensor: Callable[[], None]) -> None:
        """Load from the open *descriptor*, from byte 0; *on_tensor* is called after each tensor was read.

        Raises EngineError ``artifact_invalid`` when llama.cpp refuses the file.
        """
        self.api = library().api
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = min(gpu_layers, 2**31 - 1)
        if gpu_layers == 0:
            self._devices = (ctypes.c_void_p * 1)(None)  # an empty list: no accelerator even where one is compiled in
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        done = 0.0

        def progress(fraction: float, _user: object) -> bool:
            nonlocal done
            if fraction > done:
                done = fraction
                on_tensor()
            return True

        callback = self.api.llama_progress_callback(progress)
        params.progress_callback = callback
        self.handle: Any = open_model(descriptor, params)
        self._vocab = self.api.llama_model_get_vocab(self.handle)
        self.n_ctx_train = int(self.api.llama_model_n_ctx_train(self.handle))
        self.n_embd = int(self.api.llama_model_n_embd(self.handle))
        self.n_embd_out = int(self.api.llama_model_n_embd_out(self.handle))
        self.n_layer = int(self.api.llama_model_n_layer(self.handle))
        self.n_params = int(self.api.llama_model_n_params(self.handle))
        self.n_cls_out = int(self.api.llama_model_n_cls_out(self.handle))
        self.n_vocab = int(self.api.llama_vocab_n_tokens(self._vocab))
        self.has_vocab = int(self.api.llama_vocab_type(self._vocab)) != 0
        self.is_encoder_decoder = bool(
            self.api.llama_model_has_encoder(self.handle) and self.api.llama_model_has_decoder(self.handle)
        )

    def is_end(self, token: int) -> bool:
        """Return whether *token* ends a generation."""
        return bool(self.api.llama_vocab_is_eog(self._vocab, token))

    def piece(self, token: int) -> bytes:
        """Return the bytes of *token*; control tokens are empty. Only for files with a vocabulary."""
        buffer = ctypes.create_string_buffer(PIECE_BYTES)
        length = self.api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self.api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[: max(0, length)]

    def close(self) -> None:
        """Free the weights; idempotent."""
        model, self.handle = self.handle, None
        if model:
            self.api.llama_model_free(model)


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What a context is made for; equal shapes may share one."""

    n_ctx: int
    n_ubatch: int
    n_seq_max: int = 1
    pooling: int = POOLING_NONE
    embeddings: bool = True
    causal: bool | None = None
    """None leaves it to the model file."""
    flash: FlashAttention = "auto"
    watched: bool = False
    """Report each finished layer; for calls that may take seconds."""
    headless: bool = False
    """End a call at the token states: llama.cpp computes logits of every token, also where only states are wanted."""


class NativeContext:
    """One computing context with batch arrays of its own; used by one thread at a time."""

    def __init__(self, model: NativeModel, shape: ContextShape) -> None:
        """Create the context. Raises EngineError ``config_invalid`` when llama.cpp gives none."""

        self.shape = shape
        self.model = model
        self.api = api = model.api
        self.on_layer: Callable[[], None] | None = None
        lib = library()
        params = api.llama_context_default_params()
        params.n_ctx = shape.n_ctx
        params.n_batch = params.n_ubatch = shape.n_ubatch
        params.n_seq_max = shape.n_seq_max
        params.n_threads = params.n_threads_batch = 1
        if not shape.embeddings:
            params.n_outputs_max = shape.n_seq_max  # else the graph is sized for logits of every prompt token
        params.pooling_type = shape.pooling
        params.embeddings = shape.embeddings
        params.kv_unified = True
        params.no_perf = True
        params.flash_attn_type = {"auto": -1, "disabled": 0, "enabled": 1}[shape.flash]
        if shape.causal is not None:
            params.attention_type = 0 if shape.causal else 1
        self._seen: set[bytes] = set()
        if shape.watched or shape.headless:
            self._on_node = api.ggml_backend_sched_eval_callback(self._node)
            params.cb_eval = self._on_node
        lib.last_error = ""
        self._context = api.llama_init_from_model(model.handle, params)
        if not self._context:
            raise EngineError(
                ErrorCode.CONFIG_INVALID,
                f"llama.cpp gives no context for {shape}: {lib.last_error or 'no reason given'}",
            )
        self._memory = api.llama_get_memory(self._context)
        try:
            self._allocate_batch()
        except BaseException:  # MemoryError above all: the native context would outlive this object
            self.close()
            raise

    def _allocate_batch(self) -> None:
        """Make the arrays that every call fills, and the native batch that points into them."""
        api, shape = self.api, self.shape
        size = shape.n_ubatch
        self._tokens = np.zeros(size, dtype=np.int32)
        self._positions = np.zeros(size, dtype=np.int32)
        self._counts = np.ones(size, dtype=np.int32)
        self._outputs = np.zeros(size, dtype=np.int8)
        self._ids = np.arange(shape.n_seq_max, dtype=np.int32)
        self._id_addresses = (self._ids.ctypes.data + 4 * np.arange(shape.n_seq_max)).astype(np.uintp)
        self._sequences = np.full(size, self._ids.ctypes.data, dtype=np.uintp)
        self._batch = api.llama_batch(
            token=self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            pos=self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._sequences.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    @property
    def has_memory(self) -> bool:
        """Whether the model keeps a KV cache. Without one it must not be decoded, with one not encoded (U2)."""
        return bool(self._memory)

    def set_threads(self, threads: int) -> None:
        """Compute with *threads* threads from now on; the numbers don't depend on it."""
        self.api.llama_set_n_threads(self._context, threads, threads)

    def clear(self, *, data: bool = False) -> None:
        """Forget every cached token; *data* also zeroes the cells."""
        if self._memory:
            self.api.llama_memory_clear(self._memory, data)

    def cut(self, length: int) -> bool:
        """Forget what sequence 0 holds from position *length* on; False where the cache can't, and then forget it all.

        A recurrent state has no earlier positions to go back to, and a sliding window may have lost them.
        """
        api = self.api
        removed = api.llama_memory_seq_rm(self._memory, 0, length, -1)
        if removed and api.llama_memory_seq_pos_min(self._memory, 0) == 0:
            return True
        self.clear()
        return False

    def copy(self, other: NativeContext) -> bool:
        """Take over sequence 0 of another context of the same model, to the bit; False, and empty, where it can't be.

        The cells pass through memory of their own size, so that much must be free.
        """
        api = self.api
        size = int(api.llama_state_seq_get_size(other._context, 0))
        if size > free_memory():
            return False
        state = (ctypes.c_uint8 * size)()
        read = api.llama_state_seq_get_data(other._context, state, size, 0)
        if read == size and api.llama_state_seq_set_data(self._context, state, size, 0) == size:
            return True
        self.clear()
        return False

    def run_rows(self, ids: IntArray, bounds: IntArray) -> None:
        """Compute whole rows, one sequence each; every token is an output. At most n_ubatch tokens (U1)."""
        n, rows = len(ids), len(bounds) - 1
        assert n <= self.shape.n_ubatch and rows <= self.shape.n_seq_max, f"{rows} rows of {n} tokens in {self.shape}"
        lengths = bounds[1:] - bounds[:-1]
        self._tokens[:n] = ids
        self._positions[:n] = np.arange(n, dtype=np.int32) - np.repeat(bounds[:-1], lengths)
        self._sequences[:n] = np.repeat(self._id_addresses[:rows], lengths)
        self._outputs[:n] = 1
        self._compute(n)

    def run_slice(self, ids: IntArray | Sequence[int], *, position: int, output: bool) -> None:
        """Append *ids* to sequence 0 at *position*; *output* asks for the logits of the last one."""
        n = len(ids)
        self._tokens[:n] = ids
        self._positions[:n] = np.arange(position, position + n, dtype=np.int32)
        self._sequences[:n] = self._id_addresses[0]
        self._outputs[:n] = 0
        self._outputs[n - 1] = 1 if output else 0
        self._compute(n)

    def states(self, tokens: int) -> FloatArray:
        """Return a view of the last call's token states, float32 (tokens, dims), valid until the next call."""
        pointer = self.api.llama_get_embeddings(self._context)
        if not pointer:
            raise EngineError(ErrorCode.INFERENCE_FAILED, "llama.cpp returned no token states")
        return np.ctypeslib.as_array(pointer, shape=(tokens, self.model.n_embd_out))

    def scores(self, rows: int) -> FloatArray:
        """Return the last call's scores, float32 (rows,): a rank head's first number for each row."""
        pointers = [self.api.llama_get_embeddings_seq(self._context, row) for row in range(rows)]
        if not all(pointers):
            raise EngineError(ErrorCode.INFERENCE_FAILED, "llama.cpp returned no scores")
        return np.array([pointer[0] for pointer in pointers], dtype=np.float32)

    def logits(self) -> FloatArray:
        """Return a view of the logits of the last output, float32 (vocabulary,), valid until the next call."""
        pointer = self.api.llama_get_logits_ith(self._context, -1)
        if not pointer:
            raise EngineError(ErrorCode.INFERENCE_FAILED, "llama.cpp returned no logits")
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def close(self) -> None:
        """Free the context; idempotent."""
        context, self._context = self._context, None
        if context:
            self.api.llama_free(context)

    def _compute(self, tokens: int) -> None:
        self._batch.n_tokens = tokens
        self._seen.clear()
        call = self.api.llama_decode if self._memory else self.api.llama_encode
        status = int(call(self._context, self._batch))
        if status == 0:
            return
        code, reason = _STATUS.get(status, (ErrorCode.INFERENCE_FAILED, "failed"))
        raise EngineError(code, f"llama.cpp {reason} (status {status}) on {tokens} tokens")

    def _node(self, tensor: int, ask: bool, _user: object) -> bool:
        """Say which nodes are wanted, and once one is computed whether the call goes on.

        False then drops the rest of the graph, as far as it lies on the same device, and the call still succeeds.
        """
        name = library().node_name(tensor) or b""
        if self.shape.headless and name == STATES_NODE:
            return ask
        if ask:
            return self.shape.watched and name.startswith(LAYER_NODE) and name not in self._seen
        self._seen.add(name)
        if self.on_layer is not None:
            self.on_layer()
        return True


_STATUS: Final = {
    1: (ErrorCode.INFERENCE_FAILED, "found no room in its cache"),
    -1: (ErrorCode.INVALID_REQUEST, "refused the batch"),
    -2: (ErrorCode.OOM, "could not allocate memory"),
    -3: (ErrorCode.INFERENCE_FAILED, "failed to compute"),
}


def open_model(descriptor: int, params: Any) -> Any:
    """Return the native model in the open file *descriptor*, from byte 0: hashed and loaded is the same open file.

    Raises EngineError ``artifact_invalid`` when llama.cpp refuses the file.
    """
    lib = library()
    # Reading instead of mapping: progress then counts bytes really read, and a file changed or cut after the digest
    # was checked can't reach the weights.
    params.load_mode = lib.api.LLAMA_LOAD_MODE_NONE
    lib.last_error = ""
    os.lseek(descriptor, 0, os.SEEK_SET)  # "The GGUF is read from the current position"
    if sys.platform == "win32":
        c = ctypes.CDLL("ucrtbase")
        opener = c._fdopen
    else:
        c = ctypes.CDLL(None)
        opener = c.fdopen
    opener.argtypes, opener.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
    c.fclose.argtypes = [ctypes.c_void_p]
    copy = os.dup(descriptor)
    stream = opener(copy, b"rb")
    if not stream:
        os.close(copy)
        raise EngineError(ErrorCode.OOM, "the C library gives no stream for the file")
    try:
        model = lib.api.llama_model_load_from_file_ptr(stream, params)
    finally:
        c.fclose(stream)
    if not model:
        reason = lib.last_error or "no reason given"
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"llama.cpp refuses the file: {reason}")
    return model
