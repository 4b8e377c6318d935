// Reduction. It follows compiled.cuh and the struct of a launch's arguments. src/jit/source.rs replaces lines that are
// a name in capitals by code of a specialization.

__device__ __forceinline__ _type_reduce _gc_map(const _gc_Args &_gc_args, const ptrdiff_t _J
    _GC_INPUTS_AS_PARAMETERS
) {
    (void)_J;
    _GC_SIZES
    _GC_WHOLE_PARAMETERS
    _GC_INPUTS
    _GC_MAP
}

__device__ __forceinline__ _type_reduce _gc_reduce(const _type_reduce a, const _type_reduce b) {
    _GC_REDUCE
}

// Sets the outputs at these addresses.
__device__ __forceinline__ void _gc_finish(const _gc_Args &_gc_args, const _type_reduce _gc_a, const ptrdiff_t i
    _GC_OUTPUTS_AS_PARAMETERS
) {
    (void)i;
    _GC_SIZES
    _GC_WHOLE_PARAMETERS
    _GC_LOAD_OUTPUTS
    {
        const _type_reduce a = _gc_a;
        _GC_OUTPUTS
        _GC_POST_MAP
    }
    _GC_STORE_OUTPUTS
}

// Sets the outputs of number _gc_number, in loops of which the innermost counts vectors of 2^_gc_log outputs.
__device__ __forceinline__ void _gc_set(const _gc_Args &_gc_args, const _type_reduce &_gc_one,
                                        const unsigned long long _gc_number, const unsigned _gc_log) {
    const _gc::Offsets<_GC_TENSORS> _gc_at =
        _gc::offsets_of(_gc_args.loops, _gc_args.n_kept, _gc_number, _gc_log);
    const long long *const _gc_offsets = _gc_at.of;
    _GC_FINISH
}

