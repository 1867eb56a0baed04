"""llama.cpp through llama-cpp-python: embeddings, reranking and generation on CPU and Metal."""
