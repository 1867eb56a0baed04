"""Files in, files out: whole corpora through one lane, in bounded memory, resumed after a stop.

:func:`embed_file` and :func:`rerank_file` are the commands' work as a library; :mod:`synapse_host.bulk.search` finds
the nearest rows of what the first one wrote. The room uses the host as any caller does and knows nothing of workers or
of the wire. Start with ``embedding.py``; ``corpus.py`` reads the kinds of files, ``output.py`` owns a result while it
grows.
"""

from synapse_host.bulk.corpus import Corpus
from synapse_host.bulk.embedding import embed_file
from synapse_host.bulk.entries import Chunking, Policy
from synapse_host.bulk.reranking import rerank_file

__all__ = ["Chunking", "Corpus", "Policy", "embed_file", "rerank_file"]
