import pytest
from datasets import Dataset, DatasetDict

from fedtailor.data import DataConfig
from fedtailor.data.hub import train_and_test_split
from fedtailor.errors import InputError


def test_splits_of_a_hub_data_set():
    rows = Dataset.from_dict({"text": [f"story {row}" for row in range(40)]})
    splits = DatasetDict(train=rows.select(range(30)), test=rows.select(range(30, 40)))
    train, test = train_and_test_split(splits, DataConfig())
    assert (len(train), len(test)) == (30, 10)
    assert train_and_test_split(splits, DataConfig(test_split=None))[1] is None
    assert train_and_test_split(DatasetDict(train=train), DataConfig())[1] is None
    with pytest.raises(InputError, match="unknown split 'dev'; splits: test, train"):
        train_and_test_split(splits, DataConfig(test_split="dev"))
    with pytest.raises(InputError, match=r"'tran'; did you mean 'train'\? splits: test, train"):
        train_and_test_split(splits, DataConfig(train_split="tran"))
