import pytest

from tests.support.text import write_tokenizer


@pytest.fixture(scope="session")
def dirs(tmp_path_factory):
    """Template name -> tokenizer directory."""
    root = tmp_path_factory.mktemp("text")
    return {name: write_tokenizer(root / name, name) for name in ("json_calls", "xml_calls", "always_thinks", "plain")}
