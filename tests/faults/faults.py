"""Faults that tests have to notice, one place each: the text that is replaced stands once in its file.

A text is as short as it can be, and one that is not there any more is found by `run.py --check`."""

from dataclasses import dataclass

from commands import c, does_not_build, gpu, loom, program, python, rust, script


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


# ---- Bits and numbers

FLAT = "src/backend/cpu/bits/flat.rs"
CASTS = "src/backend/cpu/copy/casts.rs"
LENGTHS = python("test_bits", "every_length_around_a_vector", fakes=False)

fault("the last bits of a row are one off", "wrong bits at a tail", FLAT,
      "(word.swap_bytes() << (64 - rest)).swap_bytes()", "(word.swap_bytes() << (63 - rest)).swap_bytes()", LENGTHS)
fault("a tail reads the word before it wrong", "wrong bits at a tail", FLAT,
      "before >> rest | last << (64 - rest)", "before >> rest | last << (63 - rest)", LENGTHS)
fault("2^31 does not saturate as int32", "wrong bits at an edge", CASTS,
      "self >= ABOVE", "self > ABOVE", python("test_copy", "casts_are_what_numpy_says", "float32-int32", fakes=False))

# ---- Codecs: state, errors, plans

CODEC = "src/backend/cpu/codec/mod.rs"
STATE = "src/backend/cpu/codec/state.rs"
DECODE = "src/backend/cpu/codec/decode.rs"
REDUCE = "src/backend/cpu/codec/reduce.rs"
SUM = "src/backend/cpu/codec/sum.rs"

fault("a call of another size has the tiles of the one before", "stale plan", CODEC,
      "(self.worker_tiles, self.server_tiles) = (Tiles::new", "let _ = (Tiles::new",
      python("test_comm", "fewer_tiles_after_one_of_more", fakes=False))
fault("a call of another size has the chunks of the one before", "stale plan", "src/comm/buffers.rs",
      "[self.world, stride], [stride]", "[self.world, self.most], [stride]",
      python("test_comm", "a_reserved_communicator", fakes=False))
fault("a commit keeps the state before it", "error lost", CODEC,
      "half.valid = 1 - half.valid", "half.valid = 1 * half.valid",
      python("test_comm", "each_half_of_a_step_is_committed", fakes=False))
fault("errors out forget what the signs have sent", "error lost", STATE,
      "kept - signed(scale, kept)", "kept", rust("src/backend/cpu/codec/tests/steps.rs", "errors_go_out_and_in"))
fault("the mean of errors is their sum", "error written twice", STATE,
      "sum + of_row(number) / rows as f32", "sum + of_row(number)",
      python("test_comm", "errors_go_on_in_a_world_of_any_size", fakes=False))
fault("the caller's errors go though something is not finite", "error written twice", STATE,
      "if self.flags & NONFINITE == 0 {", "if self.flags & NONFINITE < 8 {",
      python("test_comm", "what_is_not_finite_on_one_rank", fakes=False))
fault("a step that may be taken back is written over the state", "torn state", CODEC,
      "if self.transactional { 1 - half.valid }", "if false { 1 - half.valid }",
      python("test_comm", "an_infinity_on_one_rank_takes_the_step_back", fakes=False))
fault("ranks of another policy get a handle", "refusal lost", "src/comm/allreduce.rs",
      "rules.scale as u8, rules.policy as u8", "rules.scale as u8, rules.policy as u8 & 0",
      python("test_comm", "ranks_with_other_options", fakes=False))

fault("memory is freed before what may use it is aborted", "a lost rank", "src/comm/allreduce.rs",
      "communicator: Arc<Communicator>,\n    shard_elements: i64,\n    parts: InExchanges<Lock<Parts>>,",
      "parts: InExchanges<Lock<Parts>>,\n    shard_elements: i64,\n    communicator: Arc<Communicator>,",
      python("test_nccl", "a_communicator_is_aborted_before_memory_is_freed"))

# ---- One exchange

PLAN = "src/plan/codec.rs"
ONCE = "test_one_exchange"
STRANGER = python(ONCE, "a_payload_of_a_stranger", fakes=False)

fault("payloads of just the most bytes are not exchanged whole", "wrong choice", PLAN,
      "bytes <= most)", "bytes < most)",
      rust(PLAN, "ranks_exchange_once_if_nothing_is_kept"))
fault("votes in turn exchange once", "wrong choice", PLAN,
      "is_none() && self.rules.kind != Kind::Sign", "is_none() && self.rules.kind != Kind::Bf16",
      python(ONCE, "what_keeps_something_or_votes", fakes=False))
fault("ranks exchange once though one of them cannot", "ranks in different exchanges", "src/comm/allreduce.rs",
      "if !records.iter().all(", "if !records.iter().any(",
      python(ONCE, "where_one_rank_cannot", fakes=False))
fault("all chunks that are reduced at once have the number of the first", "wrong bytes", REDUCE,
      "number + index, flags, scale_of", "number, flags, scale_of",
      python(ONCE, "the_bytes_are_those_of_two_exchanges", fakes=False))
fault("of several chunks only the first is checked", "refusal lost", REDUCE,
      "chunks::check(plan, who, chunk, number + index)", "chunks::check(plan, who, received.at(payload), number)", STRANGER)
