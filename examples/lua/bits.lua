-- GradCodec from LuaJIT: all declarations come from gradcodec.cdef.h.
--
--     luajit examples/lua/bits.lua
--
-- Loads the installed libgradcodec.so.0, or the file GRADCODEC_LIBRARY, and reads the declarations in ../../include or
-- in the folder passed as argument.

local ffi = require("ffi")

local include = arg[1] or arg[0]:gsub("[^/]*$", "") .. "../../include"
ffi.cdef(assert(io.open(include .. "/gradcodec.cdef.h")):read("*a"))
local lib = ffi.load(os.getenv("GRADCODEC_LIBRARY") or "libgradcodec.so.0")

-- Raises a Lua error with the library's message if a call failed.
local function check(status)
    if status ~= lib.GC_STATUS_OK then error(ffi.string(lib.gc_last_error()), 2) end
end

-- Describes memory as a tensor. LuaJIT frees what no variable references, so the result also holds what the tensor
-- points to: keep it in a variable until the call has returned.
local function view(memory, code, bits, ...)
    local shape = ffi.new("int64_t[?]", select("#", ...), ...)
    local tensor = ffi.new("DLTensor", { memory, { lib.kDLCPU, 0 }, select("#", ...), { code, bits, 1 }, shape })
    return { tensor = tensor, memory = memory, shape = shape }
end

-- Packs into new tensors; ffi.gc releases each with its variable.
local function pack_chunks(source, n_chunks)
    local out = ffi.new("DLManagedTensor *[?]", n_chunks)
    check(lib.gc_pack_chunks(ffi.new("DLManagedTensor", { source.tensor }), n_chunks, out))
    local chunks = {}
    for k = 1, n_chunks do chunks[k] = ffi.gc(out[k - 1], lib.gc_tensor_free) end
    return chunks
end

local N, CHUNKS = 1000, 4
local mask, gradient = ffi.new("bool[?]", N), ffi.new("float[?]", N)
for k = 0, N - 1 do
    mask[k] = k % 3 == 0
    gradient[k] = math.sin(k)
end

local chunks = pack_chunks(view(mask, lib.kDLBool, 8, N), CHUNKS)
local bytes = ffi.cast("uint8_t *", chunks[1].dl_tensor.data)
print(("%d bools: %d chunks of %d bytes, the first byte is 0x%02x"):format(
    N, #chunks, tonumber(chunks[1].dl_tensor.shape[0]), bytes[0]))
assert(bytes[0] == 0x92) -- elements 0, 3 and 6

local pointers = ffi.new("DLManagedTensor *[?]", CHUNKS, chunks)
local out = ffi.new("DLManagedTensor *[1]")
check(lib.gc_unpack_chunks(pointers, CHUNKS, N, out))
local back = ffi.gc(out[0], lib.gc_tensor_free)
local truth = ffi.cast("bool *", back.dl_tensor.data)
for k = 0, N - 1 do assert(truth[k] == mask[k]) end
print("unpacked, as they were: true")

-- The functions `_into` write to this program's memory. A sign is 1 for positive numbers and zeros.
local chunk_bytes = tonumber(lib.gc_chunk_bytes(N, CHUNKS))
local packed = view(ffi.new("uint8_t[?]", CHUNKS * chunk_bytes), lib.kDLUInt, 8, CHUNKS, chunk_bytes)
local source, signs = view(gradient, lib.kDLFloat, 32, N), view(ffi.new("float[?]", N), lib.kDLFloat, 32, N)
check(lib.gc_pack_signs_into(source.tensor, lib.GC_BIT_ORDER_BIG, packed.tensor, nil))
check(lib.gc_unpack_signs_into(packed.tensor, nil, lib.GC_BIT_ORDER_BIG, signs.tensor, nil))
for k = 0, N - 1 do assert(signs.memory[k] == (gradient[k] < 0 and -1 or 1)) end
print(("%d bytes of float, %d of signs: +1 and -1 come back"):format(4 * N, CHUNKS * chunk_bytes))

local good, sentence = pcall(pack_chunks, source, CHUNKS)
print("refused: " .. tostring(sentence))
assert(not good and sentence:find("gc_pack_signs", 1, true))
assert(lib.GC_AXIS_NONE == -2 ^ 31)
