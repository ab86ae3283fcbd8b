"""What can be configured, as frozen values. `config_file.load` fills them from one YAML file, once.

The field names below are the keys of the file, section by section; deployments come from `model_list`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import msgspec


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Secret:
    """A value that never shows itself in logs, records or tracebacks; `reveal()` is for the one place that sends it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "***"


# --- policy


class ClampRule(Struct):
    """What one parameter may be. `force` and `default` set, `min` and `max` bound numbers, `forbid` drops or refuses it."""

    min: float | None = None
    max: float | None = None
    default: Any = msgspec.UNSET
    force: Any = msgspec.UNSET
    forbid: Literal["drop", "refuse"] | None = None


class ThinkingRule(Struct):
    """Thinking for matching requests: off | on | a token budget. YAML's own off and on (booleans) mean the same words.

    `on_violation`: what happens to thinking that comes back although it was off. `retry` asks the upstream once more, in
    stricter form, when nothing but the violation was streamed so far.
    """

    force: bool | int | Literal["off", "on"] | None = None
    default: bool | int | Literal["off", "on"] | None = None
    max_budget: int | None = None
    on_violation: Literal["strip", "error", "log"] = "strip"
    retry: bool = False


class ToolRule(Struct):
    """What happens to the tool calls of an answer. They are held until they are known to be good.

    A bad call is repaired if `repair` is on and the repaired value validates; else the upstream is asked again, at most
    `retries` times, with the error shown to the model; else `otherwise` holds: an error to the client, or the call as it came.
    """

    check: bool = True
    repair: bool = True
    retries: int = 1
    otherwise: Literal["refuse", "pass"] = "refuse"
    rescue: bool = True  # calls the upstream left as text in content or thought become calls
    max_kb: int = 1024  # of one call's arguments; agents write whole files with one call
    max_depth: int = 64  # no tool of any agent seen nests deeper than 6


Volatile = Literal["keep", "drop", "move", "pin"]


class NormaliseRule(Struct):
    """What is made the same from request to request, so that prefixes match.

    Volatile text stays (`keep`), is taken out (`drop`), goes to the end of the prompt (`move`), or stays as it was at the
    session's first request (`pin`).
    """

    tool_order: bool = True  # tools by name
    tool_schemas: bool = False  # keys inside tools in one order, for agents that shuffle them
    cache_marks: bool = True  # `cache_control` becomes an anchor hint and is not sent
    billing_header: Volatile = "drop"
    token_counters: Volatile = "drop"
    clock: Volatile = "keep"
    environment: Volatile = "keep"
    pin_thinking: bool = False  # thinking as at the session's first request


R = TypeVar("R", bound=Struct)


def _changed(rule: R, change: Struct | None) -> R:
    said = {} if change is None else {k: v for k, v in msgspec.structs.asdict(change).items() if v is not msgspec.UNSET}
    return msgspec.structs.replace(rule, **said) if said else rule


class Policy(Struct):
    """The rules that hold for one request: every matching `policies` entry merged, later ones winning setting by setting."""

    clamp: dict[str, ClampRule] = {}
    thinking: ThinkingRule = ThinkingRule()
    tools: ToolRule = ToolRule()
    normalise: NormaliseRule = NormaliseRule()
    unknown: Literal["pass", "drop", "refuse"] = "pass"


