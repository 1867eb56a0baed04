"""A chat message in the model's own template, as token ids; the template is rendered by a process of its own.

What the template writes may be special tokens; what a person wrote never is: a message with a literal ``<|im_end|>``
can't end its own turn.

A template is foreign code (:mod:`~.template_child`). A :class:`Renderer` belongs to one host. It starts the process at
the first chat, in a session of its own, with a worker's reduced environment, one connection (its standard input) and
nothing else of the host's. It keeps it for the next ones, kills it when a template takes too long, and starts another
at the next call. One template runs at a time. Everything here blocks: call it from a thread.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct

from synapse_host.errors import BundleInvalid, InvalidRequest, QueueFull
from synapse_host.placement.child import signal_name, worker_environment
from synapse_host.text.background import beside
from synapse_host.text.template_child import (
    CPU_S,
    FAILED,
    KINDS,
    MAX_RENDERED,
    MEMORY_BYTES,
    MISSING,
    REFUSED,
    TEXT,
    UNREADABLE,
)

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.text.tokenizer import TextTokenizer

PROGRAM: Final = Path(__file__).with_name("template_child.py")
WALL_S: Final = 20.0
"""Seconds of the clock that a template may take: its processor time on a busy machine, and the start of the process."""
POLL_S: Final = 0.05
"""How often the memory of the process is looked at, where no limit of the system does it."""
_LIMITED_BY_SYSTEM: Final[bool] = sys.platform == "linux"
MAX_REPLY: Final = 4 * MAX_RENDERED + 1
"""Bytes of a reply: a letter, and up to four for a character."""


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


def chat_ids(
    bundle: Bundle, tokenizer: TextTokenizer, renderer: Renderer, prompt: str | Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the ids of a conversation that ends where the assistant's answer begins; call it from a thread.

    Of a conversation with more than ``max_tokens`` ids not all, but more than that. Raises InvalidRequest for a bundle
    without a template, a missing jinja2 or malformed messages; BundleInvalid for a template that fails, runs too long
    or writes too much.
    """
    template = bundle.manifest.chat_template
    name = bundle.manifest.model_id
    if template is UNSET:
        raise InvalidRequest(
            f"bundle {name} has no chat template.",
            advice={"python": "Generate without chat=True.", "command": "Generate without --chat."},
        )
    messages = _messages(prompt, tokenizer.max_characters)
    special = bundle.manifest.special_ids or {}
    tokens = {f"{role}_token": tokenizer.token(id) for role, id in special.items() if role in ("bos", "eos")}
    if not any(tokenizer.mentions_special(message["content"]) for message in messages):
        return tokenizer.template(renderer.render(template, messages, name=name, tokens=tokens))
    # Someone wrote a special token's literal: render with marks in place of the contents and put those in as text.
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    rest = renderer.render(template, marked, name=name, tokens=tokens)
    ids: list[int] = []
    for message, mark in zip(messages, marks, strict=True):
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise InvalidRequest(
                f"the message holds a special token's literal and {name}'s template changes messages; reword it"
            )
        ids += tokenizer.template(before) + tokenizer.literal(message["content"])
    return ids + tokenizer.template(rest)


def _messages(prompt: str | Sequence[Mapping[str, str]], max_characters: int) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        messages = msgspec.convert(prompt, list[_Message])
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"the prompt is neither text nor a list of messages {{'role', 'content'}}: {exc}") from exc
    if not messages:
        raise InvalidRequest("there is no message")
    for index, message in enumerate(messages):
        if not message.content.strip():
            raise InvalidRequest(f"message {index} is empty", details={"index": index})
        try:
            message.content.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"message {index} holds half a surrogate pair; it is not valid text", details={"index": index}
            ) from None
    if sum(len(message.content) for message in messages) > max_characters:
        raise InvalidRequest(f"the messages have more than {max_characters} characters in sum")
    return [msgspec.structs.asdict(message) for message in messages]


