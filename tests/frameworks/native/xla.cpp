/* What the handlers for CUDA of gradcodec/xla.hpp hand to the library, without a GPU: the functions of gradcodec.h are
 * ones that write down what they get, and XLA is one GPU and one stream. */

#include <gradcodec/xla.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

GRADCODEC_XLA_HANDLERS();

static const int32_t card = 3;
static void *const stream = reinterpret_cast<void *>(uintptr_t{0x5eed});
static std::vector<std::string> calls;
static gc_status_t answer = GC_STATUS_OK;

static std::string of(const DLTensor *tensor)
{
    if (tensor == nullptr)
        return "NULL";
    const DLDevice on = tensor->device;
    std::string text = std::to_string(on.device_type) + ":" + std::to_string(on.device_id) + " [";
    for (int32_t i = 0; i < tensor->ndim; i++)
        text += std::to_string(tensor->shape[i]) + (i + 1 < tensor->ndim ? ", " : "");
    return text + "]";
}
static gc_status_t note(const std::string &call, void *on)
{
    calls.push_back(call + (on == stream ? " on the stream" : " on another stream"));
    return answer;
}

extern "C" {
const char *gc_last_error(void) { return "a sentence"; }
gc_status_t gc_prepare(DLDevice device)
{
    calls.push_back("prepare " + std::to_string(device.device_type) + ":" + std::to_string(device.device_id));
    return answer;
}
gc_status_t gc_copy_into(const DLTensor *src, DLTensor *dst, void *on)
{
    return note("copy " + of(src) + " to " + of(dst), on);
}
#define INTO(name)                                                                                                     \
    gc_status_t gc_##name##_into(const DLTensor *src, gc_bit_order_t, DLTensor *dst, void *on)                         \
    {                                                                                                                  \
        return note(#name " " + of(src) + " to " + of(dst), on);                                                       \
    }
INTO(pack_chunks)
INTO(pack_signs)
INTO(unpack_chunks)
#define ALONG(name)                                                                                                    \
    gc_status_t gc_##name##_into(const DLTensor *src, int32_t axis, gc_bit_order_t, DLTensor *dst, void *on)           \
    {                                                                                                                  \
        return note(#name " " + of(src) + " along " + std::to_string(axis) + " to " + of(dst), on);                    \
    }
ALONG(pack_bits)
ALONG(unpack_bits)
gc_status_t gc_unpack_signs_into(const DLTensor *src, const DLTensor *scales, gc_bit_order_t, DLTensor *dst, void *on)
{
    return note("unpack_signs " + of(src) + " by " + of(scales) + " to " + of(dst), on);
}
gc_status_t gc_vote_signs_into(const DLTensor *src, uint64_t turn, DLTensor *dst, void *on)
{
    return note("vote " + of(src) + " in turn " + std::to_string(turn) + " to " + of(dst), on);
}
gc_status_t gc_onebit_compress_into(const DLTensor *grad, DLTensor *error, gc_scale_t rule, DLTensor *dst,
                                    DLTensor *scale, DLTensor *room, void *on)
{
    const std::string of_what = of(grad) + " and " + of(error) + " by rule " + std::to_string(rule);
    return note("onebit " + of_what + " to " + of(dst) + ", " + of(scale) + " with " + of(room), on);
}
}

/* XLA: what a handler asks of it. */
struct XLA_FFI_Error {
    int code;
    std::string message;
};

static XLA_FFI_Api api_of_one_card()
{
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args *args) -> XLA_FFI_Error * {
        args->stream = stream;
        return nullptr;
    };
    api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args *args) -> XLA_FFI_Error * {
        args->device_ordinal = card;
        return nullptr;
    };
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args *args) {
        return new XLA_FFI_Error{args->errc, args->message};
    };
    return api;
}

struct Attribute {
    const char *name;
    XLA_FFI_DataType dtype;
    int64_t value;
};

/* The error's code and message, or "ok". */
static std::string call(XLA_FFI_Handler *handler, XLA_FFI_ExecutionStage stage, std::vector<std::vector<int64_t>> args,
                        std::vector<std::vector<int64_t>> rets, std::vector<Attribute> attributes)
{
    static const XLA_FFI_Api api = api_of_one_card();
    std::vector<XLA_FFI_Buffer> buffers;
    buffers.reserve(args.size() + rets.size());
    const auto pointers = [&](std::vector<std::vector<int64_t>> &shapes) {
        std::vector<void *> all;
        for (auto &shape : shapes) {
            buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, nullptr,
                               static_cast<int64_t>(shape.size()), shape.data()});
            all.push_back(&buffers.back());
        }
        return all;
    };
    std::vector<void *> of_args = pointers(args), of_rets = pointers(rets), values;
    std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> types(attributes.size(), XLA_FFI_AttrType_SCALAR);
    std::vector<XLA_FFI_Scalar> scalars;
    std::vector<XLA_FFI_ByteSpan> spans;
    std::vector<XLA_FFI_ByteSpan *> names;
    scalars.reserve(attributes.size());
    spans.reserve(attributes.size());
    for (Attribute &attribute : attributes) {
        scalars.push_back({attribute.dtype, &attribute.value});
        spans.push_back({attribute.name, std::string(attribute.name).size()});
        values.push_back(&scalars.back());
        names.push_back(&spans.back());
    }
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = stage;
    const auto n_args = static_cast<int64_t>(args.size()), n_rets = static_cast<int64_t>(rets.size());
    const auto n_attributes = static_cast<int64_t>(values.size());
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, n_args, arg_types.data(), of_args.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, n_rets, ret_types.data(), of_rets.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, n_attributes, types.data(), names.data(), values.data()};
    XLA_FFI_Error *error = handler(&frame);
    if (error == nullptr)
        return "ok";
    const std::string said = std::to_string(error->code) + ": " + error->message;
    delete error;
    return said;
}

