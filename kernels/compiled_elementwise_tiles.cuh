// Tiles of an elementwise operation. They follow compiled_elementwise.cuh.

// Processes a tile of the two innermost loops, whose counts are numbers of tiles. `units` has the elements of the inner
// loop in its lower 32 bits, of the outer one in its upper 32 bits. _gc_TURNS: the inputs in `ones` are turned.
template <unsigned _gc_ROUNDS, bool _gc_TURNS>
__device__ __forceinline__ void _gc_tile(const _gc_Args &_gc_args) {
    typedef unsigned long long _gc_u64;
    const _gc::Loop<_GC_TENSORS> *const _gc_two = _gc_args.loops + (_gc_args.n_loops - 2);
    const unsigned _gc_log = _gc_args.log_width, _gc_height = _gc::_gc_THREADS * _gc_ROUNDS >> _gc_log;
    const unsigned _gc_across = static_cast<unsigned>(_gc_args.units), _gc_down = _gc_args.units >> 32;
    unsigned _gc_rest = blockIdx.x;
    const unsigned _gc_column = _gc::divide(_gc_rest, _gc_two[1]) << _gc_log;
    const unsigned _gc_row = _gc::divide(_gc_rest, _gc_two[0]) * _gc_height;
    const _gc_u64 _gc_first = (static_cast<_gc_u64>(_gc_rest) * _gc_down + _gc_row) * _gc_across + _gc_column;
    _gc::Tile<_GC_TENSORS, _gc_ROUNDS, _gc_TURNS> _gc_share = {
        _gc_first, _gc_across, _gc_across - _gc_column, _gc_down - _gc_row, _gc_log, _gc_args.ones, {}, _gc_two};
    _gc::go(_gc_share.start, _gc_args.loops, _gc_args.n_loops - 2, _gc_rest);
#pragma unroll
    for (unsigned _gc_k = 0; _gc_k < _GC_TENSORS; _gc_k++) {
        _gc_share.start.of[_gc_k] += _gc_row * _gc_two[0].strides[_gc_k] + _gc_column * _gc_two[1].strides[_gc_k];
    }
    _gc::Places<_GC_TENSORS> _gc_places[_gc_ROUNDS];
    _gc_share.place(_gc_places, _gc_args.data);
    _gc_run<1, _gc_ROUNDS, false>(_gc_args, _gc_places, _gc_share);
}
