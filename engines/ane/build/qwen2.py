"""Qwen2 embedding models for Core ML: the network of Qwen3, which looks at what the checkpoint has."""

from engines.ane.build.qwen3 import EPSILON as EPSILON
from engines.ane.build.qwen3 import encode as encode