static void expect(const std::string &what, const std::string &expected)
{
    if (what != expected) {
        std::printf("WRONG: %s\n  not: %s\n", what.c_str(), expected.c_str());
        std::exit(EXIT_FAILURE);
    }
}
static std::string last()
{
    std::string all;
    for (const std::string &call : calls)
        all += call + "; ";
    calls.clear();
    return all;
}

int main()
{
    const XLA_FFI_ExecutionStage run = XLA_FFI_ExecutionStage_EXECUTE, initialize = XLA_FFI_ExecutionStage_INITIALIZE;
    const Attribute order = {"order", XLA_FFI_DataType_S32, 0}, axis = {"axis", XLA_FFI_DataType_S32, -1};

    expect(call(gradcodec_pack_signs_cuda, run, {{5, 7}}, {{2, 3}}, {order}), "ok");
    expect(last(), "pack_signs 2:3 [5, 7] to 2:3 [2, 3] on the stream; ");
    expect(call(gradcodec_pack_chunks_cuda, run, {{8}}, {{1, 1}}, {order}), "ok");
    expect(last(), "pack_chunks 2:3 [8] to 2:3 [1, 1] on the stream; ");
    expect(call(gradcodec_unpack_chunks_cuda, run, {{1, 1}}, {{8}}, {order}), "ok");
    expect(last(), "unpack_chunks 2:3 [1, 1] to 2:3 [8] on the stream; ");
    expect(call(gradcodec_unpack_signs_cuda, run, {{1, 1}}, {{8}}, {order}), "ok");
    expect(last(), "unpack_signs 2:3 [1, 1] by NULL to 2:3 [8] on the stream; ");
    expect(call(gradcodec_unpack_signs_cuda, run, {{4, 1}, {4}}, {{8}}, {order}), "ok");
    expect(last(), "unpack_signs 2:3 [4, 1] by 2:3 [4] to 2:3 [8] on the stream; ");
    expect(call(gradcodec_pack_bits_cuda, run, {{8}}, {{1}}, {axis, order}), "ok");
    expect(last(), "pack_bits 2:3 [8] along -1 to 2:3 [1] on the stream; ");
    expect(call(gradcodec_unpack_bits_cuda, run, {{1}}, {{8}}, {axis, order}), "ok");
    expect(last(), "unpack_bits 2:3 [1] along -1 to 2:3 [8] on the stream; ");
    expect(call(gradcodec_vote_signs_cuda, run, {{3, 9}}, {{9}}, {{"turn", XLA_FFI_DataType_U64, 5}}), "ok");
    expect(last(), "vote 2:3 [3, 9] in turn 5 to 2:3 [9] on the stream; ");
    const std::vector<std::vector<int64_t>> results = {{1, 2}, {1}, {16}, {64}};
    const Attribute rule = {"rule", XLA_FFI_DataType_S32, 1};
    expect(call(gradcodec_onebit_compress_cuda, run, {{16}, {16}}, results, {rule}), "ok");
    expect(last(), "copy 2:3 [16] to 2:3 [16] on the stream; "
                   "onebit 2:3 [16] and 2:3 [16] by rule 1 to 2:3 [1, 2], 2:3 [1] with 2:3 [64] on the stream; ");
    expect(call(gradcodec_prepare_cuda, initialize, {{5, 7}}, {{2, 3}}, {order}), "ok"); /* of any call */
    expect(last(), "prepare 2:3; ");
    std::printf("every handler works on XLA's card and stream\n");

    const struct {
        gc_status_t status;
        XLA_FFI_Error_Code code;
    } codes[] = {
        {GC_STATUS_SHAPE_MISMATCH, XLA_FFI_Error_Code_INVALID_ARGUMENT},
        {GC_STATUS_OUT_OF_MEMORY, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED},
        {GC_STATUS_DRIVER_UNAVAILABLE, XLA_FFI_Error_Code_UNAVAILABLE},
        {GC_STATUS_CONTEXT_LOST, XLA_FFI_Error_Code_INTERNAL},
    };
    for (const auto &one : codes) {
        answer = one.status;
        expect(call(gradcodec_onebit_compress_cuda, run, {{16}, {16}}, results, {rule}),
               std::to_string(one.code) + ": a sentence");
        expect(last(), "copy 2:3 [16] to 2:3 [16] on the stream; "); /* and no compression of what was not copied */
    }
    std::printf("a failure has a code of XLA's and the library's sentence\n");
    return EXIT_SUCCESS;
}
