"""What is there: the models that can be asked for, and whether those who answer are well."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.pipeline import Pipeline


async def models(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Configured names and, for wildcards, what their upstream lists itself; each for OpenAI's and Anthropic's clients."""
    deployments = pipeline.config.deployments
    asked = [d for d in deployments if "*" in d.serves]
    lists = await asyncio.gather(*(pipeline.upstreams[d.kind].models(d) for d in asked))
    found: dict[str, dict[str, Any]] = {}
    for d in deployments:
        if "*" not in d.serves:
            found.setdefault(d.serves, {"id": d.serves, "object": "model", "created": 0, "owned_by": d.kind})
    for d, listed in zip(asked, lists, strict=True):
        prefix, star, suffix = d.serves.partition("*")
        for model in listed:
            name = f"{prefix}{model['id']}{suffix}"
            found.setdefault(name, model | {"id": name})
    return [_for_anthropic(name) | model for name, model in found.items()]


def listed(data: list[dict[str, Any]]) -> dict[str, Any]:
    """The list as both kinds of clients read it."""
    ends = {"has_more": False, "first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data} | ends


def _for_anthropic(name: str) -> dict[str, Any]:
    return {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def health(pipeline: Pipeline) -> dict[str, Any]:
    """`ok` when every deployment is ready, `loading` or `degraded` when some are not, `down` when none is."""
    deployments = pipeline.config.deployments
    states = await asyncio.gather(*(pipeline.upstreams[d.kind].health(d) for d in deployments))
    kinds = {h.state for h in states}
    status = "ok" if kinds == {"ready"} else "degraded" if "ready" in kinds else "loading" if "loading" in kinds else "down"
    upstreams = {
        d.name: {"state": h.state, "model": d.serves, "kind": d.kind, "detail": h.detail}
        for d, h in zip(deployments, states, strict=True)
    }
    records = pipeline.records
    counts = {"written": records.written, "dropped": records.dropped} if records else None
    return {"status": status, "upstreams": upstreams, "records": counts}
