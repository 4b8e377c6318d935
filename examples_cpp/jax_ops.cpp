/* gradcodec's handlers for jax.jit, as a library for jax_ops.py, which builds it. */

#include <gradcodec/xla.hpp>

GRADCODEC_XLA_HANDLERS();
