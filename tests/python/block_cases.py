"""Cases of block codecs for the CPU, for CUDA on the stand-in driver, and for a GPU: compares every byte with
docs/NUMERICS.md 11 in NumPy. CASES has them by name; each takes a place (codecs_c)."""

import pathlib
import re
import struct

import numpy as np

import block_model
from block_model import BF16, E8M0, FORMATS, INT4, INT8, MEAN, MXFP4, MXFP8, SUM, VALUES
from capi import Status, lib
from codec_model import CORRUPT, NONFINITE, TAKEN_BACK, TRANSACTIONAL, ZERO, f32, narrow
from codecs_c import Checked, call, gradient, model_of, same

NAMES = {BF16: "bf16", MXFP8: "mxfp8", INT8: "int8", INT4: "int4", MXFP4: "mxfp4"}
DTYPES = ("float32", "float16", "bfloat16")
CASES = {}


def each_codec(function):
    """Adds a case for each codec, which is the second argument."""
    for codec, name in NAMES.items():
        CASES[f"{function.__name__}[{name}]"] = lambda place, codec=codec: function(place, codec)
    return function


def all_magnitudes(codec, seed):
    """Returns blocks of every exponent: random ones, numbers around M * 2^k, ties between codes, zeros, denormals."""
    random, most = np.random.default_rng(seed), FORMATS[codec].most or 1
    exponents = np.arange(-149, 127)
    random_ones = random.standard_normal((exponents.size, 64)) * 2.0 ** exponents[:, None]
    steps = np.array([-2, -1, 0, 1, 2])
    with np.errstate(over="ignore"):
        at_most = (f32(most) * 2.0 ** exponents[:, None]).astype(f32).view(np.int32) + steps
    at_most = at_most.clip(0, 0x7EFFFFFF).astype(np.int32).view(f32).repeat(13, 1)[:, :64]
    ties = np.concatenate([np.arange(0.5, 32), np.arange(-15.5, 16)])[:64].astype(f32)
    ties = np.concatenate([ties, [f32(most)] * (64 - ties.size)]) * 2.0 ** exponents[:, None]
    with np.errstate(all="ignore"):
        c = np.concatenate([random_ones, at_most, ties, np.zeros((1, 64)), -np.zeros((1, 64))]).astype(f32)
    return np.where(np.abs(c) < f32(2.0**127), c, f32(1)).reshape(-1)


def ordinary(rng, model):
    return [gradient(rng, n, model.values, False) for n in model.segments]


# --- the examples of the page -----------------------------------------------------------------------------------------


def example(codec):
    """Returns the example of docs/NUMERICS.md 11, read from the page: the bytes behind the header for (1, -7, 3.5), and
    the values to which they decode."""
    page = pathlib.Path(__file__).parents[2].joinpath("docs", "NUMERICS.md").read_text().split("**Examples by hand.**")[1]
    values, behind = re.search(rf"^\| {NAMES[codec].upper()} \|.*\| (.*?) \| (.*?) \|$", page, re.M).groups()
    parts = re.findall(r"(\d+) zeros|([0-9a-f]{2})\b", behind)
    text = b"".join(bytes(int(zeros)) if zeros else bytes.fromhex(byte) for zeros, byte in parts)
    return text, f32([float(value) for value in values.split(",")])


@each_codec
def the_example_of_the_page(place, codec):
    behind, values = example(codec)
    with Checked(place, codec=codec, segments=[3], error=None) as handle:
        payload = handle.encode([f32([1, -7, 3.5])])
        assert payload[0, 64:].tobytes() == behind
        same(handle.decode(payload)[0], values, "values")


# --- every shape ------------------------------------------------------------------------------------------------------

SHAPES = [
    ([], None), ([0], None), ([0], [1]), ([1], None), ([1], [1]), ([31], None), ([32], None), ([33], None), ([64], None),
    ([65], None), ([1023, 1, 0, 1025], None), ([70, 1, 0, 333, 40], [0, 1, 0, 0, 1]), ([5, 100, 7], [1, 1, 1]),
    ([0, 0, 3], [1, 0, 1]), ([129, 2049], [1, 0]),
]  # fmt: skip


