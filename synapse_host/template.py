"""A bundle's chat template rendered in jinja2's immutable sandbox: foreign code, bounded in time and in what it writes.

The sandbox keeps a template from reaching anything; what it doesn't bound is added here. Before every statement, in
every loop's condition and in every filter and test the time is looked at, and nothing is made that is larger than the
largest text a template may write.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from synapse_host.errors import BundleInvalid, InvalidRequest, SynapseError

MAX_RENDERED: Final = 4 * 1024 * 1024
"""Characters a template may write, and the most that any value in it may hold."""
MAX_MADE: Final = 64 * MAX_RENDERED
"""Characters of a value on the way, by its factors: what is counted only once it is there."""
RENDER_S: Final = 5.0
"""Processor seconds that a template may take; a real one takes milliseconds."""

_WIDE: Final = re.compile(r"%[-+ #0]*\d*\.?(\*|\d{7})|\{[^{}]*:[^{}]*\d{7}")
"""A format with a width of millions, or one that is given with the values."""


def render(
    template: str, messages: Sequence[Mapping[str, str]], *, name: str, tokens: Mapping[str, str] | None = None
) -> str:
    """Return the template's text, as transformers' ``apply_chat_template(add_generation_prompt=True)`` writes it.

    *tokens*: ``bos_token`` and ``eos_token``. Call this where nobody else waits: it may take RENDER_S. Raises
    BundleInvalid for a template that can't be read, fails, runs too long or writes too much; InvalidRequest where
    jinja2 is missing or the template refuses the messages.
    """
    with _limited(RENDER_S):
        try:
            compiled = _compiled(template)
        except ImportError as exc:
            raise InvalidRequest(
                "chat templates need jinja2 3.1.6 or newer: pip install 'synapse-workers[chat]'",
                details={"missing": "jinja2"},
            ) from exc
        except Exception as exc:  # a template is foreign code: whatever it raises, the bundle is at fault
            raise BundleInvalid(f"bundle {name}: its chat template can't be read: {exc}") from exc
        return _rendered(compiled, messages, name, tokens or {})


def _rendered(compiled: Any, messages: Sequence[Mapping[str, str]], name: str, tokens: Mapping[str, str]) -> str:
    variables: dict[str, Any] = {
        # What transformers passes: a template tells "no tools" from None.
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
        **tokens,
        "messages": [dict(message) for message in messages],
    }
    parts: list[str] = []
    size = 0
    try:
        for part in compiled.generate(**variables):
            size += len(part)
            if size > MAX_RENDERED:
                raise BundleInvalid(f"bundle {name}: its chat template writes more than {MAX_RENDERED} characters")
            parts.append(part)
    except SynapseError:
        raise
    except _Refused as exc:
        raise InvalidRequest(f"{name}'s chat template refuses these messages: {exc}") from exc
    except Exception as exc:  # foreign code, as above
        raise BundleInvalid(f"bundle {name}: its chat template fails: {exc}") from exc
    return "".join(parts)


class _Refused(Exception):
    """The template called raise_exception."""


# --- limits ----------------------------------------------------------------------------------------------------------


class _Clock(threading.local):
    until: float | None = None


_clock: Final = _Clock()


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    # The thread's own processor time: a busy machine makes no template fail.
    _clock.until = time.thread_time() + seconds
    try:
        yield
    finally:
        _clock.until = None


def _tick() -> bool:
    """Raise once the template has had its time; else True, for conditions."""
    if _clock.until is not None and time.thread_time() > _clock.until:
        raise ValueError(f"it runs for more than {RENDER_S:g} s")
    return True


def _small(value: Any) -> Any:
    """Return *value* unless it holds too much: a list of itself twice, forty times over, is a terabyte of text."""
    left = MAX_RENDERED
    stack = [value]
    while stack:
        value_in = stack.pop()
        if isinstance(value_in, str):
            left -= len(value_in)
        elif isinstance(value_in, list | tuple):
            left -= 1 + len(value_in)
            stack.extend(value_in if left >= 0 else ())
        elif isinstance(value_in, dict):
            left -= 1 + 2 * len(value_in)
            stack.extend((*value_in, *value_in.values()) if left >= 0 else ())
        if left < 0:
            raise ValueError(f"a value holds more than {MAX_RENDERED} characters")
    return value


def _check_arguments(value: Any, others: Sequence[Any]) -> None:
    """Refuse what would make a huge text of a small value: ``'a' | center(10000000000)``, ``join``, ``replace``."""
    # An iterator's length isn't known; the sandbox's range ends here.
    many = len(value) if hasattr(value, "__len__") else 100_000 if hasattr(value, "__next__") else 1
    sizes = (len(each) if isinstance(each, str) else abs(each) for each in others if isinstance(each, str | int))
    if max(many, 1) * max(sizes, default=0) > MAX_MADE or (isinstance(value, str) and _WIDE.search(value)):
        raise ValueError(f"a value would hold more than {MAX_MADE} characters")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that looks at the time, at what it is given and at what it makes."""

    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        _tick()
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _check_arguments(given[0] if given else None, [*given[1:], *options.values()])
        return _small(function(*args, **options))

    return counted


