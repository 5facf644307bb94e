"""A tiny BERT and five clients with newsgroup posts of different lengths."""

from __future__ import annotations

import csv
import sys
from functools import cache
from importlib.metadata import files

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

from fedtailor.data.table import Dataset, Partition, Shares, Tokens
from fedtailor.federation import Federation
from fedtailor.models import find_blocks