fault("a chunk that has nothing but a header is not looked at", "refusal lost", "src/backend/cuda/codec/layout.rs",
      "tile.chunk as usize + 1)..chunks.end", "tile.chunk as usize + 1)..chunks.start + 1",
      rust("src/backend/cuda/codec/layout.rs", "parts_of_all_chunks_lie_in_their_own"))
fault("a kernel takes every chunk for the first", "refusal of what is right", "kernels/blocks_reduce.cuh",
      "call.apart, tile.chunk, lane", "call.apart, codec.chunk, lane",
      python("test_one_exchange_driver", "of_two_exchanges_on_one_card", "group"))
fault("buffers of peer memory have no room for whole payloads", "wrong sizes", "src/comm/allreduce.rs",
      "if plan.exchanges_once(true) { plan.payload_bytes() }", "if plan.exchanges_once(true) { plan.stride }",
      python("test_one_exchange_driver", "without_room_for_whole_payloads"))

fault("the second meeting of a launch is the first once more", "ranks in different exchanges", "kernels/blocks_twice.cuh",
      "SPEAK | LISTEN).next()", "SPEAK | LISTEN)",
      python("test_block_peers", "two_exchanges_are_one_launch"))
fault("what all ranks get of a launch says nothing of what is not finite", "flag lost", "kernels/blocks_twice.cuh",
      "(nonfinite ? +NONFINITE : 0u)", "0u",
      python("test_block_peers", "two_exchanges_of_one_launch"))

# ---- Block codecs

BLOCKS = "src/backend/cpu/codec/blocks"
fault("a scale of a block is rounded down", "wrong bits", f"{BLOCKS}/coding.rs",
      "(largest / $most).to_bits() + 0xffff", "(largest / $most).to_bits()",
      python("test_block_codec", "test_case", "every_exponent", fakes=False))
fault("a scale that is a denormal is rounded up at the tie", "wrong bits at an edge", f"{BLOCKS}/coding.rs",
      "if exponent > 0 { 0 } else { 0x40_0000 }", "if exponent > 0 { 0 } else { 0x3f_ffff }",
      python("test_block_codec", "test_case", "every_exponent", fakes=False))
fault("a sum is divided as a mean is", "wrong bits", f"{BLOCKS}/reduce.rs",
      "plan.rules.reduction == Reduction::Mean", "received.payloads > 1",
      python("test_block_codec", "test_case", "up_to_nine", fakes=False))
fault("a block that is not finite loses its errors", "error lost", f"{BLOCKS}/encode.rs",
      "if is_kept::<E>() { E::load(old.add(kept_at(0)), index) } else { 0.0 }", "0.0",
      python("test_block_codec", "test_case", "blocks_that_are_not_finite", fakes=False))
fault("the last block of a segment has what was there before", "wrong bits at a tail", f"{BLOCKS}/encode.rs",
      "unit.0[count..blocks * block].fill(0.0);", "",
      python("test_block_codec", "test_case", "every_shape", fakes=False))
fault("ranks need not have the same raw segments", "ranks that disagree", "src/plan/codec.rs",
      "run.elements as u64 | u64::from(run.raw) << 63", "run.elements as u64 | u64::from(run.raw) << 63 & 1",
      python("test_comm", "other_options_of_a_block_codec", fakes=False))
fault("raw segments of a codec that has none", "refusal lost", "src/ops/codec/descriptor.rs",
      "if self.raw.is_some() {", "if self.raw.is_some_and(<[u8]>::is_empty) {",
      python("test_client", "names_that_are_none", fakes=False))
fault("a block codec does not look whether its launch was taken", "driver's failure lost", "src/backend/cuda/codec/mod.rs",
      "self.encode_blocks(queue, dtype, call)?;", "let _ = self.encode_blocks(queue, dtype, call);",
      python("test_codec_driver", "in_a_call_on_a_codec", "encode"))
fault("kernels: errors of another world are not cut", "errors of other elements", "kernels/state.cuh",
      "const bool cuts = codec.half == SERVER && call.row != 0;", "const bool cuts = false;",
      python("test_comm_driver", "errors_go_on"))
fault("kernels: a shard without elements is no shard", "wrong half of a step", "kernels/blocks_reduce.cuh",
      "const bool to_shard = !KEPT && !PEERS && call.shard != 0;", "const bool to_shard = call.shard != 0 && call.dst != nullptr;",
      python("test_comm_driver", "halves_on_one_card", "group"))
fault("kernels: raw elements are added from the last payload on", "wrong order of a sum", "kernels/blocks_reduce.cuh",
      "*reinterpret_cast<const float *>(from + r * call.apart)",
      "*reinterpret_cast<const float *>(from + (many - 1 - r) * call.apart)",
      python("test_codec_driver", "test_block_codecs", "int4"))
fault("kernels: scales are divided by more payloads than their exponents have room for", "wrong bits of small numbers",
      "kernels/blocks_reduce.cuh", "divides = number > 128 ||", "divides = number > 4096 ||",
      python("test_codec_driver", "test_block_codecs", "mxfp8"))
fault("kernels: a warp adds codes that another lane has not copied yet", "data race of lanes", "kernels/blocks_reduce.cuh",
      "        wait_for_groups<S::PAYLOADS - 1>();\n        __syncwarp();\n", "        wait_for_groups<S::PAYLOADS - 1>();\n",
      python("test_codec_driver", "test_block_codecs", "mxfp8"))
