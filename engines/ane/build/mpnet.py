"""MPNet encoders and cross-encoders for Core ML: BERT with a number for each head and distance in the attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engines.ane.build import bert
from engines.ane.build.bert import EPSILON as EPSILON
from engines.ane.build.bert import pooled as pooled
from engines.checkpoint.families.mpnet import BIAS, biases

if TYPE_CHECKING:
    from engines.ane.build.graph import Graph


def encode(g: Graph, inputs: Any, bias: Any, local: Any) -> Any:
    """Return the last hidden states. Rows of a packed pass lie end to end, so distances are those of the columns."""
    table, place = biases(g.get(BIAS), g.width), np.arange(g.width)
    near = table[place[None, :] - place[:, None] + g.width - 1]
    by_head = [g.mb.add(x=bias, y=g.half(one[None, None])) for one in near.transpose(2, 0, 1)]
    return bert.encode(g, inputs, by_head, local)
