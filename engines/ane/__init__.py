"""Core ML on the Apple Neural Engine: a worker that embeds and reranks with functions of fixed shape.

It loads what ``python -m engines.ane prepare`` compiled on this machine, admits and evicts functions as the host says,
and reports where Core ML places their operations. The tools that make and prepare packages are in ``build``.
It must not know the host, other engines or texts: token ids come in, vectors and scores go out.
A new model family is a row of ``families.py`` and a file in ``build``. Open ``engine.py`` first: it has the theory of
operation; ``binding.py`` is the only file that calls Apple's framework.
"""

from typing import Final

REVISION: Final = "mil-encoder-1"
"""The graph builder's revision, part of kernel_revision: raise it whenever a change may change a number."""
