"""MPNet: BERT's layers, with a number for each head and distance added to the attention scores.

Standard operators only: onnxruntime's fused attention operators that need no cuDNN take no such numbers.
"""

from __future__ import annotations

from engines.checkpoint.families.mpnet import BIAS, biases
from engines.cuda.graphs import bert
from engines.cuda.graphs.builder import Graph, GraphBuilder


def build(b: GraphBuilder) -> Graph:
    """Build an MPNet graph on right-padded rows."""
    return bert.encoder(b, embed=bert.embed, classify=bert.classify, bias=_bias)


def _bias(b: GraphBuilder, positions: str) -> str:
    """Return (heads, S, S): a row of the table of distances for each pair of query and key."""
    longest = b.config["max_position_embeddings"]
    table = b.derived(f"{BIAS}:by distance", lambda: biases(b.store.tensors[BIAS], longest))
    keys, queries = b.op("Unsqueeze", positions, b.ints(0)), b.op("Unsqueeze", positions, b.ints(1))
    ahead = b.add(b.op("Sub", keys, queries), b.scalar(longest - 1, "i32"))
    return b.op("Transpose", b.op("Gather", table, ahead, axis=0), perm=[2, 0, 1])