fault("kernels: the last payload is not copied where a ring is full", "payload lost", "kernels/blocks_reduce.cuh",
      "if (left >= S::PAYLOADS) stage(before);", "if (left > S::PAYLOADS) stage(before);",
      python("test_codec_driver", "test_block_codecs", "mxfp8"))
fault("kernels: what is corrupt is added where lanes have vectors of their own", "payload believed", "kernels/blocks_lanes.cuh",
      "const bool goes_on = are_right();", "const bool goes_on = are_right() || true;",
      python("test_codec_driver", "test_block_codecs", "mxfp4"))
fault("kernels: a ring is used anew while copies are on their way to it", "data race of a lane with itself",
      "kernels/blocks_lanes.cuh", "    wait_for_groups<0>();  // for the ring is used anew\n", "",
      python("test_codec_driver", "test_block_codecs", "mxfp4"))
fault("kernels: lanes that have parts of a block do not hear of each other's largest magnitude", "wrong bits",
      "kernels/blocks_lanes.cuh", "largest_of_lanes<LANES>(most)", "most",
      python("test_codec_driver", "test_block_codecs", "int8"))
fault("kernels: a lane's second vector has the scale of its first", "wrong bits", "kernels/blocks_lanes.cuh",
      "word_from + v * APART);", "word_from);", python("test_codec_driver", "test_block_codecs", "mxfp8"))
fault("kernels: lanes add a code that is no number as one", "wrong bits", "kernels/blocks_lanes.cuh",
      "rare.look_at(row);", "", python("test_codec_driver", "test_block_codecs", "mxfp8"))
fault("lanes are to add three payloads of 4 bits", "hang", "src/backend/cuda/codec/layout.rs",
      "of_4_bits && payloads.is_multiple_of(2)", "of_4_bits", rust("src/backend/cuda/codec/layout.rs", "lanes_serve_what_they_can"))
fault("kernels: a unit in part is taken for a whole one", "out of bounds", "kernels/blocks_lanes.cuh",
      "/ UNIT + WARPS - 1 -", "/ UNIT + WARPS -", python("test_codec_driver", "test_block_codecs", "mxfp4"))
fault("kernels: a block below 2^-100 has a scale", "wrong bits at an edge", "include/gradcodec/device.cuh",
      "most < 0x0d800000u ? 0 : ", "most < 0x0d000000u ? 0 : ", python("test_device_functions", "lanes_quantize"))
fault("only the first chunk of a payload is checked", "payload believed", DECODE,
      "for chunk in 0..plan.n_chunks {", "for chunk in 0..1 {",
      rust("src/backend/cpu/codec/tests/hostile.rs", "a_corrupt_chunk_is_refused"))
fault("a negative scale in a state is believed", "payload believed", STATE,
      "!is_negative(scale) &&", "",
      rust("src/backend/cpu/codec/tests/hostile.rs", "a_state_of_something_else_is_refused"))
fault("units of a tile are added from both ends", "wrong order of a sum", SUM,
      "sums[2 * index] + sums[2 * index + 1]", "sums[index] + sums[2 * left - 1 - index]",
      python("test_codec", "added_in_the_order_of_the_specification", fakes=False))

# ---- Memory, threads, processes

fault("host memory is not freed", "leak", "src/backend/cpu/memory.rs",
      "unsafe { alloc::dealloc(allocated.cast(),", "let _ = unsafe { (allocated.cast::<u8>(),",
      python("test_capsules", "released_memory_is_given_back", fakes=False))
fault("a child keeps what its parent's threads were at", "fork", "src/backend/cpu/pool/mod.rs",
      "Some(start_anew))", "None)", c("fork"))
fault("a child answers for its parent's tensor", "fork", "src/share/sealed.rs",
      "if process == process::id() {", "if process != 0 {", python("test_share", "a_child_that_has_inherited", fakes=False))

# ---- The CUDA driver

fault("memory of another context is used again", "block of another context", "src/backend/cuda/allocator/blocks.rs",
      "block.context == context && (bytes..=capacity)", "(bytes..=capacity)",
      python("test_driver", "kept_in_one_context_is_not_for_another"))
fault("a stall passes for a cuMemFree that waits", "memory in use again", "src/backend/cuda/allocator/mod.rs",
      "true if (spin..spin + SLACK).contains(&elapsed)", "true if elapsed >= spin",
      python("test_driver", "a_thread_that_stalls_does_not_pass"))
fault("a copy that the driver refuses", "driver's failure lost", "src/backend/cuda/queue.rs",
      'driver.check(code, format_args!("cuMemcpyAsync of {bytes} bytes on {}", self.device))', "let _ = code; Ok(())",
      python("test_copy_driver", "every_call_of_the_driver_may_fail_in_a_copy", "pinned"))

# ---- Ranks

fault("a rank that is freed tells nobody", "lost rank", "src/comm/group.rs",
      "self.say_that_it_is_gone();\n        self.wait", "self.wait",
      python("test_comm", "a_rank_that_is_freed", fakes=False, limit=40))
fault("a handle forgets the process that made it", "fork", "src/capi/handle.rs",
      "if *made != forks() {", "if false {", python("test_fork", "in_the_middle", fakes=False, limit=60))