def _change(rule: type[Struct]) -> type[Struct]:
    """`rule` with every field optional: what one row says of it, so that a later row leaves alone what it does not name."""
    fields = [(f.name, f.type | msgspec.UnsetType, msgspec.UNSET) for f in msgspec.structs.fields(rule)]
    return msgspec.defstruct(f"{rule.__name__}Change", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


ThinkingChange, ToolChange, NormaliseChange = _change(ThinkingRule), _change(ToolRule), _change(NormaliseRule)


class PolicyEntry(Struct):
    """One row of the policy table. The patterns are shell wildcards over model name, key name and route."""

    model: str = "*"
    key: str = "*"
    route: str = "*"
    clamp: dict[str, ClampRule] = {}
    thinking: ThinkingChange | None = None
    tools: ToolChange | None = None
    normalise: NormaliseChange | None = None
    unknown: Literal["pass", "drop", "refuse"] | None = None


# --- where requests go


class Timeouts(Struct):
    """Seconds. `prefill` runs until the upstream's first byte, `idle` between two reads of an answer."""

    connect: float = 5.0
    prefill: float = 1800.0  # a 200K-token prompt at 120 tokens/s, what two CPU cores do, takes 1,700 s
    idle: float = 300.0
    keepalive: float = 10.0  # silence towards a streaming client before a keep-alive goes out; proxies cut at 30-60 s; 0 = none


MIN_SECRET = 8  # characters; a shorter header value is no secret, and hiding `a` would hide half of every message


class Deployment(Struct):
    """One place that serves a model. `model` is its own name there; a `*` in it takes what the client's name matched."""

    name: str
    serves: str  # the public model name, or a wildcard
    kind: Literal["engine", "openai", "provider"]
    model: str
    api_base: str = ""
    api_key: Secret | None = None
    headers: dict[str, str] = {}
    defaults: dict[str, Any] = {}  # body parameters sent when the request has none
    control: dict[str, Any] = {}  # rpm, tpm, weight, ...: for routing, never sent
    info: dict[str, Any] = {}

    @property
    def secrets(self) -> tuple[str, ...]:
        """What an upstream is sent and nobody else may see: the key, and what headers of one's own hold."""
        key = (self.api_key.reveal(),) if self.api_key else ()
        return key + tuple(v for v in self.headers.values() if len(v) >= MIN_SECRET)

    def upstream_model(self, asked: str) -> str:
        """The model name to send for a request that asked for `asked`."""
        if "*" not in self.model:
            return self.model
        fixed = self.serves.partition("*")[0]
        return self.model.replace("*", asked[len(fixed) :] if asked.startswith(fixed) else asked, 1)


# --- the rest of the file


class Listen(Struct):
    host: str = "127.0.0.1"
    port: int = 8100


class Key(Struct):
    """A key agents present. `name` is what logs and policies call it."""

    name: str
    key: Secret  # the key, or `sha256:` and its hash in hex
    admin: bool = False
    models: tuple[str, ...] = ()  # names it may use, a trailing * is a wildcard; empty = all
    rpm: int | None = None  # requests a minute
    tpm: int | None = None  # tokens a minute, prompt and completion
    concurrency: int = 0  # requests at once, 0 = no limit of its own
    budget: float | None = None  # in the unit of the deployments' prices
    budget_days: float = 30
    priority: Literal["interactive", "batch"] = "interactive"

    def may(self, model: str) -> bool:
        """Is this one of the models it may use?"""
        return not self.models or any(m == model or (m.endswith("*") and model.startswith(m[:-1])) for m in self.models)


class LimitRules(Struct):
    """The line in front of the upstreams. `concurrency` 0 = everything goes through at once, the engine queues itself."""

    concurrency: int = 0
    waiting: int = 1024  # requests that may wait for a place; more get 429
    wait: float = 600.0  # seconds one may wait


class StoreRules(Struct):
    """Where shared counters live. Empty = in this process; `redis://host:6379/0` = shared between processes."""

    redis: str = ""


class Routing(Struct):
    """How deployments of one model share its requests. Seconds. LiteLLM's router_settings of the same meaning are read too."""

    retries: int = 2  # further attempts after a failure before the first byte
    backoff: float = 0.25  # before the same deployment is tried again; doubled each time, with full jitter
    allowed_fails: int = 3  # failures in a row before a deployment is left alone
    cooldown: float = 30.0
    probe: float = 5.0  # between health checks of those left alone
    overload: int = 4  # requests by which the one that knows the prefix may be busier than the idlest
    fallbacks: dict[str, tuple[str, ...]] = {}  # model -> models to try when all of its deployments failed


class Records(Struct):
    """Where request records go. Empty `path` = no records. Sizes in MiB; `keep_days` and `rotate_hours` 0 = no such bound.

    `redact`: `keys`, `emails` or regular expressions, replaced wherever they stand. `bodies: hash` keeps no text at all.
    """

    path: str = "records/moorage.jsonl"
    rotate_mb: float = 256
    rotate_hours: float = 0
    keep_files: int = 16
    keep_days: float = 0
    compress: bool = True  # rotated files, with zstd
    redact: tuple[str, ...] = ()
    bodies: Literal["full", "hash"] = "full"
    queue: int = 4096  # records that may wait for the writer; more are dropped and counted
    queue_mb: float = 256
    fsync: Literal["never", "second", "always"] = "second"


class Tracing(Struct):
    """OpenTelemetry spans, one per request, without any text. `endpoint` empty = what OTEL_EXPORTER_OTLP_* say."""

    enabled: bool = False
    endpoint: str = ""  # of an OTLP/HTTP collector, for example http://collector:4318/v1/traces
    service: str = "moorage-gateway"


class Server(Struct):
    max_body_mb: float = 64
    body_timeout: float = 120.0  # seconds a request's body may take to arrive: 64 MiB over a 5 Mbit/s line
    admin: bool = False  # the routes under /admin, for keys with `admin: true`


class Config(Struct):
    """A whole configuration. `source` names the file in messages."""

    deployments: tuple[Deployment, ...]
    listen: Listen = Listen()
    server: Server = Server()
    policies: tuple[PolicyEntry, ...] = ()
    timeouts: Timeouts = Timeouts()
    records: Records = Records()
    keys: tuple[Key, ...] = ()
    limits: LimitRules = LimitRules()
    store: StoreRules = StoreRules()
    routing: Routing = Routing()
    tracing: Tracing = Tracing()
    source: str = "built-in defaults"
    warnings: tuple[str, ...] = ()

    def serving(self, model: str) -> tuple[Deployment, ...]:
        """The deployments of a model name, in file order; exact names before wildcards. Empty if nobody serves it."""
        exact = tuple(d for d in self.deployments if d.serves == model)
        return exact or tuple(d for d in self.deployments if "*" in d.serves and fnmatchcase(model, d.serves))

    def policy(self, model: str, key: str, route: str) -> Policy:
        """The merged rules for a request: later entries win, setting by setting."""
        merged = Policy()
        for entry in self.policies:
            if fnmatchcase(model, entry.model) and fnmatchcase(key, entry.key) and fnmatchcase(route, entry.route):
                merged = Policy(
                    clamp=merged.clamp | entry.clamp,
                    thinking=_changed(merged.thinking, entry.thinking),
                    tools=_changed(merged.tools, entry.tools),
                    normalise=_changed(merged.normalise, entry.normalise),
                    unknown=entry.unknown or merged.unknown,
                )
        return merged
