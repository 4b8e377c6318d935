"""GradCodec on PyTorch streams: packs and unpacks among other GPU work, without synchronizing.

    PYTHONPATH=python python3 examples/python/torch_streams.py

Two rules suffice. DLPack makes `stream` wait for work on the tensors that the current stream has enqueued. Work that
uses the results on another stream must wait for `stream`, and memory allocated on another stream must not be freed
before (`record_stream`): this is PyTorch's rule for side streams.
"""

try:
    import torch
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit
from gradcodec import GradCodec

ROUNDS, COUNT, N_CHUNKS = 50, 1_000_003, 4


def wrong(gradient, signs):
    """Returns the number of wrong signs; on a GPU the number stays there, so that the host does not wait."""
    return (signs != torch.where(gradient < 0, 0.0, 1.0)).sum()


def buffers(gradcodec, device):
    bits = torch.empty(N_CHUNKS, gradcodec.chunk_bytes(COUNT, N_CHUNKS), dtype=torch.uint8, device=device)
    return bits, torch.empty(COUNT, device=device)


def on_the_cpu(gradcodec):
    gradient, (bits, signs) = torch.randn(COUNT), buffers(gradcodec, "cpu")
    gradcodec.pack_signs_into(gradient, bits)
    gradcodec.unpack_chunks_into(bits, signs)
    print(f"cpu: no stream; {wrong(gradient, signs)} of {COUNT} signs wrong")
    assert wrong(gradient, signs) == 0


class Load:
    """Work that takes the GPU milliseconds: a stream that does not wait for it reads the gradient of the last round."""

    def __init__(self):
        self.matrix = torch.randn(4096, 4096, device="cuda") / 64

    def gradient(self):
        for _ in range(4):
            self.matrix = self.matrix @ self.matrix
            self.matrix /= self.matrix.norm() / 64
        return torch.randn(COUNT, device="cuda") + self.matrix[0, 0]


def inside_streams(gradcodec):
    """Uses several streams, each with its own gradients, bits and signs, inside `torch.cuda.stream`."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    faults = []
    for stream in streams:
        with torch.cuda.stream(stream):
            load, (bits, signs) = Load(), buffers(gradcodec, "cuda")
            for _ in range(ROUNDS):
                gradient = load.gradient()
                gradcodec.pack_signs_into(gradient, bits, stream=stream)
                gradcodec.unpack_chunks_into(bits, signs, stream=stream)
                faults.append(wrong(gradient, signs))
    torch.cuda.synchronize()  # once, to read the numbers
    return sum(int(fault) for fault in faults)


def beside_the_current_stream(gradcodec):
    """Packs gradients of the current stream on a side stream, as a hook that overlaps with backward does."""
    side, load = torch.cuda.Stream(), Load()
    faults = []
    for _ in range(ROUNDS):
        gradient, (bits, signs) = load.gradient(), buffers(gradcodec, "cuda")
        gradcodec.pack_signs_into(gradient, bits, stream=side)  # `side` waits for the gradient
        gradcodec.unpack_chunks_into(bits, signs, stream=side)
        for tensor in (gradient, bits, signs):  # allocated on the current stream, in use on `side`
            tensor.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        faults.append(wrong(gradient, signs))
    torch.cuda.synchronize()
    return sum(int(fault) for fault in faults)


def in_a_graph(gradcodec):
    """Captures once, and replays with new gradients in the same memory."""
    gradcodec.prepare((2, torch.cuda.current_device()))  # loads the kernels, which a capture does not allow
    gradient, (bits, signs) = torch.empty(COUNT, device="cuda"), buffers(gradcodec, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        gradcodec.pack_signs_into(gradient, bits, stream=stream)
        gradcodec.unpack_chunks_into(bits, signs, stream=stream)
    faults = []
    for _ in range(ROUNDS):
        gradient.normal_()
        graph.replay()
        faults.append(wrong(gradient, signs))
    torch.cuda.synchronize()
    return sum(int(fault) for fault in faults)


def main():
    gradcodec = GradCodec()
    torch.manual_seed(1)
    on_the_cpu(gradcodec)
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device, so streams were not shown")
        raise SystemExit
    for show in inside_streams, beside_the_current_stream, in_a_graph:
        faults = show(gradcodec)
        print(f"cuda: {show.__name__}: {faults} signs wrong in all rounds")
        assert faults == 0


if __name__ == "__main__":
    main()