fault("an aborted rank of a group wakes nobody", "lost rank", "src/comm/group.rs",
      "round.gone.get_or_insert(self.rank);\n        self.group.moved.notify_all();", "round.gone.get_or_insert(self.rank);",
      python("test_abort", "creations_over_a_group_end", fakes=False, limit=40))
fault("of two levels the first part is aborted alone", "lost rank", "src/comm/topology.rs",
      "self.links().map(Link::abort)", "self.links().take(1).map(Link::abort)",
      python("test_abort", "of_two_levels", fakes=False, limit=90))
fault("what was aborted exchanges on", "lost rank", "src/comm/link.rs",
      "if self.is_aborted() {", "if false {", python("test_abort", "callback_returns", fakes=False, limit=90))
fault("a function of a transport may abort", "lost rank", "src/comm/communicator.rs",
      "if callbacks::is_inside() {\n            return Err(error!(InvalidArgument, \"comm: a transport's",
      "if false {\n            return Err(error!(InvalidArgument, \"comm: a transport's",
      python("test_abort", "callback_returns", fakes=False, limit=90))
fault("two ranks may have one number", "ranks that disagree", "src/comm/record.rs",
      "if number as usize != rank {", "if false {", python("test_comm", "two_ranks_with_one_number", fakes=False))
fault("nodes may have different numbers of ranks", "ranks that disagree", "src/comm/hierarchical_setup.rs",
      "sizes.find(|&(_, other)| other != ranks)", "sizes.find(|&(_, other)| other > ranks + 99)",
      python("test_hierarchical", "different_numbers", fakes=False, limit=60))
fault("NCCL is polled without end", "lost rank", "src/comm/nccl_library.rs",
      "if begin.elapsed() >= timeout {", "if false {", python("test_nccl", "waited_for_so_long", limit=60))
fault("a communicator of NCCL's that failed is destroyed", "lost rank", "src/comm/nccl.rs",
      "unsafe { if broken {", "unsafe { if broken && false {", python("test_nccl", "aborted"))
fault("blocks of nodes are put in another order", "wrong order of ranks", "src/comm/hierarchical.rs",
      "Permuted { counts: [nodes, ranks], to: [ranks * bytes, bytes], from",
      "Permuted { counts: [nodes, ranks], to: [bytes, nodes * bytes], from",
      python("test_hierarchical", "what_goes_where", fakes=False))

# ---- The pool's threads: every order of their steps

JOB = "src/backend/cpu/pool/job.rs"
# As they stand there; the comment lies between.
STORE_JOB = "pool.job.store((&raw const job).cast_mut().cast(), Ordering::Relaxed);\n        "
STORE_LEFT = "pool.left.store(parts, Ordering::Relaxed);\n        "
WHY = """// A late thread may be counting the last job's tickets. A store cannot come between the reading and the writing
        // of its step, but loom does not know that. A swap costs nothing here.
        """
SWAP = "pool.tickets.swap(u64::from(parts) << 32, Ordering::Release);\n        "
for name, old, new in (
    ("tickets before the job", STORE_JOB + STORE_LEFT + WHY + SWAP, STORE_LEFT + WHY + SWAP + STORE_JOB),
    ("tickets before the count of parts", STORE_LEFT + WHY + SWAP, WHY + SWAP + STORE_LEFT),
    ("tickets that publish nothing", SWAP, SWAP.replace("Release", "Relaxed")),
    ("a ticket that is looked at, and taken in a second step", "self.tickets.fetch_add(1, Ordering::Acquire);",
     "self.tickets.load(Ordering::Acquire); self.tickets.fetch_add(1, Ordering::Acquire);"),
    ("a ticket that nobody checks", "if index >= parts {", "if parts == 0 {"),
    ("a part that is done, but its writes not seen", "fetch_sub(1, Ordering::AcqRel)", "fetch_sub(1, Ordering::Relaxed)"),
    ("a caller that does not wait", "0 => break,\n                left => pool.left.sleep(left),", "_ => break,"),
    ("a caller that nobody wakes", "self.left.wake(1);", ""),
    ("threads that nobody wakes", "pool.bell.wake(others);", ""),
    ("a bell that does not ring", "pool.bell.fetch_add(1, Ordering::Release);", ""),
    ("a failure that is lost", "first.get_or_insert(failure);", "drop((failure, &mut first));"),
    ("a refused caller who gives the threads back", ".then(|| Taken(self))", ".then_some(Taken(self))"),
    ("a child that keeps its parent's tickets", "self.tickets.store(0, Ordering::Relaxed);", ""),
    ("a child whose threads are taken", "self.taken.store(false, Ordering::Relaxed);", ""),
):  # fmt: skip
    fault(f"pool: {name}", "data race of the pool", JOB, old, new, loom())

# ---- Others' files

fault("an NVRTC that was replaced is taken for the one before", "stale plan", "src/compile/search.rs",
      "about.st_mtime as u64, about.st_mtime_nsec as u64]", "0, 0]",
      python("test_kernel_cache", "written_over"))
fault("a kernel is kept beyond the limit of a file's size", "a refusal that writes", "src/compile/cache.rs",
      "LARGEST.min(largest_file())", "LARGEST.max(largest_file().min(0))",
      python("test_kernel_cache", "limit_of_a_files_size"))
fault("an entry of somebody else is used", "payload believed", "src/compile/cache.rs",
      "about.uid() == user &&", "(about.uid() == user || true) &&", python("test_kernel_cache", "somebody_elses_directory"))

