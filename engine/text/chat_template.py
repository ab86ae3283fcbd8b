"""Renders a checkpoint's Jinja chat template in a sandbox (`engine.text.sandbox`).

A template is data from a model hub: it runs without attribute access, without mutation, and with bounds on output and time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

# A 1M-token prompt is about 4 MB of text; sixteen times that is a template that loops.
MAX_RENDERED = 64 << 20
# Rendering a 1M-token conversation takes well under a second.
MAX_SECONDS = 10.0


class TemplateError(ValueError):
    """The template refused the conversation (`raise_exception`), or is broken. The message is the template's own."""


class ChatTemplate:
    """One compiled template. Raises TemplateError when the source is no valid Jinja."""

    def __init__(self, source: str, constants: Mapping[str, Any] | None = None) -> None:
        from engine.text import sandbox  # jinja, which a checkpoint without a template does without

        self.source, self._refusal = source, sandbox.Refusal
        self._constants = dict(constants or {})
        try:
            self._template = sandbox.environment().from_string(source)
        except self._refusal as e:
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
        except self._refusal as e:
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
