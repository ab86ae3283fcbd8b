"""Records: bounded, rotated, never torn, never in the way."""

import base64
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from gateway import records, rotation
from gateway.config import Records
from gateway.config_file import ConfigError, parse
from gateway.diagnostics.reader import Reader
from gateway.records import RecordWriter, encode
from gateway.redaction import Redactor
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, message
from tests.support.gateway import Gateway, ask, settings


def entry(n: int, body: bytes = b"{}") -> dict:
    return {"n": n, "received": {"body": body}, "sent": None}


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_what_is_put_is_written_in_order_and_only_the_owner_may_read_it(tmp_path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    writer = RecordWriter(Records(path=str(path)))
    assert all(writer.put(entry(i)) for i in range(100))
    writer.close()
    assert [r["n"] for r in read(path)] == list(range(100)) and writer.written == 100
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("body", [b'{"a":"caf\\u00e9 \xc3\xa9\\n"}', b"\xff\x00", b""])
def test_bodies_are_kept_byte_for_byte(body) -> None:
    kept = json.loads(encode(entry(1, body)))["received"]
    raw = kept["body"].encode() if kept["encoding"] == "utf-8" else base64.b64decode(kept["body"])
    assert raw == body


LONG = b"x" * (records.PIECE_BYTES - 10) + "größe 🙂".encode() * 9
PAIRS = [
    (b'{"a":1}', b'{"a":1,"moorage":{"session":"s"}}'),
    (b'{"a":1} \n', b'{"a":1}'),
    (b"{}", b'{"moorage":{}}'),
    (b'{"a":"' + LONG + b'"}', b'{"a":"' + LONG + b'","b":"\\n"}'),
    (b'{"a":1}', b'{"model":"b","a":1}'),
    (b'{"a":1}', b'{"a":1,"b":"\xff"}'),
    (b'{"a":"\xff"}', b'{"a":"\xff","b":1}'),
    (b'{"a" :\r\n\t"\\u00e9 \\" \\\\ \\n \x7f/"}', b'{"a" :\r\n\t"\\u00e9 \\" \\\\ \\n \x7f/","b":"\\t"}'),
    (b'"\xc3\xa9', b'"\xc3\xa8'),
    (b"", b""),
    (b"", b"{}"),
]


@pytest.mark.parametrize("received, sent", PAIRS)
def test_what_was_sent_is_kept_byte_for_byte_also_when_it_begins_as_what_was_received(received, sent) -> None:
    kept = json.loads(encode(entry(1, received) | {"sent": {"body": sent}}))
    for side, body in (("received", received), ("sent", sent)):
        text, encoding = kept[side]["body"], kept[side]["encoding"]
        assert (text.encode() if encoding == "utf-8" else base64.b64decode(text)) == body
        assert kept[side] == json.loads(encode(entry(1, body)))["received"]


def test_files_rotate_and_the_oldest_go(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    writer = RecordWriter(Records(path=str(path), rotate_mb=1000 / (1 << 20), keep_files=2, compress=False))
    for i in range(100):
        writer.put(entry(i))
    writer.close()
    files = sorted(tmp_path.glob("r.jsonl.*")) + [path]
    assert len(files) == 3 and all(f.stat().st_size <= 1000 for f in files)
    kept = [r["n"] for f in files for r in read(f)]
    assert kept == list(range(kept[0], 100))


def test_a_torn_last_line_is_closed_before_the_next_record(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2,"rece')
    writer = RecordWriter(Records(path=str(path)))
    writer.put(entry(3))
    writer.close()
    lines = path.read_bytes().splitlines()
    assert json.loads(lines[-1])["n"] == 3 and lines[1] == b'{"n":2,"rece'


def test_a_full_queue_drops_counts_and_does_not_wait(tmp_path, monkeypatch) -> None:
    gate = threading.Event()
    real = records.encode
    monkeypatch.setattr(records, "encode", lambda data: gate.wait(10) and real(data))
    writer = RecordWriter(Records(path=str(tmp_path / "r.jsonl"), queue=5))
    results = [writer.put(entry(i)) for i in range(20)]
    assert results.count(False) == writer.dropped >= 10  # five wait, five more at most are in the thread's hands
    gate.set()
    writer.close()
    assert len(read(tmp_path / "r.jsonl")) == 20 - writer.dropped


def test_a_full_disk_loses_records_aloud_and_recovers(tmp_path, monkeypatch, caplog) -> None:
    path, full, real = tmp_path / "r.jsonl", threading.Event(), os.write
    full.set()

    def write(fd: int, data: bytes) -> int:
        if full.is_set() and b'"n"' in data:
            return real(fd, data[:7])  # a disk that takes a little of it
        return real(fd, data)

    monkeypatch.setattr(records.os, "write", write)
    writer = RecordWriter(Records(path=str(path)))
    writer.put(entry(1))
    while not writer.dropped:
        time.sleep(0.005)
    full.clear()
    writer.put(entry(2))
    writer.close()
    assert json.loads(path.read_bytes().splitlines()[-1])["n"] == 2 and writer.dropped == 1
    assert "records are lost" in caplog.text and "again" in caplog.text


def test_an_unwritable_place_is_said_and_does_not_raise(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    writer = RecordWriter(Records(path=str(tmp_path / "file" / "r.jsonl")))
    writer.put(entry(1))
    writer.close()
    assert writer.dropped == 1 and "cannot write" in caplog.text


@pytest.mark.parametrize("how", ["file removed", "folder removed", "file moved"])
def test_a_file_that_is_taken_away_is_begun_anew(how, tmp_path, caplog) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    writer = RecordWriter(Records(path=str(path)))
    writer.put(entry(1))
    while writer.written < 1:
        time.sleep(0.001)
    if how == "file moved":
        path.rename(tmp_path / "elsewhere")
    else:
        path.unlink() if how == "file removed" else shutil.rmtree(path.parent)
    writer.put(entry(2))
    writer.close()
    assert [r["n"] for r in read(path)] == [2] and writer.written == 2 and writer.dropped == 0
    assert caplog.text.count("moved or removed") == 1


def test_kill_9_leaves_only_whole_lines(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    code = f"""
        from gateway.config import Records
        from gateway.records import RecordWriter
        w = RecordWriter(Records(path={str(path)!r}))
        n, said = 0, False
        while True:
            n += w.put({{"n": n, "received": {{"body": b"x" * 5000}}, "sent": None}})
            if w.written >= 2000 and not said:
                said = print("many", flush=True) or True
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "many\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    lines = path.read_bytes().split(b"\n")
    assert lines[-1] == b"" or not lines[-1].endswith(b"}")  # at most the tail is torn
    assert [json.loads(line)["n"] for line in lines[:-1]] == list(range(len(lines) - 1))


def test_a_record_that_is_no_json_costs_only_itself(tmp_path, caplog) -> None:
    writer = RecordWriter(Records(path=str(tmp_path / "r.jsonl")))
    for data in (entry(1), entry(2) | {"bad": {1: "keys must be text"}}, entry(3)):
        writer.put(data)
    writer.close()
    assert [r["n"] for r in read(tmp_path / "r.jsonl")] == [1, 3] and writer.dropped == 1 and "cannot be written" in caplog.text


def test_rotated_files_are_compressed_and_read_back_in_order(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    (tmp_path / "r.jsonl.000001").write_bytes(b'{"id":"old"}\n')  # left over by a crash between rotating and compressing
    (tmp_path / "r.jsonl.000001.part").write_bytes(b"half a file")
    writer = RecordWriter(Records(path=str(path), rotate_mb=2000 / (1 << 20), keep_files=100))
    for i in range(60):
        writer.put({"id": str(i)} | entry(i))
    writer.close()
    rotated = sorted(p.name for p in tmp_path.glob("r.jsonl.*") if not p.name.endswith(".part"))
    assert len(rotated) > 2 and all(name.endswith(".zst") for name in rotated)
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in rotated[1:])
    assert [r["id"] for r in Reader(path).records()] == ["old", *map(str, range(60))]


def test_files_rotate_and_go_by_age(tmp_path) -> None:
    path, now = tmp_path / "r.jsonl", time.time()
    path.write_bytes(b'{"v":1,"id":"a","time":%d.5}\n' % (now - 7200))
    ancient = tmp_path / "r.jsonl.000001.zst"
    ancient.write_bytes(b"x")
    os.utime(ancient, (now - 9 * 86400, now - 9 * 86400))
    writer = RecordWriter(Records(path=str(path), rotate_hours=1, keep_days=7))
    writer.put(entry(1))
    writer.close()
    assert [r["n"] for r in read(path)] == [1]
    assert not ancient.exists() or ancient.read_bytes() != b"x"  # its number may have been given again
    assert [r["id"] for r in Reader(path).records()] == ["a"]


SECRETS = ["sk-abcdefghijklmnop1234", "Bearer abcdefghijklmnopqrstuv", "jane.doe@example.org", "PROJ-1234"]


def test_redaction_hides_what_it_is_told_everywhere_and_keeps_json_whole(tmp_path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": f"use {SECRETS[0]} and \n {SECRETS[2]}"}]}).encode()
    record = entry(1, body) | {
        "answer": {"channels": {"content": {"text": " ".join(SECRETS)}}},
        "decisions": [{"reason": SECRETS[3]}],
    }
    writer = RecordWriter(Records(path=str(tmp_path / "r.jsonl"), redact=("keys", "emails", r"PROJ-\d+")))
    writer.put(record)
    writer.put(entry(2, b'{"a":"harmless"}'))
    writer.close()
    text = (tmp_path / "r.jsonl").read_text()
    assert not [s for s in SECRETS if s in text]
    first, second = read(tmp_path / "r.jsonl")
    assert json.loads(first["received"]["body"])["messages"][0]["content"] == "use [keys] and \n [emails]"
    assert first["received"]["redacted"] and first["received"]["sha256"] == hashlib.sha256(body).hexdigest()
    assert second["received"] == {"body": '{"a":"harmless"}', "encoding": "utf-8"}


@pytest.mark.parametrize("said", ["Müller", "M\\u00fcller", "me@example.com", "me\\u0040example.com", "m\\u0065@example.com"])
def test_escapes_hide_nothing_from_redaction(said) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"ask %s, \\u00e4 and 1.50"}]}' % said.encode()
    redactor = Redactor(("emails", "Müller"), "full")
    got = redactor.apply({"received": {"body": body}, "sent": {"body": b'{"a":"\\u00e4"}'}})
    text = got["received"]["body"].decode()
    assert got["received"]["redacted"] and json.loads(text)["messages"][0]["content"] in (
        "ask [custom], ä and 1.50",
        "ask [emails], ä and 1.50",
    )
    assert got["sent"]["body"] == b'{"a":"\\u00e4"}'  # nothing to hide there, so not a byte is changed


def test_an_expression_that_eats_json_leaves_only_the_hash() -> None:
    kept = Redactor(['"a":'], "full").apply(entry(1, b'{"a":1}'))["received"]
    assert kept["body"] == b"" and kept["redacted"] and kept["size"] == 7


def test_hashes_only_keep_no_text(tmp_path) -> None:
    record = entry(1, b'{"messages":"private words"}') | {"answer": {"channels": {"content": {"text": "private words"}}}}
    writer = RecordWriter(Records(path=str(tmp_path / "r.jsonl"), bodies="hash"))
    writer.put(record)
    writer.close()
    assert "private" not in (tmp_path / "r.jsonl").read_text()
    assert read(tmp_path / "r.jsonl")[0]["received"]["sha256"] == hashlib.sha256(record["received"]["body"]).hexdigest()


async def test_hashes_only_keep_no_word_of_a_conversation_whatever_went_wrong(tmp_path) -> None:
    words = "correct horse battery staple"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"n": words})}}
    answers = [
        Whole(message(words, reasoning_content=words, tool_calls=[call])),
        Whole({"error": {"message": f"bad prompt: {words}", "remedy": words}}, 400),
        Stream([content(words), {"error": {"message": words}}]),
    ]
    async with FakeUpstream() as up:
        records = {"path": str(tmp_path / "records.jsonl"), "bodies": "hash"}
        policies = [{"tools": {"retries": 0}, "normalise": {"clock": "drop"}}]
        async with Gateway(settings(up.base, "openai") | {"records": records, "policies": policies}, tmp_path) as gw:
            for i, answer in enumerate(answers):
                up.script(answer)
                said = [{"role": "system", "content": f"Be kind.\nDate: 2026-01-01 {words}"}, {"role": "user", "content": words}]
                await gw.post(ask(tools=[tool], stream=i == 2) | {"messages": said})
            found = await gw.records(3)
    assert not [w for w in words.split() if w in (tmp_path / "records.jsonl").read_text()]
    assert [r["outcome"] for r in found] == ["error"] * 3 and found[0]["decisions"][-1]["rule"] == "invalid"
    assert found[2]["usage"] is None and found[0]["reuse"] == {"prompt": 10, "common": 0, "new": 10}


def test_half_a_compressed_file_leaves_no_trace_on_a_full_disk(tmp_path, monkeypatch, caplog) -> None:
    path = tmp_path / "r.jsonl"
    old = tmp_path / "r.jsonl.000001"
    old.write_bytes(b'{"id":"old"}\n' * 1000)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rotation.os, "fsync", full)
    rotation.Rotation(Records(path=str(path)))._tidy()
    assert [p.name for p in tmp_path.iterdir()] == [old.name] and "must be room for one more" in caplog.text
    monkeypatch.undo()
    rotation.Rotation(Records(path=str(path)))._tidy()
    assert [p.name for p in tmp_path.iterdir()] == [old.name + ".zst"]


def test_a_file_that_is_there_plain_and_compressed_is_read_once(tmp_path) -> None:
    path, old = tmp_path / "r.jsonl", tmp_path / "r.jsonl.000001"
    old.write_bytes(b'{"id":"old"}\n')
    path.write_bytes(b'{"id":"new"}\n')
    kept = old.read_bytes()
    rotation.Rotation(Records(path=str(path)))._tidy()
    old.write_bytes(kept)  # as after a crash between writing the one and removing the other
    assert [r["id"] for r in Reader(path).records()] == ["old", "new"]
    reader = Reader(path)
    files = reader.files()
    old.unlink()
    reader.files = lambda: files  # it was compressed behind the reader's back
    assert [r["id"] for r in reader.records()] == ["old", "new"]


def test_a_bad_expression_is_one_line_at_start() -> None:
    with pytest.raises(ConfigError, match=r"t: records.redact: '\('"):
        parse({"records": {"redact": ["("]}}, "t", {})
    with pytest.raises(ConfigError, match=r"keys\[0\]"):
        parse({"keys": [{"name": "a", "key": "sha256:12"}]}, "t", {})
