"""Times gc_codec_reduce of several builds of the library in turns, and compares what they write, byte for byte: here of the
commit before payloads come by shared memory, and of the one that lets them.

    git worktree add before HEAD~2
    (cd before && cargo build --profile fast) && cp before/target/fast/libgradcodec.so before.so
    cargo build --profile fast && cp target/fast/libgradcodec.so after.so
    python3 trial/reduce_compare.py ./before.so ./after.so        on a GPU, with torch alone
    python3 trial/reduce_compare.py --cpu ./before.so ./after.so  the same on the CPU, of few elements: tries the script

Rates are fractions of a device-to-device copy (torch, 1 GiB) by bytes moved: payloads, the chunk, errors twice. The exit
status is 1 if any byte differs.
"""

import argparse
import ctypes
import statistics
import sys
import time
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

import torch


class Device(Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class Dtype(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("device", Device), ("ndim", c_int32), ("dtype", Dtype), ("shape", POINTER(c_int64)),
                ("strides", c_void_p), ("offset", c_uint64)]


class Options(Structure):
    _fields_ = [("struct_size", c_uint32), ("codec", c_int32), ("device", Device), ("values", Dtype), ("results", Dtype),
                ("error", c_int32), ("scale", c_int32), ("nonfinite", c_int32), ("beta", c_float), ("segments", c_void_p),
                ("n_segments", c_size_t), ("n_elements", c_int64), ("n_chunks", c_size_t), ("server", c_uint64),
                ("raw", c_void_p), ("reduction", c_int32), ("reserved_i", c_int32), ("reserved", c_uint64 * 2)]


CODECS = {"MXFP8": 4, "INT8": 5, "INT4": 6, "MXFP4": 7, "BF16": 3}
ERRORS = {"none": (2, 0), "bfloat16": (1, 2), "float32": (0, 4)}  # the enum, bytes
DTYPES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.uint8: (1, 8)}

parser = argparse.ArgumentParser()
parser.add_argument("libraries", nargs="+")
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--elements", type=int, default=300 * 2**20)
parser.add_argument("--rounds", type=int, default=9)
given = parser.parse_args()
place = "cpu" if given.cpu else "cuda:0"
device = Device(1, 0) if given.cpu else Device(2, 0)
stream = None if given.cpu else c_void_p(torch.cuda.current_stream().cuda_stream or 1)
if given.cpu:
    given.elements = min(given.elements, 2**16)


def view(tensor):
    shape = (c_int64 * tensor.dim())(*tensor.shape)
    code, bits = DTYPES[tensor.dtype]
    made = Tensor(tensor.data_ptr(), device, tensor.dim(), Dtype(code, bits, 1), shape, None, 0)
    made.keep = shape, tensor
    return made


class Library:
    def __init__(self, path):
        self.path, self.lib = path, ctypes.CDLL(path)
        self.lib.gc_last_error.restype = ctypes.c_char_p
        self.lib.gc_codec_payload_bytes.restype = self.lib.gc_codec_state_bytes.restype = c_int64
        self.lib.gc_codec_free.restype = None

    def check(self, status):
        if status != 0:
            sys.exit(f"{self.path}: status {status}: {self.lib.gc_last_error()}")

    def codec(self, kind, n, error="none", **more):
        options = Options(struct_size=ctypes.sizeof(Options), codec=CODECS[kind], device=device, n_elements=n, n_chunks=1,
                          server=1, error=ERRORS[error][0], **more)
        handle = c_void_p()
        self.check(self.lib.gc_codec_create(byref(options), byref(handle)))
        return handle

    def encode(self, handle, values):
        payload = torch.empty(self.lib.gc_codec_payload_bytes(handle), dtype=torch.uint8, device=place)
        one, to = view(values), view(payload)
        array = (POINTER(Tensor) * 1)(ctypes.pointer(one))
        self.check(self.lib.gc_codec_encode(handle, array, c_size_t(1), None, None, byref(to), stream))
        return payload

    def reduce(self, handle, chunks, to):
        status = self.lib.gc_codec_reduce(handle, c_size_t(0), byref(chunks), byref(to), stream)
        if status != 0 and not given.cpu:
            self.check(status)

    def state(self, handle):
        state = torch.empty(self.lib.gc_codec_state_bytes(handle), dtype=torch.uint8, device=place)
        to = view(state)
        self.check(self.lib.gc_codec_state_out(handle, byref(to), stream))
        return state


def wait():
    if not given.cpu:
        torch.cuda.synchronize()


def seconds(work, calls):
    if given.cpu:
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - begin) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


libraries = [Library(path) for path in given.libraries]
wrong = 0


