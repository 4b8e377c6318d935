"""Adam on a small model, with gradients sent as 8-bit integers.

    PYTHONPATH=python python3 examples/python/block_codecs.py

A network of two layers learns a function of eight numbers. Each step its gradients pass through a codec, as if sent to
another rank: the matrices in blocks of INT8, the biases unchanged. Prints the error, the bytes sent, and the final loss
beside those of float32, MXFP8, and INT4 with error feedback.
"""

import numpy as np
from gradcodec import GradCodec

SHAPES = {"w1": (8, 64), "b1": (64,), "w2": (64, 1), "b2": (1,)}
STEPS, RATE = 400, 0.01


def gradients(model, x, y):
    """Returns the loss, and its gradients by name."""
    hidden = np.tanh(x @ model["w1"] + model["b1"])
    off = hidden @ model["w2"] + model["b2"] - y
    back = off @ model["w2"].T * (1 - hidden**2) * (2 / len(x))
    of_w2, of_b2 = hidden.T @ off * (2 / len(x)), off.mean(axis=0) * 2
    return float((off**2).mean()), {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": of_w2, "b2": of_b2}


class Wire:
    """Encodes and decodes a gradient, as if sent to another rank; does nothing if `kind` is None."""

    def __init__(self, gradcodec, kind, error):
        self.codec = None
        if kind is not None:
            # Biases are small but important, so they are sent as float32.
            raw = [len(shape) == 1 for shape in SHAPES.values()]
            sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
            self.codec = gradcodec.codec(kind, sizes, error=error, raw=raw)
            self.payload = np.from_dlpack(gradcodec.tensor_empty([self.codec.payload_bytes], "uint8"))

    def __call__(self, gradient):
        if self.codec is None:
            return gradient
        self.codec.encode([np.ascontiguousarray(gradient[name], np.float32) for name in SHAPES], self.payload)
        received = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
        self.codec.decode(self.payload, list(received.values()))
        return received


def train(send):
    """Trains with Adam; returns the final loss."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((512, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True)) + x[:, :1] * x[:, 1:2]
    model = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in SHAPES.items()}
    mean = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    square = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for step in range(1, STEPS + 1):
        loss, gradient = gradients(model, x, y)
        for name, g in send(gradient).items():
            mean[name] += 0.1 * (g - mean[name])
            square[name] += 0.001 * (g * g - square[name])
            root = np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8
            model[name] -= RATE * mean[name] / (1 - 0.9**step) / root
    return loss


def main():
    gradcodec, rng = GradCodec(), np.random.default_rng(2)
    wire = Wire(gradcodec, "int8", "none")
    gradient = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    received = wire(gradient)
    for name, g in gradient.items():
        off = float(np.abs(received[name] - g).max() / np.abs(g).max())
        assert off <= 1 / 252, f"{name} is off by {off}"
        print(f"{name}: off by {off:.5f} of its largest element")
    print(f"{4 * sum(g.size for g in gradient.values())} bytes of gradient, {wire.payload.size} of payload")

    plain = train(Wire(gradcodec, None, None))
    print(f"loss after {STEPS} steps: float32 {plain:.4f}", end="")
    for kind, error, most in (("int8", "none", 1.2), ("mxfp8", "none", 1.2), ("int4", "float32", 1.5)):
        loss = train(Wire(gradcodec, kind, error))
        print(f", {kind} {loss:.4f}", end="")
        assert loss < most * plain, f"{kind}, error {error}: {loss}, float32 {plain}"
    print()


if __name__ == "__main__":
    main()