class Renderer:
    """Renders chat templates in a child process. Thread-safe; close it."""

    def __init__(self, folder: Path) -> None:
        """*folder*: where the process starts; a private one of the host's."""
        self._folder = folder
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self._pid = os.getpid()

    def render(
        self, template: str, messages: Sequence[dict[str, str]], *, name: str, tokens: Mapping[str, str] = {}
    ) -> str:
        """Return the template's text, as transformers' ``apply_chat_template(add_generation_prompt=True)`` writes it.

        *tokens*: ``bos_token`` and ``eos_token``. Raises BundleInvalid for a template that can't be read, fails, runs
        too long or writes too much; InvalidRequest where jinja2 is missing or the template refuses the messages;
        QueueFull where the process can't be started, somebody kills it, or the host closes.
        """
        request = msgspec.json.encode({"template": template, "messages": messages, "tokens": tokens})
        with self._lock:
            kind, text = self._exchange(request)
        if kind == TEXT:
            return text
        if kind == REFUSED:
            raise InvalidRequest(f"{name}'s chat template refuses these messages: {text}")
        if kind == MISSING:
            raise InvalidRequest(
                "chat templates need jinja2 3.1.6 or newer: pip install 'synapse-workers[chat]'",
                details={"missing": "jinja2"},
            )
        why = "can't be read" if kind == UNREADABLE else "fails"
        raise BundleInvalid(f"bundle {name}: its chat template {why}: {text}", details={"readable": kind != UNREADABLE})

    async def aclose(self) -> None:
        """End the process beside the loop: it is reaped, and a template may be in the middle."""
        if self._child is not None:
            with suppress(QueueFull):  # no thread for it: at the interpreter's end there is none
                await beside(self.close)
                return
        self.close()

    def close(self) -> None:
        """End the process, also in the middle of a template, whose caller gets QueueFull. Idempotent."""
        if os.getpid() != self._pid:
            return  # A forked child: the process is its parent's.
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._drop()

    def _exchange(self, request: bytes) -> tuple[bytes, str]:
        if self._closed:
            raise InvalidRequest("this host is closed")
        if self._pid != os.getpid():
            self._child, self._pid = None, os.getpid()
        if self._child is not None and not self._child.running:
            self._drop()  # It ended between two calls.
        if self._child is None:
            try:
                self._child = _Child(self._folder)
            except (OSError, RuntimeError) as exc:
                raise QueueFull(f"no process for the chat template could be started: {exc}") from exc
        reply = self._child.exchange(request)
        if isinstance(reply, bytes):
            return reply[:1], reply[1:].decode("utf-8", "replace")
        killed = self._child.killed_by_another
        self._drop()
        if self._closed:
            raise QueueFull("the host is stopping", details={"reason": "stopping"})
        if killed:  # not by a limit of ours: the kernel's choice where memory ends, or somebody's
            raise QueueFull("the process that renders chat templates was killed; the next call starts another")
        return FAILED, reply

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


class _Child:
    """The process, and the connection that is its standard input."""

    def __init__(self, folder: Path) -> None:
        from multiprocessing.connection import Pipe  # with the first chat, not with the host

        options: dict[str, Any] = {"start_new_session": True}
        self._connection, theirs = Pipe()
        end = theirs.fileno()
        if sys.platform == "win32":
            import msvcrt

            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
            end = msvcrt.open_osfhandle(end, 0)
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and file
                # -P: the folder of the program is not searched for modules.
                [sys.executable, "-P", str(PROGRAM)],
                stdin=end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=True,
                env=worker_environment("chat-template", {}),
                cwd=folder,
                **options,
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def killed_by_another(self) -> bool:
        return signal_name(self._popen.poll()) in ("SIGKILL", "SIGTERM")

    def exchange(self, request: bytes) -> bytes | str:
        """Return the reply to a request; or why there is none, and then the process is of no more use."""
        until = time.monotonic() + WALL_S
        try:
            self._connection.send_bytes(request)
            while not self._connection.poll(POLL_S):
                if self._too_large():
                    return "it takes too much memory"
                if time.monotonic() >= until:
                    return f"it runs for more than {WALL_S:g} s"
            reply = self._connection.recv_bytes(MAX_REPLY)
        except (EOFError, OSError):  # it is gone, or this is no reply
            return self._ending()
        return reply if reply[:1] in KINDS else self._ending()

    def _ending(self) -> str:
        """Say why the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(POLL_S)
        ending = signal_name(self._popen.returncode)
        if ending == "SIGXCPU":
            return f"it runs for more than {CPU_S} s"
        return f"it ends the process that renders it ({ending or self._popen.returncode})"

    def _too_large(self) -> bool:
        if _LIMITED_BY_SYSTEM:
            return False
        import psutil

        with suppress(psutil.Error):
            return bool(psutil.Process(self._popen.pid).memory_info().rss > MEMORY_BYTES)
        return False

    def kill(self) -> None:
        """End the process; it is reaped by :meth:`close`."""
        self._popen.kill()

    def close(self) -> None:
        """Kill, reap, and give back the connection."""
        self._popen.kill()
        self._popen.wait()
        self._connection.close()
