"""Renders a checkpoint's Jinja chat template in a sandbox, with the helpers that transformers gives to templates.

A template is data from a model hub: it runs without attribute access, without mutation, and with bounds on output and time.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A 1M-token prompt is about 4 MB of text; sixteen times that is a template that loops.
MAX_RENDERED = 64 << 20
# Rendering a 1M-token conversation takes well under a second.
MAX_SECONDS = 10.0


class TemplateError(ValueError):
    """The template refused the conversation (`raise_exception`), or is broken. The message is the template's own."""


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. Raises TemplateError when the source is no valid Jinja."""

    def __init__(self, source: str, constants: Mapping[str, Any] | None = None) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._constants = dict(constants or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as e:
            raise TemplateError(f"the chat template of this model does not compile: {e}") from None

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool, **extra: Any) -> str:
        """The prompt text. Raises TemplateError with the template's message, or when it exceeds its bounds."""
        values = {**self._constants, **extra, "messages": messages, "tools": tools or None, "add_generation_prompt": generate}
        values.setdefault("documents", None)
        deadline = time.monotonic() + MAX_SECONDS
        out: list[str] = []
        size = 0
        try:
            for part in self._template.generate(values):
                out.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise TemplateError(f"the chat template produced more than {MAX_RENDERED} characters")
                if time.monotonic() > deadline:
                    raise TemplateError(f"the chat template did not finish within {MAX_SECONDS:.0f} s")
        except TemplateError:
            raise
        except jinja2.exceptions.TemplateError as e:
            raise TemplateError(e.message or type(e).__name__) from None
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
            RecursionError,
            ZeroDivisionError,
        ) as e:
            # Jinja passes Python errors of an expression through: the conversation has a form the template did not expect.
            raise TemplateError(f"the chat template of this model cannot render these messages: {e}") from None
        return "".join(out)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; at inference it renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.If(jinja2.nodes.Const(True), body, [], [], lineno=line)
