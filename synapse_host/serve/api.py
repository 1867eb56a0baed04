"""What programs send that were written for OpenAI, Cohere, Jina or Text Embeddings Inference (TEI).

The numbers are the host's own, to the bit: JSON holds digits that read as the same float32, base64 its bytes. Texts are
generated greedily. What a request may hold is in :mod:`synapse_host.serve.bodies`.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np  # here: otherwise the first request would wait for it, and all others meanwhile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from engines.bundle.manifest import Bundle
from synapse_host.errors import InvalidRequest, SynapseError, UnknownModel
from synapse_host.results import Generation, Piece
from synapse_host.serve.bodies import Body, Chat, Completion, Embeddings, Input, Rerank, Sampling, TeiEmbed
from synapse_host.serve.service import Endpoint, Refused, Service, deadline_of, error_of, json_response
from synapse_host.text.validate import absolute, prompt_text

MAX_INPUTS: Final = 2048
"""Texts, rows or documents of one request, as OpenAI has it."""
COMPLETION_TOKENS: Final = 16
"""``max_tokens`` of a completion that says nothing, as OpenAI has it. A chat ends by itself, or with the context."""
BLOCK: Final = 32
"""Vectors that are written as JSON at once; other requests come between."""


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the clients."""
    api = Api(service)
    kinds: dict[str, tuple[type[Body], Any]] = {
        "/v1/embeddings": (Embeddings, api.embeddings),
        "/v1/completions": (Completion, api.completion),
        "/v1/chat/completions": (Chat, api.chat),
        "/v1/rerank": (Rerank, api.rerank),
        "/v2/rerank": (Rerank, api.rerank),
        "/rerank": (Rerank, api.rerank),
        "/embed": (TeiEmbed, api.embed),
    }
    posts = [Route(path, Endpoint(service, kind, handle), methods=["POST"]) for path, (kind, handle) in kinds.items()]
    return [*posts, Route("/v1/models", api.models), Route("/v1/models/{name}", api.model)]