// Reduces what the threads along each output have to one value: a partial result, or outputs that are set. Threads side
// by side have _gc_N outputs each; the thread block's first output is number _gc_first. All outputs go through shared
// memory, as many of a thread's at once as fit.
template <unsigned _gc_N>
__device__ __forceinline__ void _gc_gather(const _gc_Args &_gc_args, const _type_reduce (&_gc_sums)[_gc_N],
                                           const bool _gc_has, const unsigned _gc_across, const unsigned _gc_along,
                                           const unsigned _gc_log, const unsigned _gc_active,
                                           const unsigned long long _gc_first, _type_reduce *_gc_partials,
                                           const unsigned _gc_log_of) {
    const unsigned _gc_bytes = _gc_N * sizeof(_type_reduce);  // per thread: 64 bytes fit
    const unsigned _gc_too_many = _gc_bytes <= 64 ? 1 : _gc_bytes <= 128 ? 2 : _gc_bytes <= 256 ? 4 : 8;
    const unsigned _gc_B = _gc_N / _gc_too_many;
    __shared__ __align__(16) unsigned char _gc_memory[_gc_B * _gc::_gc_THREADS * sizeof(_type_reduce)];
    _type_reduce *const _gc_all = reinterpret_cast<_type_reduce *>(_gc_memory);
    const unsigned _gc_width = 1u << _gc_log, _gc_row = _gc_B << _gc_log;
#pragma unroll
    for (unsigned _gc_of = 0; _gc_of < _gc_N; _gc_of += _gc_B) {
        if (_gc_of > 0) __syncthreads();
        if (_gc_has) {
#pragma unroll
            for (unsigned _gc_m = 0; _gc_m < _gc_B; _gc_m++)
                _gc_all[_gc_along * _gc_row + _gc_m * _gc_width + _gc_across] = _gc_sums[_gc_of + _gc_m];
        }
        // Returns the number of the output at a place of the shared memory.
        const auto _gc_number_of = [&](unsigned _gc_at) {
            return _gc_first + (_gc_at & (_gc_width - 1)) * _gc_N + _gc_of + (_gc_at >> _gc_log);
        };
#pragma unroll 1
        for (unsigned _gc_half = (_gc::_gc_THREADS >> _gc_log) / 2; _gc_half > 0; _gc_half /= 2) {
            __syncthreads();
            const unsigned _gc_pairs = _gc_active < _gc_half ? 0 : _gc_active - _gc_half;
            const unsigned _gc_end = (_gc_pairs < _gc_half ? _gc_pairs : _gc_half) * _gc_row;
#pragma unroll 1
            for (unsigned _gc_at = threadIdx.x; _gc_at < _gc_end; _gc_at += _gc::_gc_THREADS) {
                if (_gc_number_of(_gc_at & (_gc_row - 1)) >= _gc_args.kept) continue;
                _gc_all[_gc_at] = _gc_reduce(_gc_all[_gc_at], _gc_all[_gc_at + _gc_half * _gc_row]);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (unsigned _gc_k = threadIdx.x; _gc_k < _gc_row; _gc_k += _gc::_gc_THREADS) {
            // Neighbouring threads set neighbouring outputs.
            const unsigned _gc_at = _gc_k % _gc_B * _gc_width + _gc_k / _gc_B;
            const unsigned long long _gc_number = _gc_number_of(_gc_at);
            if (_gc_number >= _gc_args.kept) continue;
            _type_reduce _gc_one;
            if (_gc_active > 0) _gc_one = _gc_all[_gc_at];
            _GC_IDENTITY
            if (_gc_partials) _gc_partials[_gc_number] = _gc_one;
            else _gc_set(_gc_args, _gc_one, _gc_number, _gc_log_of);
        }
    }
}

// Reduces the last elements of an output's share, which do not fill a vector of 2^_gc_log elements.
__device__ __forceinline__ _type_reduce _gc_last(const _gc_Args &_gc_args, const _gc::Offsets<_GC_TENSORS> _gc_base,
                                                 const unsigned long long _gc_begin, const unsigned long long _gc_end,
                                                 const unsigned _gc_log, const bool _gc_had, _type_reduce _gc_sum) {
    bool _gc_has = _gc_had;
#pragma unroll 1
    for (unsigned long long _gc_number = _gc_begin; _gc_number < _gc_end; _gc_number++) {
        const _gc::Offsets<_GC_TENSORS> _gc_within =
            _gc::offsets_of(_gc_args.loops + _gc_args.n_kept, _gc_args.n_reduced, _gc_number, _gc_log);
        long long _gc_offsets[_GC_TENSORS];
#pragma unroll
        for (unsigned _gc_k = 0; _gc_k < _GC_TENSORS; _gc_k++)
            _gc_offsets[_gc_k] = _gc_base.of[_gc_k] + _gc_within.of[_gc_k];
        _GC_LOAD_LAST_OF_INPUTS
        _GC_MAP_LAST
        _gc_sum = _gc_has ? _gc_reduce(_gc_sum, _gc_x) : _gc_x;
        _gc_has = true;
    }
    return _gc_sum;
}

// Reduces a thread's elements: rounds of whole vectors; one thread has the last, incomplete vector. _gc_ONES: elements
// may lie anywhere; the same elements in the same order are loaded one by one. _gc_COLUMNS: threads side by side have
// neighbouring outputs, not neighbouring elements of one. _gc_NESTED: an output's elements lie in any number of loops;
// otherwise in one. _gc_BYTES: elements have any address; a flag at run time would be a branch between loads, and
// serialize them.
template <unsigned _gc_V, unsigned _gc_ROUNDS, bool _gc_COLUMNS, bool _gc_ONES, bool _gc_NESTED, bool _gc_BYTES>
__device__ __forceinline__ void _gc_run(const _gc_Args &_gc_args) {
    typedef unsigned long long _gc_u64;
    const unsigned _gc_t = threadIdx.x, _gc_log = _gc_args.log_across;
    const unsigned _gc_width = 1u << _gc_log, _gc_height = _gc::_gc_THREADS >> _gc_log;
    const unsigned _gc_across = _gc_COLUMNS ? _gc_t % _gc_width : _gc_t / _gc_height;
    const unsigned _gc_along = _gc_COLUMNS ? _gc_t / _gc_width : _gc_t % _gc_height;
    const unsigned _gc_tile = blockIdx.x % static_cast<unsigned>(_gc_args.tiles);
    const unsigned _gc_split = blockIdx.x / static_cast<unsigned>(_gc_args.tiles);
    const unsigned _gc_OUTPUTS = _gc_COLUMNS ? _gc_V : 1, _gc_AT_ONCE = _gc_COLUMNS ? 1 : _gc_V;
    const unsigned _gc_log_of = 31 - __clz(_gc_ONES ? 1 : _gc_AT_ONCE);
    const _gc_u64 _gc_o = (static_cast<_gc_u64>(_gc_tile) * _gc_width + _gc_across) * _gc_OUTPUTS;
    const _gc_u64 _gc_begin = _gc_split * _gc_args.chunk, _gc_rest = _gc_args.reduced - _gc_begin;
    const _gc_u64 _gc_length = _gc_rest < _gc_args.chunk ? _gc_rest : _gc_args.chunk;
    const _gc_u64 _gc_units = _gc_length / _gc_AT_ONCE;
    const bool _gc_valid = _gc_o < _gc_args.kept;
    const _gc::Loop<_GC_TENSORS> *const _gc_inner = _gc_args.loops + _gc_args.n_kept;
    _type_reduce _gc_sum[_gc_OUTPUTS];
    bool _gc_has = false;
    if (_gc_valid) {
        const _gc::Offsets<_GC_TENSORS> _gc_base =
            _gc::offsets_of(_gc_args.loops, _gc_args.n_kept, _gc_o / _gc_OUTPUTS, 0);
        const unsigned _gc_EACH = _gc_ONES ? _gc_V : 1;
#pragma unroll 1
        for (_gc_u64 _gc_j = 0; _gc_j + _gc_along < _gc_units; _gc_j += _gc_ROUNDS * _gc_height) {
            const _gc_u64 _gc_rest_of = _gc_units - _gc_j, _gc_most = _gc_ROUNDS * _gc_height;
            const unsigned _gc_left = static_cast<unsigned>(_gc_rest_of < _gc_most ? _gc_rest_of : _gc_most);
            _gc::Offsets<_GC_TENSORS> _gc_place[_gc_ROUNDS * _gc_EACH];
            unsigned _gc_more[_gc_ROUNDS * _gc_EACH];
#pragma unroll
            for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS * _gc_EACH; _gc_r++) {
                _gc_place[_gc_r] = _gc_base;
                _gc_more[_gc_r] = (_gc_along + _gc_r / _gc_EACH * _gc_height) * _gc_EACH + _gc_r % _gc_EACH;
            }
            const _gc_u64 _gc_before = _gc_begin / _gc_AT_ONCE + _gc_j;
            if (_gc_NESTED) {
                if (_gc_args.n_reduced > 0)
                    _gc::go_rounds(_gc_place, _gc_more, _gc_inner, _gc_args.n_reduced, _gc_before * _gc_EACH);
            } else {
                _gc::go_straight<_gc_EACH>(_gc_place, *_gc_inner, (_gc_before + _gc_along) * _gc_EACH,
                                           _gc_height * _gc_EACH, 1);
            }
            _GC_ROUNDS_OF_INPUTS
#pragma unroll
            for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
                if (_gc_along + _gc_r * _gc_height >= _gc_left) continue;
                if (_gc_ONES) {
#pragma unroll
                    for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m++) {
                        const long long *const _gc_offsets = _gc_place[_gc_r * _gc_EACH + _gc_m % _gc_EACH].of;
                        _GC_LOAD_ONE_OF_INPUTS
                    }
                } else {
                    const long long *const _gc_offsets = _gc_place[_gc_r * _gc_EACH].of;
                    _GC_LOAD_ROUND_OF_INPUTS
                }
            }
#pragma unroll
            for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {
                const unsigned _gc_unit = _gc_along + _gc_r * _gc_height;
                if (_gc_unit >= _gc_left) continue;
                _GC_SPREAD_ROUND
                const bool _gc_had = _gc_r > 0 || _gc_j > 0;
                _gc_has = true;
#pragma unroll
                for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m++) {
                    const _gc_u64 _gc_number =
                        _gc_begin + (_gc_j + _gc_unit) * _gc_AT_ONCE + (_gc_COLUMNS ? 0 : _gc_m);
                    _GC_MAP_ROUND
                    _type_reduce &_gc_to = _gc_sum[_gc_COLUMNS ? _gc_m : 0];
                    _gc_to = _gc_had || (!_gc_COLUMNS && _gc_m > 0) ? _gc_reduce(_gc_to, _gc_x) : _gc_x;
                }
            }
        }
        const _gc_u64 _gc_whole = _gc_units * _gc_AT_ONCE;
        if (_gc_whole < _gc_length && _gc_along == _gc_units % _gc_height) {
            _gc_sum[0] = _gc_last(_gc_args, _gc_base, _gc_begin + _gc_whole, _gc_begin + _gc_length, _gc_log_of, _gc_has,
                                  _gc_sum[0]);
            _gc_has = true;
        }
    }
    const _gc_u64 _gc_pieces = _gc_units + (_gc_length % _gc_AT_ONCE ? 1 : 0);
    const unsigned _gc_active = static_cast<unsigned>(_gc_pieces < _gc_height ? _gc_pieces : _gc_height);
    _type_reduce *const _gc_partials =
        _gc_args.splits > 1 ? static_cast<_type_reduce *>(_gc_args.partials) + _gc_split * _gc_args.kept : nullptr;
    _gc_gather(_gc_args, _gc_sum, _gc_has, _gc_across, _gc_along, _gc_log, _gc_active,
               static_cast<_gc_u64>(_gc_tile) * _gc_width * _gc_OUTPUTS, _gc_partials, 31 - __clz(_gc_OUTPUTS));
}