# ---- Kernels

fault("errors in bfloat16 are cut off", "wrong bits", "kernels/state.cuh",
      "= to_bf16(c);", "= static_cast<unsigned short>(__float_as_uint(c) >> 16);",
      python("test_codec_driver", "random_codecs"))

# ---- What wraps the C functions

HPP, CLIENT = "include/gradcodec/gradcodec.hpp", "python/gradcodec"
OF_HPP = python("test_calls", "gradcodec_hpp", library=False)
OF_FUNCTIONS = python("test_calls", "a_function_of_the_client", library=False)
OF_METHODS = python("test_calls", "a_method_of_the_client", library=False)
fault("a call that is used again reads arrays of another device", "a wrong device", f"{CLIENT}/_reading.py",
      "(its, here) != (kind, device)", "kind is None",
      python("test_reading", "a_kernel_that_runs_again", fakes=False))
for name, old, new in (
    ("codec_encode", "value_factor.get(), error_factor.get(),\n                                  payload",
     "error_factor.get(), value_factor.get(),\n                                  payload"),
    ("allreduce_run", "value_factor.get(),\n                                   error_factor.get(), stream",
     "error_factor.get(),\n                                   value_factor.get(), stream"),
    ("allreduce_reduce_scatter", "value_factor.get(),\n                                              error_factor.get(), shard",
     "error_factor.get(),\n                                              value_factor.get(), shard"),
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
    ("_comms", "AllReduce.reduce_scatter", "others = value_factor, error_factor, shard\n",
     "others = error_factor, value_factor, shard\n", OF_METHODS),
    ("_library", "GradCodec.nccl_world",
     '(_int32("rank", rank), _int32("world_size", world_size))\n        self.lib.gc_comm_from_nccl_id',
     '(_int32("world_size", world_size), _int32("rank", rank))\n        self.lib.gc_comm_from_nccl_id', OF_FUNCTIONS),
    ("_library", "GradCodec.nccl", '_address("comm", comm), _address("dl_handle", dl_handle),',
     '_address("dl_handle", dl_handle), _address("comm", comm),', OF_FUNCTIONS),
    ("_library", "GradCodec.hierarchical", "create(intra, inter, byref(out))",
     "create(inter, intra, byref(out))", OF_METHODS),
    ("_share", "GradCodec.share_send", '_whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms"',
     '0 * _whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms"', OF_FUNCTIONS),
    ("_library", "GradCodec.vote_signs_into", 'stream, _whole("turn", turn,', 'stream, 0 * _whole("turn", turn,', OF_FUNCTIONS),
):
    fault(f"Python: an argument of {name}", "swapped or lost argument", f"{CLIENT}/{module}.py", old, new, test)
for name, module, old, new, test in (
    ("what has no tensor goes to the legacy stream", "_codecs", "frame.home or self._home", "None", "what_has_no_tensor"),
    ("a named stream is not told to the arrays", "_reading", "if current is not None and stream is not None and",
     "if False and", "a_named_stream_is_told"),
    ("another framework's stream is believed", "_reading", "(kind, number) != first or current != stream", "False", "of_two_frameworks"),
    ("a read-only array is written to", "_reading", "if written and not flags.writeable:", "if False:", "read_only_outputs"),
    ("strides that elements do not divide", "_reading", "            if rest:\n", "            if False:\n", "what_only_dlpack_can"),
    ("a list keeps the NULL of another call", "_reading", "self._addresses[k] = self.places[k]", "pass", "none_in_a_list"),
):
    fault(f"Python: {name}", "array read wrongly", f"{CLIENT}/{module}.py", old, new, python("test_reading", test, fakes=False))

# ---- Tensors for other processes

SOCKET = "src/share/socket.rs"
CLOSED = python("test_share", "no_descriptor_goes_to_a_program", fakes=False)
fault("descriptors that come stay open in programs", "descriptors without CLOEXEC", SOCKET,
      "libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT", "libc::MSG_DONTWAIT", CLOSED)
fault("a pair of sockets stays open in programs", "descriptors without CLOEXEC", SOCKET,
      "libc::SOCK_STREAM | libc::SOCK_CLOEXEC,", "libc::SOCK_STREAM,", CLOSED)
fault("memory of huge pages is taken", "payload believed", "src/share/sealed.rs",
      "size != bytes || of_large_pages {", "size != bytes || of_large_pages && size == 0 {",
      python("test_share", "memory_of_huge_pages", fakes=False))
fault("a socket that was answered still tells of own memory", "payload believed", "src/share/device.rs",
      "entry.travels == travels && is_unanswered(entry.kept)", "entry.travels == travels",
      python("test_share_cuda", "a_socket_that_was_answered"))
fault("memory that may shrink is taken", "payload believed", "src/share/sealed.rs",
      "if seals & !F_SEAL_EXEC != SEALS {", "if seals & libc::F_SEAL_GROW == 0 {",
      python("test_share", "descriptors_that_are_not_what_they_should_be", fakes=False))
fault("a released tensor keeps its socket", "leak", "src/share/sealed.rs",
      "drop(unsafe { Descriptor::of(descriptor) });", "std::mem::forget(unsafe { Descriptor::of(descriptor) });",
      python("test_share", "a_thousand_tensors", fakes=False))

# ---- What is installed

