"""GradCodec for PyTorch: gradients that ranks of torch.distributed exchange compressed.

    import gradcodec.torch
    gradcodec.torch.all_reduce(tensors, "int8")  # to their mean over the ranks, in place
"""

from ._torch_groups import all_reduce

__all__ = ["all_reduce"]
