"""GradCodec with PyTorch, on the CPU and on CUDA: tensors in and out without a copy, and into PyTorch's memory.

    PYTHONPATH=python python3 examples/python/torch_bits.py

On CUDA the calls are the same, with a stream in addition. torch_streams.py shows more about streams.
"""

try:
    import torch
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit
from gradcodec import GradCodec


def packed(truth, n_chunks):
    """Packs by the formula: eight elements per byte, the first in the most significant bit, zeros at the end."""
    bits = torch.zeros(-(-truth.numel() // (8 * n_chunks)) * 8 * n_chunks, dtype=torch.int32, device=truth.device)
    bits[: truth.numel()] = truth.flatten()
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=truth.device)
    return (bits.view(n_chunks, -1, 8) * weights).sum(-1).to(torch.uint8)


def show(gradcodec, device):
    torch.manual_seed(1)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    model = torch.nn.Linear(40, 25, bias=False, device=device)
    model(torch.randn(64, 40, device=device)).square().sum().backward()
    gradient = model.weight.grad
    expected = packed(gradient >= 0, 4)

    # PyTorch's memory, on PyTorch's stream: nothing waits, and nothing is allocated.
    bits = torch.empty(4, gradcodec.chunk_bytes(gradient.numel(), 4), dtype=torch.uint8, device=device)
    signs = torch.empty_like(gradient, dtype=torch.bfloat16)
    gradcodec.pack_signs_into(gradient, bits, stream=stream)
    gradcodec.unpack_chunks_into(bits, signs, stream=stream)
    print(f"{device}: {gradient.nbytes} bytes of {gradient.dtype} to {bits.nbytes} and back to {signs.dtype}")
    assert torch.equal(bits, expected) and torch.equal(signs, (gradient >= 0).to(signs.dtype))

    # New tensors, complete on return. The library owns the memory, which is freed with the last tensor on it.
    chunks = gradcodec.pack_chunks(gradient >= 0, 4)
    addresses = [chunk.address for chunk in chunks]
    rows = [torch.from_dlpack(chunk) for chunk in chunks]
    truth = torch.from_dlpack(gradcodec.unpack_chunks(rows, gradient.numel()))
    print(f"{device}: chunks of {rows[0].dtype}, not copied: {[row.data_ptr() for row in rows] == addresses}")
    assert [row.data_ptr() for row in rows] == addresses and torch.equal(torch.stack(rows), expected)
    assert torch.equal(truth, gradient.flatten() >= 0)

    # Autograd does not track these calls. A tensor that requires a gradient can be read, but not written to.
    gradcodec.pack_signs_into(model.weight, bits, stream=stream)
    assert torch.equal(bits, packed(model.weight >= 0, 4))
    try:
        gradcodec.unpack_chunks_into(bits, model.weight, stream=stream)
    except BufferError as error:
        print(f"{device}: refused: {error}")
    else:
        raise AssertionError("a tensor that requires a gradient was written to")


def main():
    gradcodec = GradCodec()
    show(gradcodec, torch.device("cpu"))
    if torch.cuda.is_available():
        show(gradcodec, torch.device("cuda", torch.cuda.current_device()))
    else:
        print("SKIPPED: no CUDA device, so CUDA was not shown")


if __name__ == "__main__":
    main()
