"""Edits: copy-on-write on the parsed body, byte-preserving on the wire."""

import copy
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.edits import ABSENT, Edit, apply, change, edits, look, render, splice

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=5)


def paths(value, here=()):
    yield here
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*here, key))


@given(OBJECTS, st.data())
def test_rendering_an_edited_body_means_the_edited_body(body, data) -> None:
    raw = json.dumps(body, indent=1, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "replace")
    before = orjson.loads(raw)
    now = before
    for _ in range(data.draw(st.integers(0, 3))):
        path = data.draw(st.sampled_from([p for p in paths(now) if p] or [("new",)]))
        after = ABSENT if look(now, path) is not ABSENT and data.draw(st.booleans()) else data.draw(VALUES)
        now = apply(now, [Edit(path, look(now, path), after)])
    kept = copy.deepcopy(before)
    assert orjson.loads(render(raw, before, now)) == orjson.loads(orjson.dumps(now))
    assert before == kept  # the parse is never changed in place


def test_bytes_of_untouched_parts_survive_at_every_depth() -> None:
    raw = b'{"a" : [1.0, {"x":  "\\u00e9", "y": 2}], "b":1e3, "t": [{"n" : 1}, {"n" : 2}]}'
    before = orjson.loads(raw)
    after = apply(before, edits(before, (("a", 1, "y"), 3), (("c",), True)))
    assert render(raw, before, after) == b'{"a":[1.0,{"x":"\\u00e9","y":3}],"b":1e3,"t":[{"n" : 1}, {"n" : 2}],"c":true}'
    turned = apply(before, [Edit(("t",), before["t"], before["t"][::-1])])
    assert render(raw, before, turned).endswith(b'"t":[{"n" : 2},{"n" : 1}]}')
    assert render(raw, before, before) == raw


@pytest.mark.parametrize(("raw", "want"), [(b"{}", b'{"k":1}'), (b' {"a":2 } \n', b' {"a":2,"k":1}'), (b"{ }", b'{"k":1}')])
def test_splice(raw, want) -> None:
    assert splice(raw, "k", b"1") == want


def test_nothing_to_change_is_no_edit() -> None:
    assert change({"a": 1}, ("a",), 1) is None and change({}, ("a", "b"), ABSENT) is None
    assert change({"a": 1}, ("a",), True) == Edit(("a",), 1, True)  # 1 == True in Python, not in JSON


def test_missing_parents_are_made_and_lists_grow_at_their_end() -> None:
    assert apply({}, [Edit(("a", "b"), ABSENT, 1)]) == {"a": {"b": 1}}
    assert apply({"l": [1]}, [Edit(("l", 1), ABSENT, 2)]) == {"l": [1, 2]}
    assert apply({"l": [1, 2]}, [Edit(("l", 0), 1, ABSENT)]) == {"l": [2]}
