import pytest

from engine.text.text_model import TextModel, load_text_model
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.text import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture(scope="session")
def text_models(tmp_path_factory) -> dict[str, TextModel]:
    root = tmp_path_factory.mktemp("models")
    names = ("json_calls", "xml_calls", "always_thinks", "plain")
    return {name: load_text_model(write_tokenizer(root / name, name)) for name in names}