def same(what, outputs):
    global wrong
    for library, output in zip(libraries[1:], outputs[1:]):
        if not torch.equal(outputs[0], output):
            at = int((outputs[0] != output).nonzero()[0])
            wrong += 1
            print(f"DIFFERS: {what}: {library.path}: byte {at} of {output.numel()}: {outputs[0][at]} and {output[at]}")


def compare():
    """Bytes of chunks and of states, of payloads with right headers and scales and codes of all kinds."""
    n = 77 + (2**12 if given.cpu else 2**18)
    generator = torch.Generator(device=place).manual_seed(1)
    for kind in CODECS:
        for error, nonfinite, reduction in [(e, p, r) for e in ERRORS for p in (0, 1) for r in (0, 1)]:
            for count in (1, 2, 3, 4, 5, 8, 128, 256):
                if count > 8 and (error == "bfloat16" or given.cpu):
                    continue
                handles = [library.codec(kind, n, error, nonfinite=nonfinite, reduction=reduction) for library in libraries]
                plain = libraries[0].codec(kind, n)
                for content in ("ordinary", "small", "random"):
                    values = torch.randn(count, n, generator=generator, device=place)
                    values *= 2.0 ** torch.randint(-20, 20, (count, n // 64 + 1), generator=generator, device=place).float() \
                        .repeat_interleave(64, 1)[:, :n]
                    if content == "small":
                        values *= 2.0**-118
                    chunks = torch.stack([libraries[0].encode(plain, row.contiguous()) for row in values])
                    if content == "random":
                        # Any scale and any code, but few of them, or all would be NaN.
                        hits = torch.rand(chunks.shape, generator=generator, device=place) < 1e-3
                        hits[:, :64] = False
                        noise = torch.randint(0, 256, chunks.shape, generator=generator, device=place, dtype=torch.uint8)
                        chunks = torch.where(hits, noise, chunks).contiguous()
                    outputs = []
                    for library, handle in zip(libraries, handles):
                        output = torch.zeros_like(chunks[0])
                        chunks_view, to = view(chunks), view(output)
                        for _ in range(2):
                            library.reduce(handle, chunks_view, to)
                        outputs.append(torch.cat([output, library.state(handle)]))
                    wait()
                    same(f"{kind}, {count} payloads, {error}, policy {nonfinite}, reduction {reduction}, {content}", outputs)
                for library, handle in zip(libraries, handles):
                    library.lib.gc_codec_free(handle)
                libraries[0].lib.gc_codec_free(plain)
        print(f"{kind}: compared, {wrong} differ so far", flush=True)


def copy_rate():
    source = torch.zeros(2**20 if given.cpu else 2**30, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    target.copy_(source)
    wait()
    return max(2 * source.numel() / seconds(lambda: target.copy_(source), 20) for _ in range(5))


def measure():
    n, rate = given.elements, copy_rate()
    print(f"\n{n} elements; a copy moves {rate / 1e9:.0f} GB/s, half of it each way; {given.rounds} rounds, medians")
    print("  ".join(["codec  errors    payloads"] + [f"{path[-28:]:>28}" for path in given.libraries]))
    for kind in CODECS:
        plain = libraries[0].codec(kind, n)
        values = torch.randn(n, device=place)
        sent = libraries[0].encode(plain, values)
        libraries[0].lib.gc_codec_free(plain)
        del values
        chunks = sent.repeat(8, 1)
        for error, (_, size) in ERRORS.items():
            handles = [library.codec(kind, n, error) for library in libraries]
            outputs = [torch.empty_like(sent) for _ in libraries]
            views = [view(output) for output in outputs]
            for count in (2, 4, 8):
                taken = view(chunks[:count])
                works = [
                    (lambda library=library, handle=handle, to=to: library.reduce(handle, taken, to))
                    for library, handle, to in zip(libraries, handles, views)
                ]
                for work in works * 2:
                    work()
                wait()
                times = [[] for _ in works]
                for turn in range(given.rounds):
                    for index in range(len(works)):
                        at = (index + turn) % len(works)
                        times[at].append(seconds(works[at], 5))
                moved = (count + 1) * sent.numel() + 2 * size * n
                same(f"{kind}, {count} payloads, {error}, {n} elements", outputs)
                cells = [f"{statistics.median(t) * 1e6:10.1f} us {moved / statistics.median(t) / rate:8.1%} of copy" for t in times]
                print("  ".join([f"{kind:6} {error:9} {count:8}"] + [f"{cell:>28}" for cell in cells]), flush=True)
            for library, handle in zip(libraries, handles):
                library.lib.gc_codec_free(handle)


if not given.cpu:
    torch.zeros(1, device=place)  # torch's context, before the library asks for it
    print(torch.cuda.get_device_name(0))
compare()
measure()
print(f"\n{wrong} differences")
sys.exit(wrong != 0)