class Api:
    """The calls of the clients, each one call of the host."""

    def __init__(self, service: Service) -> None:
        self._host = service.host
        self._created = int(time.time())

    # --- models ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return json_response({"object": "list", "data": [self._listed(*item) for item in self._host.bundles.items()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{name}``."""
        name = request.path_params["name"]
        bundle = self._host.bundles.get(name)
        if bundle is None:
            known = sorted(self._host.bundles)
            raise UnknownModel(f"no model {name!r} (have: {', '.join(known) or 'none'})", details={"known": known})
        return json_response(self._listed(name, bundle))

    def _listed(self, name: str, bundle: Bundle) -> dict[str, Any]:
        task = {"task": bundle.manifest.task, "max_tokens": bundle.manifest.max_tokens}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "synapse", **task}

    def _model(self, body: Body, task: str) -> str:
        """Return the model that a request names, or the only one of the task."""
        if body.model is not None:
            return body.model
        names = sorted(name for name, bundle in self._host.bundles.items() if bundle.manifest.task == task)
        if len(names) != 1:
            have = ", ".join(names) or "none"
            raise InvalidRequest(f"name a model (for {task}: {have})", details={"param": "model", "known": names})
        return names[0]

    # --- embeddings --------------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request, body: Embeddings) -> Response:
        """``POST /v1/embeddings``."""
        model = self._model(body, "embed")
        vectors, tokens = await self._embed(request, body, model, body.input, "input", truncate=False)

        def items() -> Iterator[Any]:
            for index, row in enumerate(vectors):
                value = row.tolist() if body.encoding_format == "float" else base64.b64encode(row.tobytes()).decode()
                yield {"object": "embedding", "index": index, "embedding": value}

        usage = msgspec.json.encode({"prompt_tokens": tokens, "total_tokens": tokens})
        head = b'{"object":"list","model":' + msgspec.json.encode(model) + b',"usage":' + usage + b',"data":['
        return _listing(head, items(), len(vectors), b"]}")

    async def embed(self, request: Request, body: TeiEmbed) -> Response:
        """TEI's ``POST /embed``: a list of vectors and nothing else."""
        model = self._model(body, "embed")
        bundle = self._host.bundles.get(model)
        if bundle is not None and body.normalize != (bundle.manifest.normalize is not False):
            raise InvalidRequest(f"normalize: {model} has its own", details={"param": "normalize"})
        vectors, _ = await self._embed(request, body, model, body.inputs, "inputs", truncate=body.truncate)
        return _listing(b"[", (row.tolist() for row in vectors), len(vectors), b"]")

    async def _embed(
        self, request: Request, body: Embeddings | TeiEmbed, model: str, given: Input, name: str, *, truncate: bool
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Return the vectors of what was given and how many token ids that is."""
        bundle = self._host.bundles.get(model)
        asked = {body.dimensions, getattr(body, "output_dimension", None)} - {None}
        if len(asked) > 1:
            message = "dimensions and output_dimension are two names of one number, and differ"
            raise InvalidRequest(message, details={"param": "output_dimension"})
        options: dict[str, Any] = {"deadline": deadline_of(request, body), "dimensions": next(iter(asked), None)}
        texts, rows = _inputs(given, name)
        field = "input_type" if isinstance(body, Embeddings) else "prompt_name"
        prompt: str | None = getattr(body, field)
        if prompt is not None:
            if rows:
                raise InvalidRequest("a prompt goes before texts, not before token ids", details={"param": field})
            if bundle is not None:
                try:
                    prompt_text(bundle.manifest, prompt)
                except InvalidRequest as exc:
                    details = {**exc.details, "param": field}
                    raise InvalidRequest(f"{field}: {exc.message}", details=details) from exc
        if rows:
            return await self._host.embed_ids(model, rows, **options), sum(map(len, rows))
        result = await self._host.embed_result(model, texts, truncate=truncate, prompt=prompt, **options)
        return result.vectors, result.tokens

    # --- reranking ---------------------------------------------------------------------------------------------------

    async def rerank(self, request: Request, body: Rerank) -> Response:
        """``documents`` are answered as Cohere and Jina do, best first; ``texts`` as TEI does."""
        if (body.documents is None) == (body.texts is None):
            raise InvalidRequest("give documents, or texts as TEI has them", details={"param": "documents"})
        documents = [one if isinstance(one, str) else one.text for one in body.documents or body.texts or []]
        _check_count(documents, "documents" if body.texts is None else "texts")
        result = await self._host.rerank_result(
            self._model(body, "rerank"),
            body.query,
            documents,
            raw=body.raw_scores,
            deadline=deadline_of(request, body),
            truncate=body.truncate,
        )
        results: list[dict[str, Any]] = []
        for index in result.order[: body.top_n]:
            score, text = float(result.scores[index]), documents[index]
            if body.texts is not None:
                results.append({"index": index, "score": score, **({"text": text} if body.return_text else {})})
            else:
                shown = {"document": {"text": text}} if body.return_documents else {}
                results.append({"index": index, "relevance_score": score, **shown})
        if body.texts is not None:
            return json_response(results)
        head = {"id": secrets.token_hex(12), "object": "list", "model": result.model}
        usage = {"prompt_tokens": result.tokens, "total_tokens": result.tokens}
        return json_response({**head, "results": results, "usage": usage, "meta": {"api_version": {"version": "2"}}})

    # --- generation --------------------------------------------------------------------------------------------------

    async def completion(self, request: Request, body: Completion) -> Response:
        """``POST /v1/completions``."""
        texts, rows = _inputs(body.prompt, "prompt")
        answer = _Answer("cmpl", "text_completion", self._model(body, "generate"))
        tokens = body.max_tokens or COMPLETION_TOKENS
        options: dict[str, Any] = {"stop": body.stops(), "deadline": deadline_of(request, body)}
        if body.stream or len(texts) == 1:
            if len(texts) != 1:
                raise InvalidRequest("a stream has one prompt, which is a text", details={"param": "prompt"})
            return await self._generated(body, answer, texts[0], {**options, "max_tokens": tokens})
        until = absolute(options["deadline"])
        call = self._host.generate_ids if rows else self._host.generate
        results = []
        # One after another: all at once they would fill the lane's queue, and others be refused.
        for index, prompt in enumerate(rows or texts):
            if until is not None:
                options["deadline"] = until - asyncio.get_running_loop().time()
            try:
                results.append(await call(answer.model, prompt, max_tokens=tokens, **options))  # type: ignore[arg-type]
            except SynapseError as exc:
                if "index" not in exc.details:
                    raise
                # It was the only prompt of its call.
                raise exc.located(f"prompt {index}", "prompt 0 ").with_details(index=index) from exc
        return answer.whole(*results)

    async def chat(self, request: Request, body: Chat) -> Response:
        """``POST /v1/chat/completions``."""
        answer = _Answer("chatcmpl", "chat.completion", self._model(body, "generate"))
        messages = [
            {"role": message.role, "content": content if isinstance(content, str) else "".join(p.text for p in content)}
            for message in body.messages
            for content in (message.content,)
        ]
        tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        options = {"max_tokens": tokens, "stop": body.stops(), "deadline": deadline_of(request, body), "chat": True}
        return await self._generated(body, answer, messages, options)

    async def _generated(self, body: Sampling, answer: _Answer, prompt: Any, options: dict[str, Any]) -> Response:
        if not body.stream:
            return answer.whole(await self._host.generate(answer.model, prompt, **options))
        pieces = self._host.generate_stream(answer.model, prompt, **options)
        # What is refused, or fails before there is any text, still has a status of its own.
        first = await anext(pieces)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _Events(answer.events(first, pieces, usage=usage), media_type="text/event-stream")


def _inputs(given: Input, name: str) -> tuple[list[str], list[list[int]]]:
    """Return what was given as texts, or as rows of token ids; one of the two is empty."""
    if isinstance(given, str):
        return [given], []
    _check_count(given, name)
    kinds = set(map(type, given))
    if kinds == {str}:
        return given, []  # type: ignore[return-value]
    if kinds == {int}:
        return [], [given]  # type: ignore[list-item]
    if kinds == {list}:
        return [], given  # type: ignore[return-value]
    raise InvalidRequest(f"{name} mixes texts and token ids", details={"param": name})


def _check_count(given: list[Any], name: str) -> None:
    if not given:
        raise InvalidRequest(f"{name} is empty: nothing to do", details={"param": name})
    if len(given) > MAX_INPUTS and not isinstance(given[0], int):
        what = f"{name} has {len(given)} entries, a request takes {MAX_INPUTS}; send them in parts"
        raise Refused(413, what, param=name, limit=MAX_INPUTS)


def _listing(head: bytes, items: Iterator[Any], count: int, tail: bytes) -> Response:
    """Return a JSON list as an answer. A long one is written in blocks as it is read; other requests come between."""

    def block() -> bytes:
        return b",".join(map(msgspec.json.encode, islice(items, BLOCK)))

    if count <= BLOCK:
        return Response(head + block() + tail, media_type="application/json")

    async def blocks() -> AsyncGenerator[bytes, None]:
        yield head + block()
        for _ in range(BLOCK, count, BLOCK):
            await asyncio.sleep(0)
            yield b"," + block()
        yield tail

    return StreamingResponse(blocks(), media_type="application/json")


class _Answer:
    """One generated answer in OpenAI's form, whole or event by event."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.model = model
        self._kind = kind
        self._chat = kind == "chat.completion"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, *results: Generation) -> Response:
        """Return finished generations, one choice each."""
        choices = []
        for index, one in enumerate(results):
            message = {"message": {"role": "assistant", "content": one.text}} if self._chat else {"text": one.text}
            choices.append({"index": index, **message, "logprobs": None, "finish_reason": one.finish_reason})
        usage = _usage(sum(one.n_prompt for one in results), sum(one.n_gen for one in results))
        return json_response({**self._head, "object": self._kind, "choices": choices, "usage": usage})

    async def events(
        self, piece: Piece, pieces: AsyncGenerator[Piece, None], *, usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: the text as it comes, why it ended, with *usage* the counts, ``[DONE]``."""
        head = {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind}

        def event(content: dict[str, Any], finish_reason: str | None = None) -> bytes:
            part = {"delta": content} if self._chat else {"text": content.get("content", "")}
            choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}
            return _event({**head, "choices": [choice]})

        async with aclosing(pieces):
            if self._chat:
                yield event({"role": "assistant", "content": ""})
            try:
                while piece.finish_reason is None:
                    yield event({"content": piece.text})
                    piece = await anext(pieces)
            except SynapseError as exc:
                yield _event({"error": error_of(exc)})
                return
            if piece.text:
                yield event({"content": piece.text})
            yield event({}, piece.finish_reason)
            if usage:
                yield _event({**head, "choices": [], "usage": _usage(piece.n_prompt, piece.n_gen)})
            yield b"data: [DONE]\n\n"


def _usage(n_prompt: int, n_gen: int) -> dict[str, int]:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_gen, "total_tokens": n_prompt + n_gen}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document, enc_hook=str) + b"\n\n"


class _Events(StreamingResponse):
    """Server-sent events; a client that leaves ends the generation."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, media_type: str) -> None:
        # Proxies would collect the events otherwise.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
