"""Error feedback for the layers of a PyTorch model, on the CPU and on CUDA: gradients of one bit train it as well.

    PYTHONPATH=python python3 examples/python/torch_feedback.py

Four workers, simulated by one process, learn handwritten digits. Each has a codec, which takes the gradients of all
layers in one call, on the current stream, and keeps the error of a step. A comment names the torch.distributed call at
each place where processes would send. examples_c/feedback.c is the C version, with loss curves.
"""

from pathlib import Path

try:
    import torch
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit
from gradcodec import CPU, CUDA, ONEBIT, GradCodec

DIGITS = Path(__file__).resolve().parents[2] / "examples_c" / "data" / "digits.bin"
WORKERS, BATCH, STEPS, RATE = 4, 32, 600, 0.3


class Group:
    """Exchanges the workers' gradients. Worker k encodes its gradient and reduces the chunks k with codec k."""

    def __init__(self, gradcodec, parameters):
        device, sizes = parameters[0].device, [parameter.numel() for parameter in parameters]
        where = (CUDA, device.index) if device.type == "cuda" else (CPU, 0)
        self.codecs = [
            gradcodec.codec(ONEBIT, sizes, device=where, n_chunks=WORKERS, server=k + 1) for k in range(WORKERS)
        ]
        self.chunk_bytes = self.codecs[0].payload_bytes // WORKERS
        # PyTorch's memory is aligned as payloads must be.
        self.sent = torch.empty(WORKERS, WORKERS, self.chunk_bytes, dtype=torch.uint8, device=device)  # from, to
        self.reduced = torch.empty(WORKERS, self.chunk_bytes, dtype=torch.uint8, device=device)

    def exchange(self, gradients, results):
        stream = torch.cuda.current_stream() if self.sent.is_cuda else None
        for codec, gradient, payload in zip(self.codecs, gradients, self.sent):
            codec.encode(gradient, payload.view(-1), stream=stream)
        received = self.sent.transpose(0, 1).contiguous()  # all_to_all_single
        for k, codec in enumerate(self.codecs):
            codec.reduce(k, received[k], self.reduced[k], stream=stream)
        # all_gather_into_tensor. All workers would decode the same bytes, so one decoding is enough.
        self.codecs[0].decode(self.reduced.view(-1), results, stream=stream)

    def flags(self):
        """Returns the sum of the codecs' flags: on CUDA a call returns before its values are checked."""
        stream = torch.cuda.current_stream() if self.sent.is_cuda else None
        flags = torch.empty(WORKERS, dtype=torch.uint32, device=self.sent.device)
        for codec, flag in zip(self.codecs, flags.split(1)):
            codec.flags(flag, stream=stream)
        return sum(flags.tolist())


def average(gradients, results):
    """Averages in float32: all_reduce."""
    for result, *parts in zip(results, *gradients):
        torch.mean(torch.stack(parts), 0, out=result)


def train(device, exchange_with):
    """Trains; returns the loss on the training images, and the accuracy on held-out images."""
    records = torch.frombuffer(bytearray(DIGITS.read_bytes()), dtype=torch.uint8).view(-1, 65).to(device)
    images, labels = records[:, :64] / 16, records[:, 64].long()
    held_out = torch.arange(len(records), device=device) % 5 == 0
    trained, expected = images[~held_out], labels[~held_out]

    torch.manual_seed(1)  # on the CPU, so that all devices start with the same numbers
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    parameters = list(model.parameters())
    exchange, optimizer = exchange_with(parameters), torch.optim.SGD(parameters, RATE)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(STEPS):
        gradients = []
        for batch in torch.randint(len(trained), (WORKERS, BATCH)).to(device):
            loss = torch.nn.functional.cross_entropy(model(trained[batch]), expected[batch])
            gradients.append([gradient.contiguous() for gradient in torch.autograd.grad(loss, parameters)])
        exchange(gradients, [parameter.grad for parameter in parameters])
        optimizer.step()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(trained), expected)
        right = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
    return loss.item(), right.item()


def show(gradcodec, device):
    groups = []

    def exchange_with(parameters):
        groups.append(Group(gradcodec, parameters))
        return groups[0].exchange

    (plain, plain_right), (loss, right) = train(device, lambda parameters: average), train(device, exchange_with)
    n_bytes, plain_bytes = WORKERS * groups[0].chunk_bytes, 4 * (64 * 64 + 64 + 64 * 10 + 10)
    print(f"{device.type}: float32: loss {plain:.4f}, {plain_right:.4f} read right, {plain_bytes} bytes of gradient")
    print(f"{device.type}: one bit: loss {loss:.4f}, {right:.4f} read right, {n_bytes} bytes of payload")
    good = loss < 1.2 * plain and abs(right - plain_right) < 0.03 and groups[0].flags() == 0
    print(f"{device.type}: one bit trains as well: {good}")
    assert good


def main():
    gradcodec = GradCodec()
    show(gradcodec, torch.device("cpu"))
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device, so CUDA was not shown")
        raise SystemExit
    with torch.cuda.stream(torch.cuda.Stream()):  # any stream: the current one is used
        show(gradcodec, torch.device("cuda", torch.cuda.current_device()))


if __name__ == "__main__":
    main()
