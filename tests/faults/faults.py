"""At most 60 faults that tests must notice. They are where a fault crosses a language or a file format (kernels,
layouts of structs, the headers, Python, packages), and where ranks of several nodes must compute alike. cargo-mutants
(tests/mutants.sh) plants faults in the rest of the Rust code.

The text that a fault replaces occurs once in its file. `run.py --check` reports a text that is missing."""

from dataclasses import dataclass

from commands import does_not_build, gpu, python, script, spec


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    path: str
    old: str
    new: str
    tests: tuple
    tier: str = "quick"


FAULTS = []


def fault(name, kind, path, old, new, *tests, tier="quick"):
    FAULTS.append(Fault(name, kind, path, old, new, tests, tier))


# ---- One-shot and two-shot all-reduce

fault("kernels: every chunk counts as the first chunk", "valid data refused", "kernels/blocks_reduce.cuh",
      "call.apart, tile.chunk, lane", "call.apart, codec.chunk, lane",
      spec("test_comm", "one_shot_and_two_shot", "cuda and group"))

fault("kernels: both barriers of a launch have one number", "ranks in different exchanges",
      "kernels/blocks_two_shot.cuh", "SIGNAL | WAIT).next()", "SIGNAL | WAIT)",
      python("test_block_peers", "two_exchanges_are_one_launch"))
fault("kernels: a launch does not flag non-finite values", "flag lost", "kernels/blocks_two_shot.cuh",
      "(nonfinite ? +NONFINITE : 0u)", "0u",
      python("test_block_peers", "two_exchanges_of_one_launch"))

# ---- Nodes

fault("kernels: a node uses the factor of its first rank", "wrong bits", "kernels/nodes.cuh",
      "reinterpret_cast<const float *>(block)[FACTOR_WORD]", "reinterpret_cast<const float *>(call.blocks)[FACTOR_WORD]",
      spec("test_nodes", "random_worlds", "cuda and group"))

# ---- Block codecs

fault("kernels: errors of another world size are not cut to length", "errors of other elements", "kernels/state.cuh",
      "const bool cuts = codec.half == SERVER && call.row != 0;", "const bool cuts = false;",
      spec("test_comm", "errors_are_kept_in_a_world_of_any_size", "cuda and group"))
fault("kernels: a shard without elements is ignored", "wrong half of a step", "kernels/blocks_reduce.cuh",
      "const bool to_shard = !KEPT && !PEERS && call.shard != 0;", "const bool to_shard = call.shard != 0 && call.dst != nullptr;",
      spec("test_comm", "the_two_halves_with_the_same_shard", "cuda and group"))
fault("kernels: raw elements are added from the last payload on", "wrong order of a sum", "kernels/blocks_reduce.cuh",
      "*reinterpret_cast<const float *>(from + r * call.apart)",
      "*reinterpret_cast<const float *>(from + (many - 1 - r) * call.apart)",
      spec("test_codec", "test_block_codecs", "int4 and cuda"))
fault("kernels: scales are divided by too many payloads", "wrong bits of small numbers",
      "kernels/blocks_reduce.cuh", "divides = number > 128 ||", "divides = number > 4096 ||",
      spec("test_codec", "test_block_codecs", "mxfp8 and cuda"))
fault("kernels: a warp adds codes that are not copied yet", "data race of lanes", "kernels/blocks_reduce.cuh",
      "        wait_for_groups<S::PAYLOADS - 1>();\n        __syncwarp();\n", "        wait_for_groups<S::PAYLOADS - 1>();\n",
      spec("test_codec", "test_block_codecs", "mxfp8 and cuda"))
fault("kernels: the last payload of a full ring is lost", "payload lost", "kernels/blocks_reduce.cuh",
      "if (left >= S::PAYLOADS) stage(before);", "if (left > S::PAYLOADS) stage(before);",
      spec("test_codec", "test_block_codecs", "mxfp8 and cuda"))
fault("kernels: a corrupt payload is added", "payload believed", "kernels/blocks_lanes.cuh",
      "const bool goes_on = are_right();", "const bool goes_on = are_right() || true;",
      spec("test_codec", "test_block_codecs", "mxfp4 and cuda"))
