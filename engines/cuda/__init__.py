"""onnxruntime on CUDA, and on its CPU provider as a lane of its own: graphs built here from safetensors."""