FILES = python("test_installed", "every_file_is_installed", fakes=False)
WHEEL = python("test_installed", "every_file_is_in_the_wheel", fakes=False)
fault("install without the C++ headers", "missing file", "Makefile",
      "install -m 644 include/gradcodec/* $(INTO_INCLUDE)", "install -m 644 include/gradcodec/*.h $(INTO_INCLUDE)", FILES)
fault("install without the CMake package", "missing file", "Makefile",
      "for name in gradcodec-config gradcodec-config-version; do", "for name in gradcodec-config-version; do", FILES)
fault("a wheel without py.typed", "missing file", "packaging/wheel.py",
      'sorted([*package.glob("*.py"), package / "py.typed"])', 'sorted(package.glob("*.py"))', WHEEL)
fault("a wheel without the C++ headers", "missing file", "packaging/wheel.py",
      "if file.is_file() and not name.startswith(",
      'if file.is_file() and not name.endswith((".hpp", ".cuh")) and not name.startswith(',
      WHEEL)

# ---- Ranks that do not come

STAYS = python("test_peers", "memory_stays_that_others_may_write_to")
fault("a rank that gave up frees what others write to", "lost rank", "src/comm/peers.rs", "self.memory.keep();", "", STAYS)
fault("a rank that waited on the host frees what others write to", "lost rank", "src/comm/peers.rs",
      "if self.memory.is_broken() || self.broken.load(Ordering::Relaxed) {\n            // A rank",
      "if self.memory.is_broken() {\n            // A rank", STAYS)
fault("over two levels, lateness within a node is a failure", "lost rank", "src/comm/topology.rs",
      "self.peers().try_for_each(Peers::async_error)",
      "self.peers().skip(1).try_for_each(Peers::async_error)",
      python("test_peers", "over_two_a_late_rank"))
fault("a rank that did not come is told as corrupt", "lost rank", "kernels/finish.cuh",
      "if (broken && found & CORRUPT) found", "if (broken && found & 0) found",
      python("test_peers", "has_left_is_not_finite_and_not_corrupt"))

fault("a codec that has sent its blocks and did not meet goes on", "lost rank", "src/backend/cuda/codec/mod.rs",
      "            self.torn = true;\n            // SAFETY: the communicator, which", "            // SAFETY: the communicator, which",
      python("test_peers", "breaks_off_between_its_launches"))
fault("a buffer is freed that others write to, for their last word did not come", "use after free", "src/comm/peers_setup.rs",
      "opening.keep_if(reached.is_err());", "",
      python("test_peers", "bootstrap_failed_for_a_rank_alone"))
fault("ranks that share a GPU wait for one whose bootstrap has failed", "hang", "src/comm/peers_setup.rs",
      "arrivals.give_up();", "",
      python("test_peers", "bootstrap_failed_for_a_rank_alone", "one", limit=30))
fault("a call meets the others before its factors are looked at", "out of step", "src/comm/allreduce.rs",
      "codec.check_inputs(factors)?;", "",
      python("test_one_exchange_driver", "takes_part_in_nothing", limit=30))
fault("a rank whose part was aborted says nothing over the other", "hang", "src/comm/communicator.rs",
      "self.topology.check_aborted().inspect_err(|_| self.topology.abort())?;", "self.topology.check_aborted()?;",
      python("test_hierarchical", "part_was_aborted", "reduce", limit=30, fakes=False))
fault("two levels are not made, and those who wait over the other are not told", "hang", "src/comm/communicator.rs",
      "if found.as_ref().is_err_and(|failure| failure.status != Status::Busy) {", "if false {",
      python("test_hierarchical", "part_was_aborted", "whole", limit=30, fakes=False))
fault("memory is freed that NCCL may use for ever", "hang", "src/comm/topology.rs",
      "link.is_aborted() || nccl.hangs(),", "link.is_aborted(),",
      python("test_nccl", "waited_for_too_long_may_still_use"))
fault("an abort waits behind the meeting that it is to end", "lost rank", "src/backend/cuda/peers.rs",
      "self.queue(self.aborts.stream())?", "self.own_queue()?",
      python("test_abort", "over_peer_memory", limit=60))
fault("an abort is told by kernels alone, which may begin after it", "lost rank", "src/comm/link.rs",
      "self.check_aborted().and(gathered)", "gathered",
      python("test_abort", "begins_after_the_abort"))
fault("kernels: the last vector of a tensor is stored whole", "wrong bits at a tail", "kernels/blocks_decode.cuh",
      "if (at + N <= count) reinterpret_cast", "if (at < count) reinterpret_cast",
      python("test_codec_driver", "block", limit=300))
fault("kernels: a rank that has given up writes blocks on", "lost rank", "kernels/blocks.cuh",
      "return way.peers->broken ? 0 : PEERS", "return PEERS",
      python("test_block_peers", "rank_that_has_given_up"))
fault("kernels: calls that exchange once take the same area each time", "data race of ranks", "kernels/blocks_once.cuh",
      "const u64 turn = meeting.number % 2 * call.turn;", "const u64 turn = 0 * call.turn;",
      python("test_block_peers", "rank_that_is_ahead"))
fault("kernels: a rank speaks before all of its blocks have come", "data race of kernels", "kernels/blocks_together.cuh",
      "last = all % HAS_FOUND == gridDim.x;", "last = all % HAS_FOUND == 1;",
      python("test_block_peers", "take_turns", limit=120))