fault("kernels: a ring is reused before its copies are done", "data race of a lane with itself",
      "kernels/blocks_lanes.cuh", "    wait_for_groups<0>();  // the ring will be reused\n", "",
      spec("test_codec", "test_block_codecs", "mxfp4 and cuda"))
fault("kernels: lanes of a block do not compare magnitudes", "wrong bits",
      "kernels/blocks_lanes.cuh", "largest_of_lanes<LANES>(most)", "most",
      spec("test_codec", "test_block_codecs", "int8 and cuda"))
fault("kernels: lanes add the code of NaN as a number", "wrong bits", "kernels/blocks_lanes.cuh",
      "rare.look_at(row);", "", spec("test_codec", "test_block_codecs", "mxfp8 and cuda"))
fault("kernels: a block below 2^-100 has a scale", "wrong bits at an edge", "include/gradcodec/device.cuh",
      "most < 0x0d800000u ? 0 : ", "most < 0x0d000000u ? 0 : ", python("test_device_functions", "lanes_quantize"))

# ---- Kernels

fault("kernels: errors are truncated to bfloat16", "wrong bits", "kernels/state.cuh",
      "= to_bf16(c);", "= static_cast<unsigned short>(__float_as_uint(c) >> 16);",
      spec("test_codec", "random_codecs", "bits and cuda"))

# ---- Wrappers of the C functions

HPP, CLIENT = "include/gradcodec/gradcodec.hpp", "python/gradcodec"
OF_HPP = python("test_calls", "gradcodec_hpp", library=False)
OF_FUNCTIONS = python("test_calls", "a_function_of_the_client", library=False)
OF_METHODS = python("test_calls", "a_method_of_the_client", library=False)
fault("Python: a reused call accepts arrays of another device", "wrong device", f"{CLIENT}/_reading.py",
      "(its, here) != (kind, device)", "kind is None",
      python("test_reading", "a_kernel_that_runs_again", fakes=False))
for name, old, new in (
    ("codec_encode", "value_factor.get(), error_factor.get(),\n                                  payload",
     "error_factor.get(), value_factor.get(),\n                                  payload"),
    ("allreduce_run", "value_factor.get(),\n                                   error_factor.get(), stream",
     "error_factor.get(),\n                                   value_factor.get(), stream"),
    ("codec_errors_in", "gc_codec_errors_in(codec.get(), worker.get(), server.get()",
     "gc_codec_errors_in(codec.get(), server.get(), worker.get()"),
    ("comm_from_nccl_id", "id.data(), rank, world_size,", "id.data(), world_size, rank,"),
    ("comm_hierarchical", "(intra_node.get(), inter_node.get()", "(inter_node.get(), intra_node.get()"),
    ("share_send", "(tensor.get(), socket, flags,", "(tensor.get(), socket, 0 * flags,"),
    ("comm_open_peers", "device, bytes, timeout_ms, &out", "device, bytes, 0 * timeout_ms, &out"),
):
    fault(f"gradcodec.hpp: an argument of {name}", "swapped or lost argument", HPP, old, new, OF_HPP)
for module, name, old, new, test in (
    ("_codecs", "Codec.encode", "others = value_factor, error_factor, payload\n",
     "others = error_factor, value_factor, payload\n", OF_METHODS),
    ("_comms", "AllReduce.run", "others = value_factor, error_factor\n",
     "others = error_factor, value_factor\n", OF_METHODS),
    ("_library", "GradCodec.nccl_world",
     '(_int32("rank", rank), _int32("world_size", world_size))\n        self.lib.gc_comm_from_nccl_id',
     '(_int32("world_size", world_size), _int32("rank", rank))\n        self.lib.gc_comm_from_nccl_id', OF_FUNCTIONS),
    ("_share", "GradCodec.share_send", '_whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms"',
     '0 * _whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms"', OF_FUNCTIONS),
):
    fault(f"Python: an argument of {name}", "swapped or lost argument", f"{CLIENT}/{module}.py", old, new, test)
