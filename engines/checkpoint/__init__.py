"""What a Hugging Face checkpoint is, and how it is read; at build time, and when a worker opens a package of it.

`read` opens a folder or a package, `layout` names the tensors of each family, `facts` and `pipeline` say what the files
beside the weights mean, `safetensors` is the format, `package` and `quantize` write artifacts, `reference` computes
what the published model answers. It imports no native library and knows no worker. Start with `read.py`.
"""