// Reduces partial results to results.
__device__ __forceinline__ void _gc_run_second(const _gc_Args &_gc_args) {
    const unsigned _gc_width = 1u << _gc_args.log_second, _gc_height = _gc::_gc_THREADS >> _gc_args.log_second;
    const unsigned _gc_across = threadIdx.x % _gc_width, _gc_along = threadIdx.x / _gc_width;
    const unsigned long long _gc_first = static_cast<unsigned long long>(blockIdx.x) * _gc_width;
    const unsigned long long _gc_number = _gc_first + _gc_across;
    const bool _gc_valid = _gc_number < _gc_args.kept;
    const _type_reduce *_gc_from = static_cast<const _type_reduce *>(_gc_args.partials) + _gc_number;
    _type_reduce _gc_one[1];
    bool _gc_has = false;
    if (_gc_valid) {
#pragma unroll 1
        for (unsigned _gc_j = _gc_along; _gc_j < _gc_args.splits; _gc_j += 8 * _gc_height) {
            _type_reduce _gc_x[8];
#pragma unroll
            for (unsigned _gc_r = 0; _gc_r < 8; _gc_r++) {
                const unsigned _gc_at = _gc_j + _gc_r * _gc_height;
                if (_gc_at < _gc_args.splits) _gc_x[_gc_r] = _gc_from[_gc_at * _gc_args.kept];
            }
#pragma unroll
            for (unsigned _gc_r = 0; _gc_r < 8; _gc_r++) {
                if (_gc_j + _gc_r * _gc_height >= _gc_args.splits) continue;
                _gc_one[0] = _gc_has ? _gc_reduce(_gc_one[0], _gc_x[_gc_r]) : _gc_x[_gc_r];
                _gc_has = true;
            }
        }
    }
    const unsigned _gc_active = _gc_args.splits < _gc_height ? _gc_args.splits : _gc_height;
    _gc_gather(_gc_args, _gc_one, _gc_has, _gc_across, _gc_along, _gc_args.log_second, _gc_active, _gc_first, nullptr,
               31 - __clz(_gc_args.at_once));
}
