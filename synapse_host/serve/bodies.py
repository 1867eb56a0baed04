"""What a request's body may hold. Unknown parameters are refused: one that is ignored would be a wrong answer.

A parameter that changes nothing here passes (`user`, `seed`); one that would change the answer passes with the value
that means what this server does anyway (`temperature` 0), and is refused with any other.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from synapse_host.text.encoders import CHUNK

Seconds: TypeAlias = Annotated[float, Meta(gt=0, lt=1e9)]
Count: TypeAlias = Annotated[int, Meta(ge=1, lt=2**32)]
Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
"""A model or a lane. An answer that refuses it has it several times."""
Input: TypeAlias = str | list[str | int | list[int]]
"""A text, texts, a row of token ids, or rows of them."""


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request may have: the model, and how many seconds it may take."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Parameters that are not honoured, with the values that need nothing done."""

    model: Name | None = None
    timeout: Seconds | None = None

    def unsupported(self) -> str | None:
        """Return the first parameter that would change the answer and isn't honoured."""
        for name, values in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                return name
        return None


class Embeddings(Body, kw_only=True):
    """``POST /v1/embeddings``; ``input_type`` names a prompt of the model, as Cohere's and Jina's clients send it.

    ``output_dimension`` is what Cohere's and Voyage's call ``dimensions``.
    """

    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    output_dimension: int | None = None
    input_type: str | None = None
    user: Any = None


class TeiEmbed(Body, kw_only=True):
    """``POST /embed`` of Text Embeddings Inference."""

    NEUTRAL: ClassVar = {"truncation_direction": ("right", "Right"), "encoding_format": ("float",)}

    inputs: Input
    normalize: bool = True
    truncate: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None
    truncation_direction: Any = None
    encoding_format: Any = None


class Text(Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class Rerank(Body, kw_only=True):
    """``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``: ``documents`` of Cohere and Jina, or ``texts`` of TEI."""

    NEUTRAL: ClassVar = {
        "max_tokens_per_doc": (), "max_chunks_per_doc": (), "rank_fields": (["text"],), "return_embeddings": (False,),
        "truncation_direction": ("right", "Right"),
    }  # fmt: skip

    query: str
    documents: list[str | Text] | None = None
    texts: list[str] | None = None
    top_n: Count | None = None
    return_documents: bool | None = None
    return_text: bool = False
    raw_scores: bool = False
    truncate: bool = False
    max_tokens_per_doc: Any = None
    max_chunks_per_doc: Any = None
    rank_fields: Any = None
    return_embeddings: Any = None
    truncation_direction: Any = None
    priority: Any = None
    user: Any = None


class StreamOptions(Struct):
    """``stream_options`` of OpenAI: whether the last event counts the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Body, kw_only=True):
    """What a completion and a chat have in common. The answer is the model's greedy one."""

    NEUTRAL: ClassVar = {
        "temperature": (0,), "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
        "top_p": (1,), "response_format": ({"type": "text"},), "best_of": (1,),
    }  # fmt: skip

    max_tokens: Count | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    response_format: Any = None
    seed: Any = None
    user: Any = None
    metadata: Any = None

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Sampling, kw_only=True):
    """``POST /v1/completions``."""

    NEUTRAL: ClassVar = {**Sampling.NEUTRAL, "logprobs": (), "echo": (False,), "suffix": ("",)}

    prompt: str | list[str | int | list[int]]
    logprobs: Any = None
    echo: Any = None
    suffix: Any = None


class Part(Struct, forbid_unknown_fields=True):
    """A part of a message; only text is taken."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """One message of a chat; what clients send back of an earlier answer may be there, and empty."""

    role: str
    content: str | list[Part]
    name: None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    annotations: None = None
    audio: None = None


class Chat(Sampling, kw_only=True):
    """``POST /v1/chat/completions``."""

    NEUTRAL: ClassVar = {
        **Sampling.NEUTRAL, "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "functions": ([],),
        "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "modalities": (["text"],),
    }  # fmt: skip

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: Any = None
    top_logprobs: Any = None
    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    function_call: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


# --- the operator's ---------------------------------------------------------------------------------------------------


class Lane(Body, kw_only=True):
    """A lane by its id, its name in the matrix or a model; none is all of them."""

    lane: Name | None = None


class Logs(Lane, kw_only=True):
    """What workers wrote: ``after`` (lane to position, from an earlier answer) asks for what is new since then.

    ``wait``: for how many seconds to wait when nothing is.
    """

    after: dict[str, int] = {}
    wait: Annotated[float, Meta(ge=0, lt=1e9)] = 0.0


class Load(Body, kw_only=True):
    """A model to load or unload, and the lane of the matrix where its task has more than one."""

    model: Name
    lane: Name | None = None


class Probe(Body, kw_only=True):
    """The lane to prove."""

    lane: Name


class EmbedCall(Load, kw_only=True):
    """:meth:`Host.embed_result`, as the command calls it; the first text has the number *offset*."""

    texts: Annotated[list[str], Meta(min_length=1, max_length=CHUNK)]
    truncate: bool = False
    prompt: str | None = None
    dimensions: int | None = None
    offset: Annotated[int, Meta(ge=0)] = 0


class RerankCall(Load, kw_only=True):
    """:meth:`Host.rerank_result`, as the command calls it."""

    query: str
    documents: list[str]
    raw: bool = False
    truncate: bool = False


class GenerateCall(Load, kw_only=True):
    """:meth:`Host.generate`, as the command calls it."""

    prompt: str
    max_tokens: Count
    chat: bool = False