for name, module, old, new, test in (
    ("a call without tensors runs on the legacy stream", "_codecs", "frame.home or self._home", "None", "a_call_without_tensors"),
    ("a named stream does not wait for arrays", "_reading", "if current is not None and stream is not None and",
     "if False and", "a_named_stream_waits"),
    ("a second framework is not waited for", "_reading", "(kind, number) != first or current != stream", "False", "of_two_frameworks"),
    ("a read-only array is written to", "_reading", "if written and not flags.writeable:", "if False:", "read_only_outputs"),
    ("strides within an element are accepted", "_reading", "            if rest:\n", "            if False:\n", "arrays_that_only_dlpack"),
):
    fault(f"Python: {name}", "array read wrongly", f"{CLIENT}/{module}.py", old, new, python("test_reading", test, fakes=False))

# ---- Installed files

FILES = python("test_installed", "every_file_is_installed", fakes=False)
WHEEL = python("test_installed", "every_file_is_in_the_wheel", fakes=False)
fault("install without the C++ headers", "missing file", "Makefile",
      "install -m 644 include/gradcodec/* $(INTO_INCLUDE)", "install -m 644 include/gradcodec/*.h $(INTO_INCLUDE)", FILES)
fault("a wheel without py.typed", "missing file", "packaging/wheel.py",
      'package / "hook.cpp", package / "py.typed"]', 'package / "hook.cpp"]', WHEEL)

# ---- Lost ranks

fault("kernels: a missing rank is reported as corrupt data", "lost rank", "kernels/finish.cuh",
      "if (broken && found & CORRUPT) found", "if (broken && found & 0) found",
      python("test_peers", "a_missing_rank_gives_non_finite"))

fault("kernels: the last vector is stored beyond the end", "wrong bits at a tail", "kernels/blocks_decode.cuh",
      "if (at + N <= count) reinterpret_cast", "if (at < count) reinterpret_cast",
      spec("test_codec", "block"))
fault("kernels: a rank writes blocks after its timeout", "lost rank", "kernels/blocks.cuh",
      "return slot.peers->broken ? 0 : PEERS", "return PEERS",
      python("test_block_peers", "after_its_timeout"))
fault("kernels: one-shot calls use the same area each time", "data race of ranks", "kernels/blocks_one_shot.cuh",
      "const u64 turn = barrier.number % 2 * call.turn;", "const u64 turn = 0 * call.turn;",
      python("test_block_peers", "a_fast_rank"))
fault("kernels: a rank sets its flag before its blocks are done", "data race of kernels", "kernels/blocks_together.cuh",
      "last = all % HAS_FOUND == gridDim.x;", "last = all % HAS_FOUND == 1;",
      python("test_block_peers", "two_shot_calls_alternate", limit=120))
fault("kernels: one-shot sums a chunk in the order of another", "wrong order of ranks",
      "kernels/blocks_one_shot.cuh", "sum_payloads<C>(from, piece, tile.chunk + piece.later,", "sum_payloads<C>(from, piece, tile.chunk,",
      python("test_block_peers", "two_shot_calls_alternate", limit=120))

# ---- Kernels

CODECS = spec("test_codec", "random_codecs", "bits and cuda")
COPIED = spec("test_copies", "any_layout_and_any_cast", "other")
fault("kernels: the lines and bytes of a tile are swapped", "swapped fields of a layout", "kernels/tiled.cuh",
      "unsigned log_lines, log_bytes;", "unsigned log_bytes, log_lines;",
      does_not_build("build/tests/driver_kernels.o", "kernels/layout.cuh", "LAYOUT_gc_strided_plan"))
fault("kernels: across and width of signs are swapped", "swapped fields of a layout", "kernels/signs.cu",
      "gc_divisor across, width;", "gc_divisor width, across;",
      does_not_build("build/tests/driver_kernels.o", "kernels/layout.cuh", "LAYOUT_gc_scattered_signs"))