fault("kernels: in one exchange the chunk behind is summed with the first one's", "wrong order of ranks",
      "kernels/blocks_once.cuh", "sum_payloads<C>(from, piece, tile.chunk + piece.later,", "sum_payloads<C>(from, piece, tile.chunk,",
      python("test_block_peers", "take_turns", limit=120))

# ---- Order of stores

FENCES = python("test_fences", "followed_by_a_fence", fakes=False)
fault("packing does not end its streamed stores", "missing store fence", FLAT,
      "words.add(index));\n            }\n            end_of_stream();", "words.add(index));\n            }", FENCES)
fault("unpacking does not end its streamed stores", "missing store fence", FLAT,
      "dst.add(index * 64 * T::SIZE));\n            }\n            end_of_stream();",
      "dst.add(index * 64 * T::SIZE));\n            }", FENCES)

# ---- Streams: what is put off until somebody waits for it

TURNS = python("test_comm_driver", "in_their_turn")
PIECES = python("test_copy_driver", "a_piece_of_pinned_memory_is_used_again")
STAGED = "src/backend/cuda/copy/staged.rs"
fault("a rank of a group goes on before others have taken", "stream that does not wait", "src/comm/group.rs",
      "let held_up = self.hold_up_for_takers(&mut lane);", "let held_up = Ok(());", TURNS)
fault("a rank of a group takes what is not there yet", "stream that does not wait", "src/comm/group.rs",
      "ready.hold_up(&mut lane.queue)?;", "let _ = ready;", TURNS)
fault("a rank of a group frees events that others wait for", "freed in use", "src/comm/group.rs",
      "self.say_that_it_is_gone();\n        self.wait_until_all_have_left();", "self.say_that_it_is_gone();",
      python("test_comm_driver", "events_stay", "frees"))
fault("a rank of a group makes new events too early", "freed in use", "src/comm/group.rs",
      "self.wait_until_all_have_left();\n                kept.insert(events)", "kept.insert(events)",
      python("test_comm_driver", "events_stay", "goes_on"))
fault("a rank of a group that fails waits for nobody", "freed in use", "src/comm/group.rs",
      "let held_up = self.hold_up_for_takers(&mut lane);",
      "let held_up = if taken.is_ok() { self.hold_up_for_takers(&mut lane) } else { Ok(()) };",
      python("test_comm_driver", "ranks_that_disagree"))
fault("a rank of a group that fails says not what it took", "freed in use", "src/comm/group.rs",
      "let recorded = lane.as_mut().map_or(Ok(()), Lane::record_taken);",
      "let recorded = lane.as_mut().filter(|_| taken.is_ok()).map_or(Ok(()), Lane::record_taken);",
      python("test_comm_driver", "ranks_that_disagree"))
fault("a rank of a group trusts an event not recorded", "freed in use", "src/comm/group.rs",
      "let _ = self.queue.wait_for_all();", "", python("test_comm_driver", "whichever_call_of_the_driver_fails_no_card"))
fault("a rank of a group trusts a wait that failed", "freed in use", "src/comm/group.rs",
      "let _ = unsafe { taken.wait(&mut self.queue) };", "",
      python("test_comm_driver", "whichever_call_of_the_driver_fails_no_card"))
fault("a staged send uses a piece again one round early", "stream that does not wait", STAGED,
      "staging.wait(queue, number)?;\n        }\n        let piece = staging.piece(number);\n"
      "        // SAFETY: the caller's promise; a piece",
      "}\n        let piece = staging.piece(number);\n        // SAFETY: the caller's promise; a piece", PIECES)
fault("a staged receive reads before arrival", "stream that does not wait", STAGED,
      "staging.wait(queue, *number)?;", "", PIECES)

# ---- Kernels

CODECS = python("test_codec_driver", "random_codecs")
COPIED = python("test_copy_driver", "any_layout_and_any_cast")
fault("kernels: lines and bytes of a tile", "swapped fields of a layout", "kernels/tiled.cuh",
      "unsigned log_lines, log_bytes;", "unsigned log_bytes, log_lines;",
      does_not_build("build/tests/driver_kernels.o", "kernels/layout.cuh", "LAYOUT_gc_strided_plan"))
fault("kernels: across and width of scattered signs", "swapped fields of a layout", "kernels/signs.cu",
      "gc_divisor across, width;", "gc_divisor width, across;",
      does_not_build("build/tests/driver_kernels.o", "kernels/layout.cuh", "LAYOUT_gc_scattered_signs"))
fault("kernels: the list of fields itself", "swapped fields of a layout", "kernels/layout.cuh",
      "field(log_bytes, 4) field(across, 4)", "field(across, 4) field(log_bytes, 4)",
      does_not_build("build/tests/driver_kernels.o", "kernels/layout.cuh", "LAYOUT_gc_strided_plan"))
COMPILED = python("test_compiled", "tiles_of_rows")
fault("a transposed input lies in shared memory as in memory", "wrong element of a tile", "kernels/compiled_tile.cuh",
      "tile[row(r) * width + column()]", "tile[column() * width + row(r)]", COMPILED)
fault("a tile has rows beyond the last", "wrong element of a tile", "kernels/compiled_tile.cuh",
      "column() < columns && row(round) < rows", "column() < columns", COMPILED)
