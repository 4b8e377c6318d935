// Reduction of short rows. It follows compiled_reduction.cuh.

// Reduces short rows that lie one after the other. A thread block loads its rows side by side to shared memory. Each
// thread reduces one row, in the order of _gc_height threads in _gc_run with vectors of _gc_OF.
template <unsigned _gc_OF, unsigned _gc_ROUNDS>
__device__ __forceinline__ void _gc_run_short(const _gc_Args &_gc_args) {
    typedef unsigned long long _gc_u64;
    const unsigned _gc_V = 1, _gc_THREADS = _gc::_gc_THREADS;
    const bool _gc_ONES = true, _gc_BYTES = false;
    const unsigned _gc_row = static_cast<unsigned>(_gc_args.reduced), _gc_height = _gc_THREADS >> _gc_args.log_across;
    const _gc_u64 _gc_first = static_cast<_gc_u64>(blockIdx.x) * _gc_THREADS, _gc_rest = _gc_args.kept - _gc_first;
    const unsigned _gc_rows = _gc_rest < _gc_THREADS ? static_cast<unsigned>(_gc_rest) : _gc_THREADS;
    __shared__ __align__(16) unsigned char _gc_memory[_gc_SHORT_BYTES];
    _type_reduce *const _gc_all = reinterpret_cast<_type_reduce *>(_gc_memory);
    const unsigned _gc_count = _gc_rows * _gc_row;
    unsigned _gc_sizes[_GC_TENSORS];  // bytes from one element to the next; 0 for outputs
    long long _gc_start[_GC_TENSORS];
#pragma unroll
    for (unsigned _gc_k = 0; _gc_k < _GC_TENSORS; _gc_k++) {
        _gc_sizes[_gc_k] = static_cast<unsigned>(_gc_args.loops[_gc_args.n_kept].strides[_gc_k]);
        _gc_start[_gc_k] = static_cast<long long>(_gc_first * _gc_row * _gc_sizes[_gc_k]);
    }
#pragma unroll 1
    for (unsigned _gc_j = threadIdx.x; _gc_j < _gc_count; _gc_j += _gc_ROUNDS * _gc_THREADS) {
        _GC_ROUNDS_OF_INPUTS
#pragma unroll
        for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
            // Without a branch, all loads are issued before the first is waited for.
            const unsigned _gc_beside = _gc_j + _gc_r * _gc_THREADS;
            const unsigned _gc_at = _gc_beside < _gc_count ? _gc_beside : _gc_count - 1;
            long long _gc_offsets[_GC_TENSORS];
#pragma unroll
            for (unsigned _gc_k = 0; _gc_k < _GC_TENSORS; _gc_k++)
                _gc_offsets[_gc_k] = _gc_start[_gc_k] + static_cast<long long>(_gc_u64(_gc_at) * _gc_sizes[_gc_k]);
            _GC_LOAD_ROUND_OF_INPUTS
        }
        _type_reduce *const _gc_to = _gc_all + _gc_j;
#pragma unroll
        for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
            const unsigned _gc_at = _gc_j + _gc_r * _gc_THREADS, _gc_m = 0;
            if (_gc_at >= _gc_count) continue;
            const unsigned _gc_number = _gc_at % _gc_row;
            _GC_MAP_ROUND
            _gc_to[_gc_r * _gc_THREADS] = _gc_x;
        }
    }
    __syncthreads();
    if (threadIdx.x >= _gc_rows) return;
    const _type_reduce *const _gc_own = _gc_all + threadIdx.x * _gc_row;
    const unsigned _gc_units = _gc_row / _gc_OF;
    _type_reduce _gc_sum;
#pragma unroll 1
    for (unsigned _gc_along = 0; _gc_along < _gc_height; _gc_along++) {
        _type_reduce _gc_part;
        bool _gc_has = false;
#pragma unroll 1
        for (unsigned _gc_unit = _gc_along; _gc_unit < _gc_units; _gc_unit += _gc_height) {
#pragma unroll
            for (unsigned _gc_m = 0; _gc_m < _gc_OF; _gc_m++) {
                const _type_reduce _gc_x = _gc_own[_gc_unit * _gc_OF + _gc_m];
                _gc_part = _gc_has || _gc_m > 0 ? _gc_reduce(_gc_part, _gc_x) : _gc_x;
            }
            _gc_has = true;
        }
        if (_gc_along == _gc_units % _gc_height) {
#pragma unroll 1
            for (unsigned _gc_at = _gc_units * _gc_OF; _gc_at < _gc_row; _gc_at++) {
                _gc_part = _gc_has ? _gc_reduce(_gc_part, _gc_own[_gc_at]) : _gc_own[_gc_at];
                _gc_has = true;
            }
        }
        _gc_sum = _gc_along > 0 ? _gc_reduce(_gc_sum, _gc_part) : _gc_part;
    }
    _gc_set(_gc_args, _gc_sum, _gc_first + threadIdx.x, 0);
}
