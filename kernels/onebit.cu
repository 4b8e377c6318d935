// Kernels of the codecs ONEBIT and SIGN. docs/NUMERICS.md defines what they compute; src/codec/cuda/ launches them.
//
// A *run* has one scale: a segment in an encode, a part in a reduce. It is cut into *units* of 1024 elements, one per
// warp, and *tiles*, one per thread block: an aligned power of two of units of one run, or the rest of the run. With
// several segments, a table on the device has the place of every tile, so that many small segments are one launch.
//
// An encode reads gradient and state, and writes state, bits and the tile's sum. The next launch (finish.cuh) folds the
// sums of each run to its scale, and writes the chunks' headers. The device looks up which of two states is the valid
// one, so a graph can be launched again.
#include "decode.cuh"
#include "encode.cuh"
#include "finish.cuh"
#include "nodes.cuh"
#include "reduce.cuh"
#include "state.cuh"
