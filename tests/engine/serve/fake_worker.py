"""The real worker process over the fake decoder: `python -m tests.engine.serve.fake_worker` instead of `python -m engine.worker`.

The configuration's `model` says how it behaves: `slow` (10 ms a step), `missing`, `dies-loading`, `bug-loading`,
`broken:TOKEN`, `hangs:TOKEN`, `waits:FILE` (a quarter loaded until the file is there).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from engine import tensors
from engine.build import BuildError, Parts
from engine.limits import Limits
from engine.prefix.naive import NaivePrefixCache
from engine.worker import leave, main
from tests.engine.serve.fake import VOCAB, FakeDecoder, fake_cache

COMMAND = (sys.executable, "-m", "tests.engine.serve.fake_worker")


class FlushedCache(NaivePrefixCache):
    def shutdown(self) -> None:
        print("prefix cache flushed", file=sys.stderr, flush=True)


def fake_build(config, progress) -> Parts:
    progress(0.25, "loading weights")
    kind, _, argument = config.model.partition(":")
    if kind == "missing":
        raise BuildError("no such model: missing; give the directory of a checkpoint")
    if kind == "dies-loading":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "bug-loading":
        raise KeyError("a bug")
    while kind == "waits" and not Path(argument).exists():
        time.sleep(0.01)
    pages, slots = 64, 8
    cache = fake_cache(pages, slots)
    decoder = FakeDecoder(fail=int(argument) if kind == "broken" else None)

    def forward(batch):
        time.sleep(0.01 if kind == "slow" else 0)
        if kind == "hangs" and int(argument) in batch.tokens.numpy():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(3600)
        return decoder.forward(batch, cache)

    limits = Limits(max_context=4096, vocab=VOCAB, max_running=8, max_queue=config.max_queue, prefill_chunk=config.prefill_chunk)
    return Parts(forward, FlushedCache(cache, pages, slots), limits, {"family": "fake"}, library=tensors)


if __name__ == "__main__":
    leave(main(fake_build))
