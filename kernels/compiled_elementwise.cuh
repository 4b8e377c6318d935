// Elementwise operation. It follows compiled.cuh and the struct of a launch's arguments. src/jit/source.rs replaces
// lines that are a name in capitals by code of a specialization.

// Processes a thread's part of its thread block's share: _gc_ROUNDS units, which are vectors of _gc_V elements, or
// elements. _gc_BYTES: elements have any address.
template <unsigned _gc_V, unsigned _gc_ROUNDS, bool _gc_BYTES, typename _gc_At, typename _gc_Share>
__device__ __forceinline__ void _gc_run(const _gc_Args &_gc_args, const _gc_At (&_gc_at)[_gc_ROUNDS],
                                        const _gc_Share &_gc_share) {
    const _gc::Indexer _ind = {static_cast<ptrdiff_t>(_gc_args.size)};
    (void)_ind;
    _GC_N
    _GC_WHOLE_PARAMETERS
    _GC_LOOP_PREP
    _GC_ROUNDS_OF_TENSORS
#pragma unroll
    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
        if (!_gc_share.has(_gc_r)) continue;
        _GC_LOAD_ROUND
    }
    _GC_TURN_INPUTS
#pragma unroll
    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
        if (!_gc_share.has(_gc_r)) continue;
        _GC_SPREAD_ROUND
#pragma unroll
        for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m++) {
            const ptrdiff_t i = static_cast<ptrdiff_t>(_gc_share.number(_gc_r) * _gc_V + _gc_m);
            (void)i;
            _GC_ELEMENTS
            _GC_OPERATION
        }
        _GC_STORE_ROUND
    }
    _GC_AFTER_LOOP
}

// Returns the share of units side by side from _gc_first on, of which _gc_left are left.
template <unsigned _gc_ROUNDS>
__device__ __forceinline__ _gc::Line _gc_line(const unsigned long long _gc_first, const unsigned long long _gc_left) {
    const unsigned _gc_most = _gc::_gc_THREADS * _gc_ROUNDS;
    return {_gc_first, _gc_left < _gc_most ? static_cast<unsigned>(_gc_left) : _gc_most};
}

// Processes the share of a thread block. _gc_NESTED: with any number of loops; otherwise with one.
template <unsigned _gc_V, unsigned _gc_ROUNDS, bool _gc_NESTED, bool _gc_BYTES>
__device__ __forceinline__ void _gc_block(const _gc_Args &_gc_args) {
    const unsigned long long _gc_first = static_cast<unsigned long long>(blockIdx.x) * (_gc::_gc_THREADS * _gc_ROUNDS);
    _gc::Offsets<_GC_TENSORS> _gc_at[_gc_ROUNDS];
    unsigned _gc_more[_gc_ROUNDS];
#pragma unroll
    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
        _gc_at[_gc_r] = _gc::Offsets<_GC_TENSORS>();
        _gc_more[_gc_r] = threadIdx.x + _gc_r * _gc::_gc_THREADS;
    }
    if (_gc_NESTED) _gc::go_rounds(_gc_at, _gc_more, _gc_args.loops, _gc_args.n_loops, _gc_first);
    else _gc::go_straight<1>(_gc_at, _gc_args.loops[0], _gc_first + threadIdx.x, _gc::_gc_THREADS, 1);
    const _gc::Line _gc_share = _gc_line<_gc_ROUNDS>(_gc_first, _gc_args.units - _gc_first);
    _gc_run<_gc_V, _gc_ROUNDS, _gc_BYTES>(_gc_args, _gc_at, _gc_share);
}

// Processes vectors. One more thread block processes the elements that do not fill a vector.
template <unsigned _gc_V, unsigned _gc_ROUNDS>
__device__ __forceinline__ void _gc_vectors(const _gc_Args &_gc_args) {
    if (blockIdx.x < _gc_args.blocks) {
        _gc_block<_gc_V, _gc_ROUNDS, false, false>(_gc_args);
    } else {
        const unsigned long long _gc_first = _gc_args.units * _gc_V;
        _gc::Offsets<_GC_TENSORS> _gc_at[1] = {};
        _gc::go_straight<1>(_gc_at, _gc_args.loops[0], _gc_first + threadIdx.x, 0, _gc_V);
        _gc_run<1, 1, false>(_gc_args, _gc_at, _gc_line<1>(_gc_first, _gc_args.size - _gc_first));
    }
}