fault("the rest of a short row comes with the first thread's", "wrong order of a sum",
      "kernels/compiled_reduction_short.cuh", "if (_gc_along == _gc_units % _gc_height) {",
      "if (_gc_along == 0) {",
      python("test_compiled", "does_not_depend_on_where"))
fault("kernels: a commit without a pending step keeps flags", "stale state", "kernels/codec.cuh",
      "if (control.pending == 0) {\n        control.since = 0;", "if (control.pending == 0) {", CODECS)
fault("kernels: float64 to bfloat16 is rounded twice", "wrong bits", "kernels/convert.cuh",
      "to_bf16(to_odd(double_of(v)))", "to_bf16(__double2float_rn(double_of(v)))", COPIED)
fault("kernels: the bytes of the third chunk go to the second's rank", "wrong order of ranks", "kernels/step.cuh",
      "tile.chunk + later, copy)", "tile.chunk + (later != 0), copy)",
      python("test_peers", "random_cases"))
fault("kernels: blocks of the next chunk go to the rank of the first", "wrong order of ranks", "kernels/blocks_emit.cuh",
      "target.base(blocks.places.first + piece.later, copy,", "target.base(blocks.places.first, copy,",
      python("test_peers", "random_cases"))
fault("kernels: raw elements of the next chunk go to the rank of the first", "wrong order of ranks", "kernels/blocks.cuh",
      "target.base(places.first + later, copy, chunk)", "target.base(places.first, copy, chunk)",
      python("test_peers", "random_cases"))
fault("kernels: a float32 of -0.0 skips a step", "wrong bits at an edge", "kernels/state.cuh",
      "skip = *static_cast<const float *>(call.skip) != 0;", "skip = *static_cast<const int *>(call.skip) != 0;", CODECS)
fault("kernels: of many payloads the first are not in the sum", "payload lost", "kernels/reduce.cuh",
      "if (payloads.many > Group::MOST) load_sums(sums, earlier, row, lane);", "", CODECS)
fault("kernels: a row's errors are used before they have come", "data race of a lane with itself", "kernels/reduce.cuh",
      "        wait_for_groups<0>();\n", "", CODECS)
fault("kernels: what is not finite is kept as it is", "flag lost", "kernels/step.cuh",
      "if (!__all_sync(WHOLE_WARP, is_finite(magnitude))) {", "if (false) {", CODECS)
fault("kernels: what is rounded to -0 is below zero", "wrong bits at an edge", "kernels/step.cuh",
      "!Form::GIVES_MINUS_ZERO && K::SIZE != 2;", "!Form::GIVES_MINUS_ZERO;", CODECS)
fault("kernels: neighbouring rounds of a sum are added the other way round", "wrong order of a sum", "kernels/sum.cuh",
      "for (unsigned distance = ROUNDS / 2; distance > 0; distance /= 2) {",
      "for (unsigned distance = 1; distance < ROUNDS; distance *= 2) {", python("test_device_functions", "sums_of_lanes"))

# ---- More of each kind

fault("a refused payload changes values", "refusal that writes", DECODE,
      "self.raise(CORRUPT);\n                    return Err(failure);",
      "self.raise(CORRUPT);\n                    unsafe { values[0].at(0).write(1) };\n"
      "                    return Err(failure);",
      python("test_codec", "what_a_stranger_sends", fakes=False))
fault("what is lost is taken off twice", "error written twice", "src/backend/cpu/codec/plain.rs",
      "    carry_with(InstructionSet::chosen(), call);",
      "    carry_with(InstructionSet::chosen(), call);\n    carry_with(InstructionSet::chosen(), call);",
      python("test_codec", "the_plain_form_allocates_its_chunks", fakes=False))
fault("a failure leaves no sentence", "error lost", "src/panics.rs",
      "    remember(&failure);\n", "", python("test_refusals", "the_last_error_is_the_threads_own", fakes=False))
fault("an event that the driver does not record", "driver's failure lost", "src/backend/cuda/event.rs",
      'driver.check(code, format_args!("cuEventRecord on {}", queue.device))', "let _ = code;\n        Ok(())",
      python("test_copy_driver", "every_call_of_the_driver_may_fail_in_a_copy", "pageable"))
fault("ranks of a node do not meet between two exchanges", "lost rank", "src/comm/hierarchical.rs",
      "self.intra.transport.barrier(queue)?;\n        self.join", "self.join",
      python("test_comm_driver", "two_levels_on_one_card", "peers and board", limit=120))
fault("peers do not meet before a lone all-gather", "lost rank", "src/comm/peers.rs",
      "if phases == Phases::AllGather { self.barrier(queue) }", "if phases == Phases::AllGather { Ok(()) }",
      python("test_comm_driver", "two_levels_on_one_card", "peers and board", limit=120))
fault("another value of a constant", "interface", "include/gradcodec.h",
      "GC_STATUS_TIMEOUT = 41", "GC_STATUS_TIMEOUT = 42", script("tests/abi/abi.py", "cc", "include"))
fault("kernels: a launch does not wait for the one before", "data race of kernels", "kernels/finish.cuh",
      "    wait_for_launch_before();\n", "", gpu("test_codec"), tier="gpu")
fault("kernels: a sum is written where others still read", "data race of kernels", "kernels/sum.cuh",
      "// All have read what lies in the places.\n        __syncthreads();", "", gpu("sanitize"), tier="gpu")