@each_codec
def every_shape_in_every_number_of_chunks(place, codec):
    rng = np.random.default_rng(codec)
    for segments, raw in SHAPES:
        most = len(segments) and -(-sum(segments) // FORMATS[codec].block)
        for n_chunks in (1, 3, most + 5):
            server = int(rng.integers(0, n_chunks))
            options = dict(segments=segments, raw=raw, n_chunks=n_chunks, server=server, reduction=int(rng.integers(0, 2)))
            with Checked(place, codec=codec, **options) as handle:
                for _ in range(2):
                    payload = handle.encode(ordinary(rng, handle.model), aligned=False)
                    handle.decode(payload, aligned=False)
                    handle.reduce(np.stack([payload[server]] * 2))
                    handle.compare_all()


@each_codec
def decoded_values_are_divided_multiplied_and_added(place, codec):
    rng = np.random.default_rng(8)
    with Checked(place, codec=codec, segments=[77, 9], raw=[0, 1], n_chunks=2) as handle:
        payload = handle.encode(ordinary(rng, handle.model))
        for divisor in (0, 1, 3, 2**31 - 1):
            for factor in (None, 0.1, -2.0, 0.0, 1e38, np.inf, np.nan):
                for dtype in DTYPES:
                    handle.decode(payload, dtype, divisor, factor)
                handle.decode(payload, "float32", divisor, factor, add=True)
                handle.flags()


@each_codec
def up_to_nine_payloads_are_reduced(place, codec):
    rng = np.random.default_rng(9)
    for reduction in (MEAN, SUM):
        for error in ("float32", "bfloat16", None):
            options = dict(codec=codec, segments=[100, 5, 40], raw=[0, 1, 0], reduction=reduction, error=error, n_chunks=2)
            with Checked(place, **options, server=0, beta=0.95) as handle:
                senders = [model_of(**options) for _ in range(9)]
                for count in (1, 2, 3, 5, 9):
                    sent = [sender.encode(ordinary(rng, sender)).reshape(2, -1)[0] for sender in senders[:count]]
                    handle.reduce(np.stack(sent))
                    handle.compare_all()


@each_codec
def a_long_segment_is_reduced(place, codec):
    """Reduces more tiles of 8192 elements than the stand-in driver's GPU has room for at once, so a thread block has
    several. Some scales or codes are ones that encode does not write, and others follow them."""
    rng, n, form = np.random.default_rng(codec), 21 * 8192 + 1500, FORMATS[codec]
    for rare in (None, "scale", "codes"):
        options = dict(codec=codec, segments=[n], error=None, server=0)
        with Checked(place, **options, reduction=SUM) as total, Checked(place, **options, reduction=MEAN) as mean:
            sent = np.concatenate([total.encode(ordinary(rng, total.model)) for _ in range(2)])
            if rare == "scale" and form.scale:
                memory = sent[0, 64:].view(np.uint8 if form.scale == E8M0 else np.uint16)
                memory[10 * 8192 // form.block] = 0xFD if form.scale == E8M0 else 0x7F00
                memory[12 * 8192 // form.block :][:2] = [0, 1] if form.scale == E8M0 else [0x0001, 0xBF80]
            if rare == "codes":
                codes = sent[0, total.model.codes_at :]
                codes[5 * 8192 + 1000] = 0x7F  # in 8 bits the NaN of MXFP8, in the second half of 1024 elements
                codes[10240:12288] = rng.integers(0, 256, 2048)
            for handle, counts in ((total, (2, 3)), (mean, (1, 3, 8))):
                for count in counts:
                    handle.reduce(np.concatenate([sent] * 4)[:count])
                    handle.compare_all()
    with Checked(place, **options) as handle:
        sent[1, 4] ^= 1  # changes the header
        handle.reduce(sent)
        handle.compare_all()
    with Checked(place, **options) as handle:
        # All elements are zero: a kernel that reads beyond the end finds nothing that looks wrong.
        handle.reduce(handle.encode([np.zeros(n, f32)]).repeat(2, axis=0))
        handle.compare_all()


@each_codec
def a_corrupt_header_is_told_of_a_chunk_without_elements(place, codec):
    for error in (None, "float32"):
        with Checked(place, codec=codec, segments=[0], error=error, server=0) as handle:
            sent = handle.encode(ordinary(np.random.default_rng(1), handle.model)).copy()
            sent[0, 4] ^= 1
            handle.reduce(sent)
            handle.compare_all()


@each_codec
def means_of_the_smallest_numbers(place, codec):
    """Reduces powers of two of payloads, for which kernels divide the scales, and 256, for which they do not."""
    form, rng = FORMATS[codec], np.random.default_rng(13)
    values = VALUES[codec]
    codes = rng.choice(np.flatnonzero(np.isfinite(values) & (np.abs(values) < 1e3)), 2 * form.block)
    scales = {None: [None], E8M0: [0, 1, 226]}.get(form.scale, [0x0001, 0x0080, 0x717F])
    packed = np.frombuffer(block_model.packed(codec, codes), np.uint8)
    for error in (None, "float32"):
        with Checked(place, codec=codec, segments=[codes.size], error=error, server=0, reduction=MEAN) as handle:
            sent = handle.encode(ordinary(rng, handle.model)).copy()
            sent[0, handle.model.codes_at :][: packed.size] = packed
            for scale in scales:
                if scale is not None:
                    memory = np.full(handle.model.blocks, scale, np.uint8 if form.scale == E8M0 else np.uint16).view(np.uint8)
                    sent[0, 64 : 64 + memory.size] = memory
                for count in (1, 2, 64, 128, 256):
                    handle.reduce(np.repeat(sent, count, axis=0))
                    handle.compare_all()


# --- numbers ----------------------------------------------------------------------------------------------------------


@each_codec
def every_exponent_and_every_boundary_of_scales(place, codec):
    c = all_magnitudes(codec, 5)
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            g = narrow(c, dtype)
        with Checked(place, codec=codec, segments=[c.size], error="bfloat16", values=dtype) as handle:
            handle.decode(handle.encode([g]))
            handle.compare_all()


WRONG = (np.nan, -np.nan, np.inf, -np.inf, 2.0**127, -(2.0**127), 3.4e38)


@each_codec
def blocks_that_are_not_finite(place, codec):
    """Tests one wrong element in any place of a block, under each policy, with and without errors, raw and not."""
    block, rng = FORMATS[codec].block, np.random.default_rng(11)
    n = 2 * block + 3
    for policy in (0, ZERO, TRANSACTIONAL):
        for error in ("float32", None):
            for wrong in WRONG:
                options = dict(codec=codec, segments=[n, 9], raw=[0, 1], error=error, nonfinite=policy, server=0)
                with Checked(place, **options) as handle:
                    handle.encode(ordinary(rng, handle.model))
                    if policy == TRANSACTIONAL:
                        handle.commit()
                    handle.flags()
                    g = ordinary(rng, handle.model)
                    g[0][block + int(rng.integers(0, block))] = wrong
                    if rng.random() < 0.5:
                        g[1][int(rng.integers(0, 9))] = wrong
                    payload = handle.encode(g)
                    got = handle.decode(payload)[0]
                    handle.decode(payload, "bfloat16")
                    assert np.isnan(got[block : 2 * block]).all() != (policy == ZERO)
                    assert np.isfinite(got[:block]).all() and np.isfinite(got[2 * block :]).all()
                    handle.reduce(np.stack([payload[0]] * 3))
                    if policy == TRANSACTIONAL:
                        handle.commit()
                        assert handle.model.flags == NONFINITE | TAKEN_BACK
                    else:
                        assert handle.model.flags & NONFINITE
                    handle.compare_all()
                    assert np.isfinite(handle.model.errors(0)).all() and np.isfinite(handle.model.errors(1)).all()
                    payload = handle.encode(ordinary(rng, handle.model))
                    assert np.isfinite(handle.decode(payload)[0]).all()
                    handle.compare_all() if policy != TRANSACTIONAL else handle.flags()


@each_codec
def factors_make_what_is_not_finite(place, codec):
    for policy in (0, ZERO):
        for factors in ((np.inf, None), (np.nan, 0.5), (None, np.inf), (1e38, 1e38), (None, np.nan)):
            with Checked(place, codec=codec, segments=[70, 3], raw=[0, 1], nonfinite=policy) as handle:
                rng = np.random.default_rng(4)
                handle.encode(ordinary(rng, handle.model))
                handle.decode(handle.encode(ordinary(rng, handle.model), *factors))
                handle.compare_all()


@each_codec
def sums_that_are_beyond_float32(place, codec):
    """Sums finite payloads, so that the sum, also of a raw element, is not finite, or not below 2^127."""
    for policy in (0, ZERO):
        for size in (1.5e38, 0.9e38, 1.6e38):
            options = dict(codec=codec, segments=[40, 3], raw=[0, 1], reduction=SUM, nonfinite=policy)
            with Checked(place, **options, server=0) as handle:
                sender = model_of(**{**options, "error": None})
                sent = [sender.encode([np.full(40, size * 0.9, f32), np.full(3, size, f32)]) for _ in range(2)]
                handle.reduce(np.stack(sent))
                handle.compare_all()


# --- payloads of other senders ----------------------------------------------------------------------------------------


@each_codec
def a_header_with_one_bit_changed_is_corrupt(place, codec):
    rng, options = np.random.default_rng(2), dict(segments=[64, 0, 300, 7], raw=[0, 0, 0, 1], n_chunks=2, server=0)
    with Checked(place, codec=codec, **options) as handle:
        payload = handle.encode(ordinary(rng, handle.model))
        for at in range(64):
            changed = payload.copy()
            changed[at % 2, at] ^= 0x10
            assert handle.model.is_corrupt(changed[at % 2], at % 2), at
            handle.decode(changed)
            handle.decode(changed, add=True)
            handle.reduce(np.stack([payload[0], changed[0]]))
        for flags in (CORRUPT, 8, 1 << 31):
            changed = payload.copy()
            changed[0, 28:32] |= np.frombuffer(struct.pack("<I", flags), np.uint8)
            handle.decode(changed, "float16")
            handle.reduce(np.stack([changed[0], payload[0]]))
        handle.compare_all()
        changed = payload.copy()
        changed[1, 28] |= NONFINITE  # the sender's flag
        handle.decode(changed)
        assert handle.flags() == NONFINITE


@each_codec
def every_code_and_any_scale_is_a_number(place, codec):
    """Tests also codes that encode never writes: -128 of INT8, -8 of INT4, the NaNs of e4m3, any bfloat16."""
    form, rng = FORMATS[codec], np.random.default_rng(12)
    count = len(VALUES[codec])
    codes = np.concatenate([np.arange(count), rng.integers(0, count, -count % form.block)])
    scales = [None]
    if form.scale == E8M0:
        scales = [0, 1, 2, 126, 127, 128, 253, 254, 255]
    elif form.scale:
        scales = [0x3F80, 0x0000, 0x8000, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0x7F7F, 0x007F]
    for policy in (0, ZERO):
        for error in ("float32", None):
            options = dict(codec=codec, segments=[codes.size, 4], raw=[0, 1], nonfinite=policy, error=error)
            with Checked(place, **options, server=0, reduction=SUM) as handle:
                payload = handle.encode(ordinary(rng, handle.model))
                u = handle.model.blocks
                for scale in scales:
                    sent = payload.copy()
                    if scale is not None:
                        memory = np.full(u, scale, np.uint8 if form.scale == E8M0 else np.uint16).view(np.uint8)
                        sent[0, 64 : 64 + memory.size] = memory
                    packed = np.frombuffer(block_model.packed(codec, codes), np.uint8)
                    sent[0, handle.model.codes_at :][: packed.size] = packed
                    sent[0, handle.model.raw_at :][:16] = f32([np.nan, -np.inf, -0.0, 1e-45]).view(np.uint8)
                    for dtype in DTYPES:
                        handle.decode(sent, dtype, divisor=3, factor=0.5)
                    handle.decode(sent, add=True)
                    handle.reduce(np.stack([sent[0], payload[0], sent[0]]))
                    handle.reduce(sent)
                    handle.compare_all()


@each_codec
def what_fills_up_is_not_looked_at(place, codec):
    """Changes padding: scales and codes of absent blocks, codes of absent elements, raw elements behind the last."""
    rng, options = np.random.default_rng(13), dict(segments=[33, 70, 5], raw=[0, 0, 1], n_chunks=3, server=2)
    with Checked(place, codec=codec, error=None, **options) as handle:
        model = handle.model
        payload = handle.encode(ordinary(rng, model))
        values = handle.decode(payload)
        # Fill everything but the headers with 0xff, and put back the bytes that belong to present elements.
        filled = payload.copy()
        filled[:, 64:] = 0xFF
        for k in range(3):
            there = present(model, k)
            filled[k, there] = payload[k, there]
        for one, other in zip(handle.decode(filled), values):
            same(one, other, "values")
        same(handle.reduce(filled[2:3]), handle.reduce(payload[2:3]), "reduced chunk")
        assert handle.flags() == 0


def present(model, chunk):
    """Returns the places of the bytes of a chunk, behind the header, that belong to present elements."""
    form, at = model.format, []
    for i in range(len(model.segments)):
        part = model.part(i, chunk)
        if part.stop <= part.start:
            continue
        if model.raw[i]:
            first = model.first_raw[i] + part.start - chunk * model.raws
            at.append(model.raw_at + 4 * first + np.arange(4 * (part.stop - part.start)))
            continue
        block = model.first_block[i] + part.start // form.block - chunk * model.blocks
        blocks = -(-(part.stop - part.start) // form.block)
        at.append(64 + block * form.scale_bytes + np.arange(blocks * form.scale_bytes))
        # An odd last code of 4 bits shares its byte with an absent one.
        at.append(model.codes_at + block * form.block * form.bits // 8 + np.arange(-(-(part.stop - part.start) * form.bits // 8)))
    return np.concatenate([np.zeros(0, int), *at]).astype(int)


# --- states and errors ------------------------------------------------------------------------------------------------


@each_codec
def states_go_out_and_in(place, codec):
    rng = np.random.default_rng(14)
    options = dict(codec=codec, segments=[1025, 5, 0, 70], raw=[0, 1, 0, 0], n_chunks=2, server=1, error="bfloat16")
    with Checked(place, **options) as one, Checked(place, **options) as other:
        for step in range(4):
            here, there = (one, other) if step % 2 else (other, one)
            payload = here.encode(ordinary(rng, here.model))
            here.reduce(payload[1:2])
            state = here.state()
            changed = state.copy()
            # Padding of units is never read as an error: 1025 elements of 2 bytes are in units of 2048.
            changed[256 + 2050 : 256 + 4096] = 0xFF
            call("gc_codec_state_in", there.handle, place.put(changed).view, None)
            there.model.worker, there.model.reducer = here.model.worker, here.model.reducer
            there.compare_all()


@each_codec
def states_of_another_codec_are_corrupt(place, codec):
    with Checked(place, codec=codec, segments=[100, 3], raw=[0, 1]) as handle:
        handle.encode([np.ones(100, f32), np.ones(3, f32)])
        state = handle.state()
        for at in range(56):
            changed = state.copy()
            changed[at] ^= 0x80
            status = lib.gc_codec_state_in(handle.handle, place.put(changed).view, None)
            assert status == (Status.OK if handle.on_cuda else Status.CORRUPT), at
            if handle.on_cuda:
                handle.model.note(CORRUPT)
                handle.flags()
        handle.compare_all()
        # No policy keeps this error.
        changed = state.copy()
        changed[256:260] = f32([np.nan]).view(np.uint8)
        status = lib.gc_codec_state_in(handle.handle, place.put(changed).view, None)
        assert status == (Status.OK if handle.on_cuda else Status.CORRUPT)
        if handle.on_cuda:
            handle.model.worker[0][0] = 0
            handle.model.note(NONFINITE)
        handle.compare_all()


@each_codec
def errors_come_in_rounded_and_finite(place, codec):
    rng = np.random.default_rng(15)
    wrong = f32([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0])
    for error in ("float32", "bfloat16"):
        options = dict(codec=codec, segments=[10, 2000, 7], raw=[0, 0, 1], error=error, n_chunks=2, server=1)
        with Checked(place, **options) as handle:
            model = handle.model
            handle.encode(ordinary(rng, model))
            halves = [rng.standard_normal(model.errors(k).size).astype(f32) for k in (0, 1)]
            for given in (halves, (halves[0], None), (None, halves[1])):
                handle.errors_in(*given)
                handle.compare_all()
            for half in halves:
                half[rng.integers(0, half.size, 40)] = rng.choice(wrong, 40)
                half[: wrong.size] = wrong
            handle.errors_in(*halves)
            handle.compare_all()
            halves[0][-7:] = np.nan  # errors of the raw segment
            halves[0][:-7] = 0
            handle.errors_in(halves[0])
            assert handle.flags() == 0
            handle.decode(handle.encode(ordinary(rng, model)))
            handle.compare_all()
