// Lists the fields of every struct that the host fills and a kernel reads, in order, with their sizes in bytes. The
// structs have no padding. The compilers of both sides check this list: SAME_LAYOUT after a struct here,
// kernel_structs! around its counterpart in src. One array on the host may be two fields here.
#ifndef GRADCODEC_LAYOUT_CUH
#define GRADCODEC_LAYOUT_CUH

// divisor.cuh
#define LAYOUT_gc_divisor(field) \
    field(by, 8) field(reciprocal, 8)
// tiled.cuh
#define LAYOUT_gc_line_loop(field) \
    field(count, 16) field(element_stride, 8) field(byte_stride, 8)
#define LAYOUT_gc_byte_loop(field) \
    field(count, 16) field(stride, 8)
#define LAYOUT_gc_strided_plan(field) \
    field(src, 8) field(dst, 8) field(lines, 8) field(elements, 8) field(bytes, 8) field(first_byte, 8) \
    field(element_stride, 8) field(byte_stride, 8) field(first_zero, 8) field(span, 8) field(one, 8) \
    field(tiles, 16) field(size, 4) field(order, 4) field(aligned, 4) field(joined, 4) field(log_lines, 4) \
    field(log_bytes, 4) field(across, 4) field(bytes_across, 4) field(words, 4) field(reserved, 4) \
    field(n_line_loops, 4) field(n_byte_loops, 4) field(line_loops, 1984) field(byte_loops, 1488)
// signs.cu
#define LAYOUT_gc_signs(field) \
    field(zero, 8) field(one, 8) field(scales, 8) field(chunk_bytes, 16) field(format, 4) field(order, 4)
#define LAYOUT_gc_sign_loop(field) \
    field(count, 16) field(stride, 8)
#define LAYOUT_gc_scattered_signs(field) \
    field(src, 8) field(dst, 8) field(elements, 8) field(bytes, 8) field(byte_stride, 8) field(across, 16) \
    field(width, 16) field(signs, 48) field(size, 4) field(n_loops, 4) field(loops, 1488)
#define LAYOUT_gc_vote(field) \
    field(src, 8) field(dst, 8) field(voters, 16) field(bytes, 8) field(stride, 8) field(turn, 8) field(aligned, 4) \
    field(reserved, 4)
// convert.cuh
#define LAYOUT_gc_cast(field) \
    field(from, 4) field(from_size, 4) field(to, 4) field(to_size, 4)
// copy.cuh
#define LAYOUT_gc_copy_loop(field) \
    field(count, 16) field(dst_stride, 8) field(src_stride, 8)
#define LAYOUT_gc_copy(field) \
    field(src, 8) field(dst, 8) field(begin, 8) field(end, 8) field(count, 8) field(dst_step, 8) field(src_step, 8) \
    field(rows, 8) field(row_dst_stride, 8) field(row_src_stride, 8) field(across, 16) field(along, 16) \
    field(period, 16) field(wrap, 8) field(cast, 16) field(log_width, 4) field(down, 4) field(vectors, 4) \
    field(aligned, 4) field(n_outer, 4) field(joined, 4) field(outer, 1920)
// peers.cuh
#define LAYOUT_gc_peers(field) \
    field(barriers, 8) field(broken, 4) field(world, 4) field(rank, 4) field(reserved, 4) field(nanoseconds, 8) \
    field(failure, 8) field(buffers, 512)
#define LAYOUT_gc_peer_slot(field) \
    field(peers, 8) field(at, 8)
// peers.cu
#define LAYOUT_gc_push(field) \
    field(slot, 16) field(from, 8) field(vectors, 8) field(apart, 8)
#define LAYOUT_gc_barrier(field) \
    field(peers, 8) field(mark, 8) field(steps, 4) field(reserved, 4)
// codec.cuh
#define LAYOUT_gc_run(field) \
    field(elements, 8) field(byte, 8) field(base, 8) field(first_tile, 8) field(tiles, 4) field(raw, 4)
#define LAYOUT_gc_tile(field) \
    field(first, 8) field(unit, 8) field(to, 8) field(byte, 8) field(run, 4) field(count, 4) field(left, 4) \
    field(chunk, 4)
#define LAYOUT_gc_control(field) \
    field(flags, 4) field(since, 4) field(valid, 4) field(pending, 4) field(found, 4) field(accepted, 4) \
    field(broken, 4) field(reserved, 4)
