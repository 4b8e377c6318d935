// An operation on elements, behind compiled.cuh and the struct of a launch's arguments. src/compile/source.rs puts code
// of a combination where a line is a name in capitals alone.

// What a thread does: _gc_ROUNDS units, vectors of _gc_V elements, or elements. _gc_LOG: units are elements, and loops
// are of vectors of 2^_gc_log.
template <unsigned _gc_V, unsigned _gc_ROUNDS, bool _gc_LOG>
__device__ __forceinline__ void _gc_run(const _gc_Args &_gc_args, const unsigned long long _gc_first,
                                        const unsigned long long _gc_end, const unsigned _gc_log) {
    const ptrdiff_t n = static_cast<ptrdiff_t>(_gc_args.size);
    const _gc::Indexer _ind = {n};
    (void)_ind;
    _GC_WHOLE_PARAMETERS
    _GC_LOOP_PREP
    _GC_ROUNDS_OF_TENSORS
    _gc::Offsets<_GC_TENSORS> _gc_at[_gc_ROUNDS];
    const bool _gc_bytes = _gc_LOG && _gc_args.bytes;
    (void)_gc_bytes;
#pragma unroll
    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
        const unsigned long long _gc_unit = _gc_first + _gc_r * _gc::THREADS;
        if (_gc_unit >= _gc_end) continue;
        _gc_at[_gc_r] = _gc::Offsets<_GC_TENSORS>();
        if (_gc_LOG) _gc_at[_gc_r] = _gc::offsets_of(_gc_args.loops, _gc_args.n_loops, _gc_unit, _gc_log);
        else _gc::go_fast(_gc_at[_gc_r], _gc_args.loops, _gc_args.n_loops, _gc_unit);
        const _gc::i64 *const _gc_offsets = _gc_at[_gc_r].of;
        _GC_LOAD_ROUND
    }
#pragma unroll
    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
        const unsigned long long _gc_unit = _gc_first + _gc_r * _gc::THREADS;
        if (_gc_unit >= _gc_end) continue;
#pragma unroll
        for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m++) {
            const ptrdiff_t i = static_cast<ptrdiff_t>(_gc_unit * _gc_V + _gc_m);
            (void)i;
            _GC_ELEMENTS
            _GC_OPERATION
        }
        const _gc::i64 *const _gc_offsets = _gc_at[_gc_r].of;
        _GC_STORE_ROUND
    }
    _GC_AFTER_LOOP
}

template <unsigned _gc_V, unsigned _gc_ROUNDS>
__device__ __forceinline__ void _gc_block(const _gc_Args &_gc_args) {
    const unsigned long long _gc_block = blockIdx.x;
    _gc_run<_gc_V, _gc_ROUNDS, false>(_gc_args, _gc_block * (_gc::THREADS * _gc_ROUNDS) + threadIdx.x, _gc_args.units,
                                      0);
}

// An element, at any address: the rest that does not fill a vector of 2^_gc_log, and where nothing is aligned.
__device__ __forceinline__ void _gc_single(const _gc_Args &_gc_args, const unsigned long long _gc_number,
                                           const unsigned _gc_log) {
    _gc_run<1, 1, true>(_gc_args, _gc_number, _gc_args.size, _gc_log);
}

// What does not fill a vector is a block of its own.
template <unsigned _gc_V, unsigned _gc_ROUNDS>
__device__ __forceinline__ void _gc_vectors(const _gc_Args &_gc_args) {
    if (blockIdx.x < _gc_args.blocks) _gc_block<_gc_V, _gc_ROUNDS>(_gc_args);
    else _gc_single(_gc_args, _gc_args.units * _gc_V + threadIdx.x, 31 - __clz(_gc_V));
}

__device__ __forceinline__ void _gc_singles(const _gc_Args &_gc_args) {
    _gc_single(_gc_args, static_cast<unsigned long long>(blockIdx.x) * _gc::THREADS + threadIdx.x, 0);
}
