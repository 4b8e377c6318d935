// The codecs ONEBIT and SIGN: docs/NUMERICS.md says what is computed, src/codec/cuda/ how it is launched.
//
// A *run* is what shares a scale: a segment where it is encoded, a part where it is reduced. It is cut into *units* of
// 1024 elements, a warp's at a time, and *tiles*, a block's: an aligned power of two of units of one run, or what is
// left of it. Of several segments a table on the device says where every tile lies, so that many small ones are one
// launch.
//
// An encoder reads gradient and state, writes state and bits, and leaves the tile's sum. A launch behind it
// (finish.cuh) folds the sums of each run to its scale, and writes the chunks' headers. Which of two states is the
// valid one is looked up on the device: a graph can be launched again.
#include "decode.cuh"
#include "encode.cuh"
#include "finish.cuh"
#include "nodes.cuh"
#include "reduce.cuh"
#include "state.cuh"
