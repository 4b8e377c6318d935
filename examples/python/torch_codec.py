"""Signs with error feedback as operators of PyTorch: eager and compiled, on the CPU and on CUDA.

    PYTHONPATH=python python3 examples/python/torch_codec.py

    from torch_codec import compress, decompress  # this file is to be copied
    error = torch.zeros_like(gradient)  # once; it is written to, and can be saved like any other tensor
    bits, scale = compress(gradient, error)  # each step; 32 times fewer bytes to send
    received = decompress(bits, scale, gradient.numel(), gradient.dtype).view_as(gradient)

On CUDA they work on the current stream, and nothing waits. They are for gradients, after the backward pass: a backward
pass that comes to one of them is an error. What they compute is said in gradcodec.h, at gc_onebit_compress_into and
gc_unpack_signs_into. torch_feedback.py shows a codec, which keeps the errors itself and takes all layers at once.
"""

try:
    import torch
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit
from gradcodec import GradCodec

gradcodec = GradCodec()


def stream_of(tensor):
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


@torch.library.custom_op("gradcodec_python::compress", mutates_args=("error",))
def compress(gradient: torch.Tensor, error: torch.Tensor, n_chunks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The signs of gradient plus error, uint8 [n_chunks, bytes], and their scale, float32 [1]. What these lose of the
    sum is left in `error`: float32 or bfloat16, contiguous, with as many elements."""
    n, new = gradient.numel(), gradient.new_empty
    bits = new((n_chunks, gradcodec.chunk_bytes(n, n_chunks)), dtype=torch.uint8)
    scale, workspace = new(1, dtype=torch.float32), new(gradcodec.onebit_workspace_bytes(n), dtype=torch.uint8)
    with torch.cuda.device_of(gradient):  # PyTorch lends tensors of the current device only
        outputs = error, bits, scale, workspace
        gradcodec.onebit_compress_into(gradient.detach(), *outputs, stream=stream_of(gradient))
    return bits, scale


@compress.register_fake
def _(gradient, error, n_chunks=1):
    torch._check(n_chunks > 0, lambda: f"n_chunks: at least 1 expected, got {n_chunks}")
    n_bytes = (gradient.numel() + 7) // 8
    bits = gradient.new_empty((n_chunks, (n_bytes + n_chunks - 1) // n_chunks), dtype=torch.uint8)
    return bits, gradient.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("gradcodec_python::decompress", mutates_args=())
def decompress(bits: torch.Tensor, scale: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The `n` elements that the bits stand for, +scale or -scale each. `scale`: one, or one for each chunk."""
    values = bits.new_empty(n, dtype=dtype)
    with torch.cuda.device_of(bits):
        gradcodec.unpack_signs_into(bits, values, scale.detach(), stream=stream_of(bits))
    return values


@decompress.register_fake
def _(bits, scale, n, dtype):
    return bits.new_empty(n, dtype=dtype)


# --- what they do -----------------------------------------------------------------------------------------------------


def there_and_back(gradient, error):
    bits, scale = compress(gradient, error)
    return bits, scale, decompress(bits, scale, gradient.numel(), gradient.dtype).view_as(gradient)


def by_hand(device):
    """The example of docs/NUMERICS.md: the second step makes up for the first."""
    error, received = torch.zeros(2, device=device), []
    for gradient in ([1.0, -7.0], [2.0, 4.0]):
        received += there_and_back(torch.tensor(gradient, device=device), error)[2].tolist()
    print(f"{device}: 1, -7, 2 and 4 are received as", *map(int, received))
    assert received == [5, -5, -2, 2] and not error.any()


def compiled(device):
    """Graphs of torch.compile have no holes where the operators are, and sizes may change."""
    function, good = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=True), True
    for rows in 10, 999:
        errors = torch.zeros(2, rows, 7, device=device)  # of the one and of the other
        for _ in range(3):
            gradient = torch.randn(rows, 7, device=device)
            pairs = zip(there_and_back(gradient, errors[0]), function(gradient, errors[1]))
            good &= all(torch.equal(ours, theirs) for ours, theirs in pairs) and torch.equal(*errors)
    print(f"{device}: compiled as eager: {good}")
    assert good


def in_a_graph():
    """Captured once on a stream of its own, replayed with new gradients in the same memory."""
    gradcodec.prepare((2, torch.cuda.current_device()))  # loads the kernels, which a capture does not allow
    gradient, graph, good = torch.empty(1_000_003, device="cuda"), torch.cuda.CUDAGraph(), True
    error, expected_error = torch.zeros(2, gradient.numel(), device="cuda")
    with torch.cuda.graph(graph):
        captured = there_and_back(gradient, error)
    for _ in range(3):
        gradient.normal_()
        graph.replay()
        pairs = zip(captured, there_and_back(gradient, expected_error))
        good &= all(torch.equal(ours, theirs) for ours, theirs in pairs) and torch.equal(error, expected_error)
    print(f"cuda: in a graph as without: {good}")
    assert good


def main():
    torch.manual_seed(1)
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        by_hand(device)
        compiled(device)
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device, so CUDA was not shown")
        raise SystemExit
    in_a_graph()


if __name__ == "__main__":
    main()
