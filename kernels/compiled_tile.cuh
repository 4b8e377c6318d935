// Tiles of elementwise operations. They follow compiled.cuh.

namespace _gc {

// Addresses of elements of all tensors.
template <unsigned TENSORS>
struct Places {
    char *of[TENSORS];

    __device__ __forceinline__ char *at(void *const *, unsigned tensor) const { return of[tensor]; }
};

// Returns shared memory. There is one array for each size, regardless of the types that use it.
template <unsigned BYTES>
__device__ __forceinline__ void *memory_of_block() {
    __shared__ __align__(16) unsigned char memory[BYTES];
    return memory;
}

// Share of a thread block in the two innermost loops, with the functions of Line in compiled.cuh. Threads side by side
// have neighbours of a row of 2^log_width, and the rounds of a thread lie below each other, so no element takes a
// division of its own. TURNS: inputs whose neighbours lie below each other are `turned`: loaded in the order of memory,
// and exchanged in shared memory. A column then has no more elements than a thread block has threads.
template <unsigned TENSORS, unsigned ROUNDS, bool TURNS>
struct Tile {
    enum : unsigned { SIZE = _gc_THREADS * ROUNDS, LOG_THREADS = 8 };
    static_assert(1 << LOG_THREADS == _gc_THREADS, "a block");
    u64 first, pitch;  // number of the first element; elements from one row to the next
    unsigned columns, rows, log_width, turned;  // columns, rows: what is left of the loops
    Offsets<TENSORS> start;
    const Loop<TENSORS> *loops;  // the two innermost loops

    __device__ __forceinline__ unsigned column() const { return threadIdx.x & ((1u << log_width) - 1); }
    __device__ __forceinline__ unsigned row(unsigned round) const {
        return (threadIdx.x >> log_width) + round * (_gc_THREADS >> log_width);
    }
    __device__ __forceinline__ bool has(unsigned round) const { return column() < columns && row(round) < rows; }
    __device__ __forceinline__ u64 number(unsigned round) const { return first + row(round) * pitch + column(); }
    __device__ __forceinline__ bool is_turned(unsigned tensor) const { return TURNS && (turned >> tensor & 1); }

    __device__ __forceinline__ void place(Places<TENSORS> (&places)[ROUNDS], void *const *data) const {
#pragma unroll
        for (unsigned k = 0; k < TENSORS; k++) {
            const i64 below = loops[0].strides[k], next = shifted(below, LOG_THREADS - log_width);
            char *place = static_cast<char *>(data[k]) + start.of[k] + row(0) * below + column() * loops[1].strides[k];
#pragma unroll
            for (unsigned r = 0; r < ROUNDS; r++, place += next) places[r].of[k] = place;
        }
    }

    // Returns stride * 2^by. The compiler would turn a product into one with the sum of all factors, in each round.
    static __device__ __forceinline__ i64 shifted(i64 stride, unsigned by) {
        return static_cast<i64>(static_cast<u64>(stride) << by);
    }

    // Loads an input for all rounds. All threads of the thread block call it.
    template <typename T>
    __device__ __forceinline__ void turn(Neighbours<T, 1, true> (&to)[ROUNDS], const void *data,
                                         unsigned tensor) const {
        typedef typename Element<T>::Stored Stored;
        Stored *const tile = static_cast<Stored *>(memory_of_block<(SIZE + _gc_THREADS) * sizeof(Stored)>());
        const i64 below = loops[0].strides[tensor], beside = loops[1].strides[tensor];
        const unsigned width = (1u << log_width) + 1;  // odd: elements below each other are in different banks
        const unsigned log_height = 31 - __clz(SIZE) - log_width;
        const unsigned log_step = LOG_THREADS - log_height, step = 1u << log_step;
        const unsigned y = threadIdx.x & ((1u << log_height) - 1), x = threadIdx.x >> log_height;
        const char *from = static_cast<const char *>(data) + start.of[tensor] + y * below + x * beside;
        Stored elements[ROUNDS];
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) {
            if (y < rows && x + r * step < columns) elements[r] = *reinterpret_cast<const Stored *>(from);
            from += shifted(beside, log_step);
        }
        __syncthreads();  // the elements of the previous input have been read
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) {
            if (y < rows && x + r * step < columns) tile[y * width + x + r * step] = elements[r];
        }
        __syncthreads();
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) {
            if (has(r)) to[r].set(0, Read<T>::of(tile[row(r) * width + column()]));
        }
    }
};

// Divides a number by a count below 2^31, in place, and returns the remainder.
template <unsigned TENSORS>
__device__ __forceinline__ unsigned divide(unsigned &number, const Loop<TENSORS> &loop) {
    const unsigned count = static_cast<unsigned>(loop.count);
    unsigned above = __umulhi(number, static_cast<unsigned>(loop.reciprocal >> 32)), at = number - above * count;
    if (at >= count) above++, at -= count;
    number = above;
    return at;
}

}  // namespace _gc