def _joined(*values: Any) -> str:
    """``a ~ b``"""
    _small(values)
    return "".join(map(str, values))


# --- the environment -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Compile a template with the limits in it."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    environment = _environment()

    class Limits(NodeTransformer):
        def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
            super().generic_visit(node, *args, **kwargs)
            for field in ("body", "else_"):
                statements = getattr(node, field, None)
                if isinstance(statements, list) and statements:
                    with_ticks = ((nodes.ExprStmt(_call("tick", node)), statement) for statement in statements)
                    setattr(node, field, [each for pair in with_ticks for each in pair])
            return node

        def visit_For(self, node: Any) -> Any:  # noqa: N802 - jinja2's names
            self.generic_visit(node)
            if node.test is not None:
                node.test = nodes.And(_call("tick", node), node.test)
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            return _call("joined", node, node.nodes)

        def visit_List(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            return _call("small", node, [node])

        visit_Dict = visit_List  # noqa: N815

        def visit_Tuple(self, node: Any) -> Any:  # noqa: N802
            return self.visit_List(node) if node.ctx == "load" else node

    def _call(name: str, at: Any, args: Sequence[Any] = ()) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=at.lineno)

    tree = Limits().visit(environment.parse(template))
    tree.set_environment(environment)
    for node in tree.find_all(nodes.Node):
        node.lineno = node.lineno or 1
    return environment.template_class.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _environment() -> Any:
    """Return an environment with what transformers offers to templates; ImportError without jinja2."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < (3, 1, 6):
        raise ImportError("older ones have known ways out of the sandbox")

    class Generation(Extension):
        """``{% generation %}`` marks what a model wrote, for training; here it is its own content."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object) -> None:
        raise _Refused(str(message))

    def tojson(value: Any, **options: Any) -> str:
        # jinja2's own filter escapes for HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses small expressions that ask for all memory or all time: ``'a' * 10**10``, ``9**9**9``."""

        intercepted_binops = frozenset({"*", "**", "+", "%"})
        tick = staticmethod(_tick)
        joined = staticmethod(_joined)
        small = staticmethod(_small)

        def call(self, context: Any, callee: Any, *args: Any, **options: Any) -> Any:
            owner = getattr(callee, "__self__", None)
            if not isinstance(owner, str):
                return super().call(context, callee, *args, **options)
            # join's value is its argument, every other method's the text itself.
            first, others = (args[0], [owner]) if callee.__name__ == "join" and args else (owner, args)
            _check_arguments(first, [*others, *options.values()])
            return _small(super().call(context, callee, *args, **options))

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            # The sandbox's own stand-in for str.format and format_map.
            wrapper = super().wrap_str_format(value)
            if wrapper is None:
                return None

            @functools.wraps(wrapper)
            def checked(*args: Any, **options: Any) -> str:
                given = args[0] if value.__name__ == "format_map" and isinstance(args[0], dict) else options
                _check_arguments(value.__self__, [*args, *given.values()])
                return str(_small(wrapper(*args, **options)))

            return checked

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise ValueError("** is not allowed in a chat template")
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                        raise ValueError(f"a repetition writes more than {MAX_RENDERED} characters")
            elif operator == "+" and hasattr(left, "__len__"):
                _small([left, right])
            elif operator == "%" and isinstance(left, str):
                _check_arguments(left, [*right] if isinstance(right, tuple) else [right])
            return _small(super().call_binop(context, operator, left, right))

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    environment.filters["tojson"] = tojson
    functions: Any
    for functions in (environment.filters, environment.tests):
        functions.update({name: _counted(each) for name, each in functions.items()})
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # A function, not the class: a class has attributes without an underscore that lead further.
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    environment.globals.pop("lipsum", None)
    return environment
