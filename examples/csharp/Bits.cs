// Packs a mask and the signs of a gradient to bits and unpacks them, by P/Invoke.
//
//     mcs examples/csharp/Bits.cs -out:Bits.exe && mono Bits.exe
//
// or as the Program.cs of a .NET console project. An array is pinned while a tensor describes it, because the garbage
// collector may move it. gc_last_error() must be read on the calling thread: no await between the two.
using System;
using System.Linq;
using System.Runtime.InteropServices;

static class GradCodec
{
    const string Library = "libgradcodec.so.0";
    public const byte UInt = 1, Float = 2, Bool = 6; // kDLUInt and so on
    public const int Big = 0; // GC_BIT_ORDER_BIG

    [StructLayout(LayoutKind.Sequential)]
    public struct DLTensor
    {
        public IntPtr Data;
        public int DeviceType, DeviceId, Ndim;
        public byte Code, Bits;
        public ushort Lanes;
        public IntPtr Shape, Strides;
        public ulong ByteOffset;
    }

    [StructLayout(LayoutKind.Sequential)]
    public struct DLManagedTensor
    {
        public DLTensor Tensor;
        public IntPtr ManagerCtx, Deleter;
    }

    [DllImport(Library)] static extern IntPtr gc_last_error();
    [DllImport(Library)] public static extern long gc_chunk_bytes(long elements, UIntPtr chunks);
    [DllImport(Library)]
    public static extern int gc_pack_chunks(ref DLManagedTensor src, UIntPtr chunks, IntPtr[] @out);
    [DllImport(Library)]
    public static extern int gc_unpack_chunks(IntPtr[] chunks, UIntPtr n, long elements, out IntPtr @out);
    [DllImport(Library)]
    public static extern int gc_pack_signs_into(ref DLTensor src, int order, ref DLTensor dst, IntPtr stream);
    [DllImport(Library)]
    public static extern int gc_unpack_signs_into(
        ref DLTensor src, IntPtr scales, int order, ref DLTensor dst, IntPtr stream);
    [DllImport(Library)] public static extern void gc_tensor_free(IntPtr tensor);

    // Throws an exception with the library's message if a call failed.
    public static void Check(int status)
    {
        if (status != 0)
            throw new ArgumentException(Marshal.PtrToStringAnsi(gc_last_error()));
    }
}

// Describes an array as a CPU tensor; the array is pinned until Dispose.
sealed class View : IDisposable
{
    readonly GCHandle data, shape;
    public GradCodec.DLTensor Tensor;

    public View(Array array, byte code, byte bits, params long[] lengths)
    {
        data = GCHandle.Alloc(array, GCHandleType.Pinned);
        shape = GCHandle.Alloc(lengths, GCHandleType.Pinned);
        Tensor = new GradCodec.DLTensor {
            Data = data.AddrOfPinnedObject(), DeviceType = 1, Ndim = lengths.Length, Shape = shape.AddrOfPinnedObject(),
            Code = code, Bits = bits, Lanes = 1,
        };
    }

    public void Dispose() { data.Free(); shape.Free(); }
}

static class Bits
{
    static readonly UIntPtr Chunks = (UIntPtr)4;

    // Copies the bytes of a library tensor, and releases the tensor.
    static byte[] Take(IntPtr tensor)
    {
        var managed = Marshal.PtrToStructure<GradCodec.DLManagedTensor>(tensor);
        var bytes = new byte[Marshal.ReadInt64(managed.Tensor.Shape)];
        Marshal.Copy(managed.Tensor.Data, bytes, 0, bytes.Length);
        GradCodec.gc_tensor_free(tensor);
        return bytes;
    }

    static void Hold(string what, bool holds)
    {
        Console.WriteLine((holds ? "" : "WRONG: not true that ") + what);
        if (!holds)
            Environment.Exit(1);
    }

    static void Main()
    {
        byte[] mask = Enumerable.Range(0, 1000).Select(k => (byte)(k % 3 == 0 ? 1 : 0)).ToArray();
        var chunks = new IntPtr[4];
        using (var view = new View(mask, GradCodec.Bool, 8, mask.Length)) {
            var source = new GradCodec.DLManagedTensor { Tensor = view.Tensor };
            GradCodec.Check(GradCodec.gc_pack_chunks(ref source, Chunks, chunks));
        }
        IntPtr back;
        GradCodec.Check(GradCodec.gc_unpack_chunks(chunks, Chunks, mask.Length, out back));
        Hold("1000 bools in 4 chunks; unpacked, as they were", Take(back).SequenceEqual(mask));
        byte[][] bytes = chunks.Select(Take).ToArray();
        Hold($"a chunk has {bytes[0].Length} bytes, the first is 0x{bytes[0][0]:x2}", bytes[0][0] == 0x92);

        // The functions `_into` write to existing arrays. A sign is 1 for positive numbers and zeros.
        float[] gradient = mask.Select((_, k) => (float)Math.Sin(k)).ToArray(), signs = new float[gradient.Length];
        long chunkBytes = GradCodec.gc_chunk_bytes(gradient.Length, Chunks);
        using (var source = new View(gradient, GradCodec.Float, 32, gradient.Length))
        using (var packed = new View(new byte[4 * chunkBytes], GradCodec.UInt, 8, 4, chunkBytes))
        using (var target = new View(signs, GradCodec.Float, 32, signs.Length)) {
            GradCodec.Check(GradCodec.gc_pack_signs_into(
                ref source.Tensor, GradCodec.Big, ref packed.Tensor, IntPtr.Zero));
            GradCodec.Check(GradCodec.gc_unpack_signs_into(
                ref packed.Tensor, IntPtr.Zero, GradCodec.Big, ref target.Tensor, IntPtr.Zero));
            var expected = gradient.Select(x => x < 0 ? -1f : 1f);
            Hold("4000 bytes of float in 128: +1 and -1 come back", signs.SequenceEqual(expected));
            try {
                var floats = new GradCodec.DLManagedTensor { Tensor = source.Tensor };
                GradCodec.Check(GradCodec.gc_pack_chunks(ref floats, Chunks, chunks));
                Hold("floats are refused as truth", false);
            } catch (ArgumentException refusal) {
                Hold($"refused: {refusal.Message}", refusal.Message.Contains("gc_pack_signs"));
            }
        }
    }
}
