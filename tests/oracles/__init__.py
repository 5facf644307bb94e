"""Comparisons with other libraries: `make test-oracles` runs them, in an environment of its own."""

import transformers

from tests.models.small import DECODERS

LONG = transformers.LlamaConfig.from_dict(
    {**DECODERS["llama"].to_dict(), "max_position_embeddings": 96}
)
