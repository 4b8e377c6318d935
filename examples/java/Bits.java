import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.StructLayout;
import java.lang.foreign.SymbolLookup;
import java.lang.invoke.MethodHandle;
import java.util.Arrays;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BOOLEAN;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static java.lang.foreign.ValueLayout.JAVA_SHORT;

/**
 * Packs and unpacks a mask and the signs of a gradient, by Java's foreign function and memory interface (Java 22):
 *
 *     java --enable-native-access=ALL-UNNAMED examples/java/Bits.java
 *
 * gc_last_error() returns the failure of the calling thread. The failure and its message are fetched in two calls, and
 * a virtual thread might change its carrier thread in between: call from a platform thread.
 */
public final class Bits {
    private static final int CPU = 1, UINT = 1, FLOAT = 2, BOOL = 6, BIG = 0; // kDLCPU and so on, GC_BIT_ORDER_BIG

    private static final StructLayout DL_TENSOR = MemoryLayout.structLayout(
        ADDRESS.withName("data"), JAVA_INT.withName("device_type"), JAVA_INT.withName("device_id"),
        JAVA_INT.withName("ndim"), JAVA_BYTE.withName("code"), JAVA_BYTE.withName("bits"), JAVA_SHORT.withName("lanes"),
        ADDRESS.withName("shape"), ADDRESS.withName("strides"), JAVA_LONG.withName("byte_offset"));
    private static final StructLayout DL_MANAGED_TENSOR = MemoryLayout.structLayout(
        DL_TENSOR.withName("dl_tensor"), ADDRESS.withName("manager_ctx"), ADDRESS.withName("deleter"));

    private final SymbolLookup library;
    private final MethodHandle lastError, chunkBytes, packChunks, unpackChunks, packSignsInto, unpackSignsInto, free;

    private Bits(String path) {
        library = SymbolLookup.libraryLookup(path, Arena.global());
        lastError = function("gc_last_error", FunctionDescriptor.of(ADDRESS));
        chunkBytes = function("gc_chunk_bytes", FunctionDescriptor.of(JAVA_LONG, JAVA_LONG, JAVA_LONG));
        packChunks = function("gc_pack_chunks", FunctionDescriptor.of(JAVA_INT, ADDRESS, JAVA_LONG, ADDRESS));
        unpackChunks =
            function("gc_unpack_chunks", FunctionDescriptor.of(JAVA_INT, ADDRESS, JAVA_LONG, JAVA_LONG, ADDRESS));
        packSignsInto =
            function("gc_pack_signs_into", FunctionDescriptor.of(JAVA_INT, ADDRESS, JAVA_INT, ADDRESS, ADDRESS));
        unpackSignsInto = function("gc_unpack_signs_into",
            FunctionDescriptor.of(JAVA_INT, ADDRESS, ADDRESS, JAVA_INT, ADDRESS, ADDRESS));
        free = function("gc_tensor_free", FunctionDescriptor.ofVoid(ADDRESS));
    }

    private MethodHandle function(String name, FunctionDescriptor type) {
        return Linker.nativeLinker().downcallHandle(library.findOrThrow(name), type);
    }

    /** Turns a failure into an exception with the library's message. */
    private void check(int status) throws Throwable {
        if (status != 0) {
            MemorySegment sentence = (MemorySegment) lastError.invokeExact();
            throw new IllegalArgumentException(sentence.reinterpret(Long.MAX_VALUE).getString(0));
        }
    }

    /** Describes memory of an arena as a DLManagedTensor, which begins with the DLTensor that `_into` functions use. */
    private static MemorySegment tensor(Arena arena, MemorySegment data, int code, int bits, long... shape) {
        MemorySegment tensor = arena.allocate(DL_MANAGED_TENSOR); // zeros: no strides, no offset, no deleter
        tensor.set(ADDRESS, 0, data);
        tensor.set(JAVA_INT, 8, CPU);
        tensor.set(JAVA_INT, 16, shape.length);
        tensor.set(JAVA_BYTE, 20, (byte) code);
        tensor.set(JAVA_BYTE, 21, (byte) bits);
        tensor.set(JAVA_SHORT, 22, (short) 1);
        tensor.set(ADDRESS, 24, arena.allocateFrom(JAVA_LONG, shape));
        return tensor;
    }

