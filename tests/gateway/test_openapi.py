"""The OpenAPI document is true: schemathesis makes requests of it, good and bad, and the answers must be what it says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from gateway.app import App
from gateway.config_file import parse
from gateway.openapi import document
from gateway.pipeline import DIALECTS
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway
from tests.support.gateway import settings as one_model

KEY = "sk-schema"
SECTIONS = {"keys": [{"name": "t", "key": KEY, "admin": True}], "server": {"admin": True, "max_body_mb": 1}}
TOLD_IN_WORDS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
SPEC = document(parse(one_model("http://127.0.0.1:9", **SECTIONS), "test", {}))
SCHEMA = schemathesis.openapi.from_dict(SPEC)
SCHEMA.config.generation.update(with_security_parameters=False)
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[str]:
    """A gateway with a model that answers, on a thread of its own: schemathesis' client blocks."""
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve(tmp: Path) -> None:
        async with FakeUpstream() as up, Gateway(one_model(up.base, **SECTIONS), tmp) as gw:
            up.script(Whole(message()))
            ready.set_result(gw.url)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(tmp_path_factory.mktemp("schema")),))
    thread.start()
    yield ready.result(60)
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CASES = [(op, GenerationMode.POSITIVE) for op in OPERATIONS] + [(op, GenerationMode.NEGATIVE) for op in OPERATIONS if op.body]


@pytest.mark.parametrize(("operation", "mode"), CASES, ids=lambda value: getattr(value, "label", None) or value.name.lower())
@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_every_answer_is_one_that_the_document_names(operation, mode, data, served) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    response = case.call(base_url=served, headers=HEADERS, timeout=60)
    # What a message or an item may hold is told in words there: a body may follow the schema and still be refused, with a reason.
    more = [positive_data_acceptance] if case.path in TOLD_IN_WORDS else []
    case.validate_response(response, headers=HEADERS, excluded_checks=more)
    assert response.status_code != 500, response.text


METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace")


async def test_a_method_that_the_document_does_not_name_is_405_and_says_which_one_is_right(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(one_model(up.base, **SECTIONS), tmp_path) as gw:
        for path, known in SPEC["paths"].items():
            for method in METHODS:
                if method in known or (method == "head" and "get" in known and not path.startswith("/admin")):
                    continue
                async with gw.http.request(method, gw.url + path, headers=HEADERS) as r:
                    allowed = {m.strip().lower() for m in r.headers.get("allow", "").split(",")}
                    assert r.status == 405 and allowed >= set(known), (method, path, r.status)


async def test_the_document_is_served_valid_and_names_every_route(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(one_model(up.base), tmp_path) as gw:
        got = await gw.get("/openapi.json")
        served = set(gw.app._gets) - {"/models"}  # the same list without /v1, for clients that leave it out
    assert set(got.json["paths"]) == served | set(DIALECTS)
    assert "security" not in got.json and not any(p.startswith("/admin") for p in got.json["paths"])
    for schema in got.json["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


def test_admin_routes_and_keys_stand_in_it_only_when_configured() -> None:
    assert {"/admin/deployments", "/admin/drain"} <= set(SPEC["paths"]) and SPEC["security"]
    assert App(parse(one_model("http://x:1"), "test", {})).config.server.admin is False
