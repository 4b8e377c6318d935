"""GradCodec for PyTorch: gradients that ranks of torch.distributed exchange compressed.

    model = DistributedDataParallel(model)
    compression = gradcodec.torch.compress(model, "int8")  # everything else stays as it is
    ...
    torch.save(compression.state_dict(), f"errors-{rank}.pt")  # into the checkpoint, by every rank

OneBitSGD and OneBitAdam exchange the momentum, at one bit per element. all_reduce() averages or sums any tensors. This
module needs PyTorch; `import gradcodec` does not import it.
"""

from ._torch_compression import Compression, compress
from ._torch_groups import all_reduce
from ._torch_optimizers import OneBitAdam, OneBitSGD

__all__ = ["Compression", "OneBitAdam", "OneBitSGD", "all_reduce", "compress"]

for _each in (Compression, OneBitAdam, OneBitSGD, all_reduce, compress):
    _each.__module__ = __name__