    /** Returns a tensor of the library, which the arena releases when it closes. */
    private MemorySegment owned(Arena arena, MemorySegment pointer) {
        return pointer.reinterpret(DL_MANAGED_TENSOR.byteSize(), arena, tensor -> {
            try {
                free.invokeExact(tensor);
            } catch (Throwable impossible) {
                throw new AssertionError(impossible);
            }
        });
    }

    private static byte[] bytes(MemorySegment tensor) {
        long length = tensor.get(ADDRESS, 24).reinterpret(8).get(JAVA_LONG, 0); // shape[0]
        return tensor.get(ADDRESS, 0).reinterpret(length).toArray(JAVA_BYTE);
    }

    private void maskThereAndBack(int n, int chunks) throws Throwable {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment mask = arena.allocate(n);
            MemorySegment out = arena.allocate(ADDRESS, chunks), back = arena.allocate(ADDRESS);
            for (int k = 0; k < n; k++)
                mask.set(JAVA_BOOLEAN, k, k % 3 == 0);
            check((int) packChunks.invokeExact(tensor(arena, mask, BOOL, 8, n), (long) chunks, out));
            MemorySegment first = owned(arena, out.get(ADDRESS, 0));
            for (int k = 1; k < chunks; k++)
                owned(arena, out.getAtIndex(ADDRESS, k));
            check((int) unpackChunks.invokeExact(out, (long) chunks, (long) n, back));
            boolean same = Arrays.equals(bytes(owned(arena, back.get(ADDRESS, 0))), mask.toArray(JAVA_BYTE));
            System.out.printf("%d bools: %d chunks of %d bytes, the first byte is 0x%02x; unpacked, as they were: %b%n",
                n, chunks, bytes(first).length, bytes(first)[0], same);
            if (bytes(first)[0] != (byte) 0x92 || !same) // elements 0, 3 and 6
                throw new AssertionError();
        }
    }

    private void signsThereAndBack(int n, int chunks) throws Throwable {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment gradient = arena.allocate(JAVA_FLOAT, n), signs = arena.allocate(JAVA_FLOAT, n);
            for (int k = 0; k < n; k++)
                gradient.setAtIndex(JAVA_FLOAT, k, (float) Math.sin(k));
            long chunkBytes = (long) this.chunkBytes.invokeExact((long) n, (long) chunks);
            MemorySegment source = tensor(arena, gradient, FLOAT, 32, n);
            MemorySegment packed = tensor(arena, arena.allocate(chunks * chunkBytes), UINT, 8, chunks, chunkBytes);
            MemorySegment none = MemorySegment.NULL; // no scales; no stream on the CPU
            check((int) packSignsInto.invokeExact(source, BIG, packed, none));
            check((int) unpackSignsInto.invokeExact(packed, none, BIG, tensor(arena, signs, FLOAT, 32, n), none));
            for (int k = 0; k < n; k++)
                if (signs.getAtIndex(JAVA_FLOAT, k) != (gradient.getAtIndex(JAVA_FLOAT, k) < 0 ? -1 : 1))
                    throw new AssertionError(k);
            System.out.printf("%d bytes of float in %d: +1 and -1 come back%n", 4 * n, chunks * chunkBytes);
            try {
                check((int) packChunks.invokeExact(source, (long) chunks, arena.allocate(ADDRESS, chunks)));
                throw new AssertionError("floats were taken as truth");
            } catch (IllegalArgumentException refusal) {
                System.out.println("refused: " + refusal.getMessage());
            }
        }
    }

    public static void main(String[] arguments) throws Throwable {
        Bits gradcodec = new Bits(arguments.length > 0 ? arguments[0] : "libgradcodec.so.0");
        gradcodec.maskThereAndBack(1000, 4);
        gradcodec.signsThereAndBack(1000, 4);
    }
}
