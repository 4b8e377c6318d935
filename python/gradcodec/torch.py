"""GradCodec for PyTorch: gradients that ranks of torch.distributed exchange compressed.

    model = DistributedDataParallel(model)
    compression = gradcodec.torch.compress(model, "int8")  # the only new line
    ...
    torch.save(compression.state_dict(), f"errors-{rank}.pt")  # a checkpoint: every rank

shard() does the same for FSDP2. OneBitSGD and OneBitAdam exchange the momentum, at one bit per element. all_reduce()
averages or sums any tensors, and AllReduce keeps the errors of such calls. DiLoCo exchanges the movement of parameters
every `sync_every` steps. This module needs PyTorch; `import gradcodec` does not import it.
"""

from ._torch_allreduce import AllReduce, all_reduce
from ._torch_ddp import compress
from ._torch_diloco import DiLoCo
from ._torch_fsdp import shard
from ._torch_optimizers import OneBitAdam, OneBitSGD
from ._torch_steps import Compression

__all__ = ["compress", "shard", "Compression", "all_reduce", "AllReduce", "DiLoCo", "OneBitSGD", "OneBitAdam"]

for _each in (AllReduce, Compression, DiLoCo, OneBitAdam, OneBitSGD, all_reduce, compress, shard):
    _each.__module__ = __name__

if __name__ == "__main__":
    import sys

    from ._torch_native import main

    sys.exit(main(sys.argv[1:]))