COMPILED = python("test_compiled", "tiles_of_rows")
fault("kernels: a tile in shared memory is not transposed", "wrong element of a tile", "kernels/compiled_tile.cuh",
      "tile[row(r) * width + column()]", "tile[column() * width + row(r)]", COMPILED)
fault("kernels: a tile has rows beyond the last row", "wrong element of a tile", "kernels/compiled_tile.cuh",
      "column() < columns && row(round) < rows", "column() < columns", COMPILED)
fault("kernels: the first thread adds the rest of a row", "wrong order of a sum",
      "kernels/compiled_reduction_short.cuh", "if (_gc_along == _gc_units % _gc_height) {",
      "if (_gc_along == 0) {",
      python("test_compiled", "does_not_depend_on_where"))
fault("kernels: a commit without a pending step keeps flags", "stale state", "kernels/codec.cuh",
      "if (control.pending == 0) {\n        control.since = 0;", "if (control.pending == 0) {", CODECS)
fault("kernels: float64 to bfloat16 is rounded twice", "wrong bits", "kernels/convert.cuh",
      "to_bf16(to_odd(double_of(v)))", "to_bf16(__double2float_rn(double_of(v)))", COPIED)
fault("kernels: bytes of a chunk are sent to the wrong rank", "wrong order of ranks", "kernels/step.cuh",
      "tile.chunk + later, copy)", "tile.chunk + (later != 0), copy)",
      spec("test_peers_cases", "bytes_match_the_model", ""))
fault("kernels: blocks are sent to the wrong rank", "wrong order of ranks", "kernels/blocks_emit.cuh",
      "target.base(blocks.places.first + piece.later, copy,", "target.base(blocks.places.first, copy,",
      spec("test_peers_cases", "bytes_match_the_model", ""))
fault("kernels: raw elements are sent to the wrong rank", "wrong order of ranks", "kernels/blocks.cuh",
      "target.base(places.first + later, copy, chunk)", "target.base(places.first, copy, chunk)",
      spec("test_peers_cases", "bytes_match_the_model", ""))
fault("kernels: a float32 of -0.0 skips a step", "wrong bits at an edge", "kernels/state.cuh",
      "skip = *static_cast<const float *>(call.skip) != 0;", "skip = *static_cast<const int *>(call.skip) != 0;", CODECS)
fault("kernels: the sum of many payloads lacks the first ones", "payload lost", "kernels/reduce.cuh",
      "if (payloads.many > Group::MOST) load_sums(sums, earlier, row, lane);", "", CODECS)
fault("kernels: errors are used before they are copied", "data race of a lane with itself", "kernels/reduce.cuh",
      "        wait_for_groups<0>();\n", "", CODECS)
fault("kernels: a non-finite value is kept as an error", "flag lost", "kernels/step.cuh",
      "if (!__all_sync(WHOLE_WARP, is_finite(magnitude))) {", "if (false) {", CODECS)
fault("kernels: a value rounded to -0 counts as negative", "wrong bits at an edge", "kernels/step.cuh",
      "!Form::GIVES_MINUS_ZERO && K::SIZE != 2;", "!Form::GIVES_MINUS_ZERO;", CODECS)
fault("kernels: rounds of a sum are added in reverse order", "wrong order of a sum", "kernels/sum.cuh",
      "for (unsigned distance = ROUNDS / 2; distance > 0; distance /= 2) {",
      "for (unsigned distance = 1; distance < ROUNDS; distance *= 2) {", python("test_device_functions", "sums_of_lanes"))

# ---- More of each kind

fault("gradcodec.h: a constant has another value", "interface", "include/gradcodec.h",
      "GC_STATUS_TIMEOUT = 41", "GC_STATUS_TIMEOUT = 42", script("tests/abi/abi.py", "cc", "include"))
fault("kernels: a launch does not wait for the launch before it", "data race of kernels", "kernels/finish.cuh",
      "    wait_for_launch_before();\n", "", gpu("test_codec"), tier="gpu")
fault("kernels: a sum is written where other threads read", "data race of kernels", "kernels/sum.cuh",
      "// All threads have read the old partial sums.\n        __syncthreads();", "", gpu("sanitize"), tier="gpu")
