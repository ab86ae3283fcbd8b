"""A real LiteLLM proxy in a process of its own, in front of a scripted upstream: for the LiteLLM plugin's tests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import Got
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".cache" / "litellm-venv"
MASTER_KEY = "sk-proxy-master-1234"
UPSTREAM_KEY = "sk-upstream-5678"
START_S = 120  # LiteLLM imports for 5-20 s on two busy cores


class Proxy:
    """`async with Proxy(model_list, moorage, tmp)`: proxy.up is the upstream, proxy.post asks, proxy.records() reads."""

    def __init__(self, models: dict[str, dict[str, Any]], moorage: dict[str, Any], tmp: Path) -> None:
        self.up = FakeUpstream()
        self.tmp, self.models, self.moorage = tmp, models, moorage
        self.path = tmp / "records.jsonl"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def _write(self) -> None:
        params = {"model": "openai/m", "api_base": f"{self.up.base}/v1", "api_key": UPSTREAM_KEY}
        # Without it LiteLLM sends /v1/responses on to an upstream that may have no such route.
        params |= {"use_chat_completions_api": True}
        entries = [
            {"model_name": name, "litellm_params": params | more.get("params", {}), "model_info": more.get("info", {})}
            for name, more in self.models.items()
        ]
        config = {
            "model_list": entries,
            "litellm_settings": {"callbacks": ["gateway.litellm_plugin.moorage"], "num_retries": 0},
            "general_settings": {"master_key": MASTER_KEY},
            "router_settings": {"disable_cooldowns": True, "num_retries": 0},
        }
        (self.tmp / "litellm.yaml").write_text(yaml.safe_dump(config))
        records = {"records": {"path": str(self.path), "fsync": "never"}}
        (self.tmp / "moorage.yaml").write_text(yaml.safe_dump(records | self.moorage))

    async def __aenter__(self) -> Proxy:
        if not (VENV / "bin" / "litellm").exists():
            pytest.skip("there is no LiteLLM proxy; `ops/env.py litellm` installs one")
        await self.up.__aenter__()
        self._write()
        environ = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
        environ |= {
            "PYTHONPATH": str(ROOT),
            "MOORAGE_CONFIG": str(self.tmp / "moorage.yaml"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        self._log = (self.tmp / "proxy.log").open("wb")
        command = [
            VENV / "bin" / "litellm",
            "--config",
            self.tmp / "litellm.yaml",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self._process = subprocess.Popen(command, cwd=self.tmp, env=environ, stdout=self._log, stderr=self._log)
        self.http = aiohttp.ClientSession()
        for _ in range(START_S * 5):
            try:
                async with self.http.get(self.url + "/health/liveliness") as response:
                    if response.status == 200:
                        return self
            except aiohttp.ClientError:
                pass
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.2)
        raise AssertionError(f"the LiteLLM proxy did not start:\n{self.log()[-3000:]}")

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        await self.up.__aexit__()

    def log(self) -> str:
        return (self.tmp / "proxy.log").read_text(errors="replace")

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> Got:
        head = {"authorization": f"Bearer {MASTER_KEY}"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.http.post(self.url + path, json=body, headers=head) as r:
            return Got(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())

    async def record(self, id: str) -> dict[str, Any]:
        """The record of the request that the proxy answered with this id."""
        return await self.record_where(lambda r: r["id"] == id)

    async def record_where(self, right: Any) -> dict[str, Any]:
        for _ in range(1500):
            for line in self.path.read_text().split("\n")[:-1] if self.path.exists() else []:
                if right(record := json.loads(line)):
                    return record
            await asyncio.sleep(0.02)
        raise AssertionError(f"no such record after 30 s\n{self.log()[-3000:]}")