#define LAYOUT_gc_codec(field) \
    field(state, 16) field(control, 8) field(partials, 8) field(counter, 8) field(tiles, 8) field(runs, 8) \
    field(segments, 8) field(scales, 8) field(report, 8) field(addresses, 8) field(bytes, 8) field(chunk_bytes, 8) \
    field(head, 8) field(stride, 8) field(scales_at, 8) field(units_at, 8) field(n_segments, 4) field(n_chunks, 4) \
    field(chunk, 4) field(chunks, 4) field(kind, 4) field(rule, 4) field(policy, 4) field(results, 4) field(half, 4) \
    field(reduction, 4) field(beta, 4) field(error, 4) field(ranks, 4) \
    field(reserved, 4) field(header, 64) field(only, 40) field(reciprocal, 8) \
    field(raws, 8) field(chunk_raws, 8) field(raw_reciprocal, 8) field(codes_at, 8) field(raws_at, 8)
#define LAYOUT_gc_encode(field) \
    field(codec, 344) field(m_g, 8) field(m_e, 8) field(dst, 8) field(slot, 16) field(values, 128)
#define LAYOUT_gc_finish(field) \
    field(codec, 344) field(dst, 8) field(slot, 16) field(steps, 4) field(reserved, 4)
#define LAYOUT_gc_reduce(field) \
    field(codec, 344) field(chunks, 8) field(dst, 8) field(slot, 16) field(payloads, 8) field(apart, 8) \
    field(shard, 4) field(reserved, 4)
#define LAYOUT_gc_decode(field) \
    field(codec, 344) field(payload, 8) field(factor, 8) field(divisor, 4) field(dtype, 4) field(tiles, 8) \
    field(first_empty, 8) field(values, 128)
// blocks_one_shot.cuh
#define LAYOUT_gc_one_shot(field) \
    field(codec, 344) field(factor, 8) field(slot, 16) field(apart, 8) field(turn, 8) field(tiles, 8) field(steps, 4) \
    field(reserved, 4) field(values, 128)
// blocks_two_shot.cuh
#define LAYOUT_gc_two_shot(field) field(encode, 512) field(reduce, 400) field(decode, 512) field(tiles, 8)
// state.cuh
#define LAYOUT_gc_state(field) \
    field(worker, 344) field(server, 344) field(bytes, 8) field(skip, 8) field(size, 8) field(half, 4) \
    field(skip_kind, 4) field(rows, 8) field(row, 8) field(start, 4) field(divisor, 4) \
    field(divisor_of_sum, 4) field(factor, 4)
#define LAYOUT_gc_addresses(field) \
    field(table, 8) field(count, 8) field(values, 3584)

// nodes.cuh
#define LAYOUT_gc_node_tile(field) \
    field(first, 8) field(to, 8) field(segment, 4) field(count, 4)
#define LAYOUT_gc_node_pack(field) \
    field(tiles, 8) field(headers, 8) field(dst, 8) field(factor, 8) field(addresses, 8) field(n_tiles, 8) \
    field(block_bytes, 8) field(size, 4) field(reserved, 4) field(values, 128)
#define LAYOUT_gc_node_sum(field) \
    field(blocks, 8) field(to, 8) field(control, 8) field(report, 8) field(elements, 8) field(block_bytes, 8) \
    field(ranks, 4) field(dtype, 4) field(zero, 4) field(reserved, 4) field(header, 64)

// NVRTC has no <cstddef>. Its front end spells offsetof as __INTADDR__.
#ifdef __CUDACC_RTC__
#define PLACE_OF(type, name) __INTADDR__(&static_cast<type *>(nullptr)->name)
#else
#define PLACE_OF(type, name) __builtin_offsetof(type, name)
#endif
#define LAYOUT_BYTES(name, bytes) char name[bytes];
#define LAYOUT_CHECK(name, bytes) \
    static_assert(PLACE_OF(Declared, name) == PLACE_OF(Listed, name) \
                      && sizeof(Declared::name) == bytes, #name " is not where layout.cuh and the host have it");
#define SAME_LAYOUT(type) \
    namespace layout_of_##type { \
    typedef type Declared; \
    struct Listed { \
        LAYOUT_##type(LAYOUT_BYTES) \
    }; \
    LAYOUT_##type(LAYOUT_CHECK) \
    static_assert(sizeof(Declared) == sizeof(Listed), #type " has other fields than in layout.cuh"); \
    }

#endif
