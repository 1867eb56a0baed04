"""Options of sessions and of the CUDA provider. Pure; part of the kernel revision, for they choose the kernels."""

from __future__ import annotations

from typing import Final

CPU_OPTIMIZERS_OFF: Final = ("SkipLayerNormFusion", "BiasGeluFusion")
"""Off on the CPU: there these kernels take longer than their two parts (performance.md)."""
CUDA_OPTIMIZERS_OFF: Final = ("BiasSoftmaxFusion",)
"""Off on the GPU: the fused BiasSoftmax asks for cuDNN in its host code, Add and Softmax don't."""
SDPA_KERNEL: Final = 1 | 2 | 4 | 16
"""``sdpa_kernel``, a bit field: flash, memory-efficient, TensorRT and math attention; not cuDNN's (8).

Written out because the default tries cuDNN, and because with it environment variables could choose other kernels.
"""


def session_entries(*, cuda: bool, spin: bool, cpus: str) -> dict[str, str]:
    """Return session config entries (onnxruntime_session_options_config_keys.h). *cpus*: see binding.session."""
    entries = {
        "session.intra_op.allow_spinning": str(int(spin)),
        "session.force_spinning_stop": "1",  # idle threads give their core away
        "session.record_ep_graph_assignment_info": "1",
    }
    if cpus:
        entries["session.intra_op_thread_affinities"] = cpus
    if cuda:
        # Creation fails when a node would land on the CPU; without it onnxruntime falls back and says nothing.
        entries["session.disable_cpu_ep_fallback"] = "1"
    return entries


def cuda_provider(*, index: int, stream: int, cuda_graphs: bool, memory_limit: int) -> dict[str, str]:
    """Return the CUDA provider's options: one stream for copies and kernels, a bounded arena, exact float32.

    *memory_limit*: bytes of this session's arena; 0: no limit.
    """
    options = {
        "device_id": str(index),
        "user_compute_stream": str(stream),
        "do_copy_in_default_stream": "1",
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
        "enable_cudnn": "0",  # no operator here needs it, and without this a machine lacking it is refused
        "sdpa_kernel": str(SDPA_KERNEL),
        "enable_cuda_graph": "1" if cuda_graphs else "0",
    }
    if memory_limit:
        options["gpu_mem_limit"] = str(memory_limit)
    return options
