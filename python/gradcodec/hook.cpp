// The communication hook of PyTorch's DistributedDataParallel, without Python in a step that is like the one before.
// _torch_native.py compiles this file, and _torch_ddp.py uses it.
//
// DDP calls the hook for each bucket of gradients, in the order of their indices. Buckets wait until they have as many
// bytes as an exchange is to have. Then one all-reduce handle takes the tensors of all of them, on a stream of its own.
// Each bucket's Future completes when its exchange is enqueued.
//
// The hook calls Python, with the GIL held, if a bucket is new or has changed, in the first step, if a loss scale is in
// use, and if a call fails. The state of a step lies in `State`, which Python reads and writes between its calls.
//
// The functions of libgradcodec are called by address, so that there is one copy of it, the one that Python has loaded.
// Nothing here needs CUDA's headers: streams and events are those of c10 for any device.

#include <ATen/dlpack.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace py = pybind11;

struct gc_allreduce_t;
struct gc_comm_t;

namespace {

// Function types of gradcodec.h.
using Run = int32_t (*)(gc_allreduce_t *, DLTensor *const *, size_t, const DLTensor *, const DLTensor *, void *);
using Flags = int32_t (*)(gc_allreduce_t *, DLTensor *, void *);
using Commit = int32_t (*)(gc_allreduce_t *, const DLTensor *, void *);
using AsyncError = int32_t (*)(const gc_comm_t *);
constexpr int32_t BAD = 1 | 2;  // GC_FLAG_CORRUPT and GC_FLAG_NONFINITE

constexpr char GONE[] = "gradcodec: the Compression of this DistributedDataParallel was released";

#ifdef GRADCODEC_H  // a test includes it first
static_assert(std::is_same_v<Run, decltype(&gc_allreduce_run)> && std::is_same_v<Flags, decltype(&gc_allreduce_flags)>);
static_assert(std::is_same_v<Commit, decltype(&gc_allreduce_commit)>);
static_assert(std::is_same_v<AsyncError, decltype(&gc_comm_async_error)>);
static_assert(BAD == (GC_FLAG_CORRUPT | GC_FLAG_NONFINITE) && GC_STATUS_OK == 0);
#endif

using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

// Returns whether Python can be called: false while the interpreter shuts down.
bool python_runs() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsInitialized() && !Py_IsFinalizing();
#else
    return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

DLDevice device_of(const c10::Device &device) {
    return device.is_cuda() ? DLDevice{kDLCUDA, device.index()} : DLDevice{kDLCPU, 0};
}

DLDataType dtype_of(at::ScalarType type) {
    switch (type) {
        case at::kHalf: return {kDLFloat, 16, 1};
        case at::kBFloat16: return {kDLBfloat, 16, 1};
        default: return {kDLFloat, 32, 1};
    }
}

// Describes one dimension of `*count` elements. `count` must stay valid.
DLTensor described(void *data, DLDevice device, DLDataType dtype, int64_t *count) {
    DLTensor tensor{};
    tensor.data = data, tensor.device = device, tensor.ndim = 1, tensor.dtype = dtype, tensor.shape = count;
    return tensor;
}

// A bucket that DDP has called the hook for, and that has not been exchanged.
struct Bucket {
    size_t number;
    at::Tensor buffer;
    std::vector<at::Tensor> parameters;
    FuturePointer done;
};

// An all-reduce handle, which Python owns, for the tensors of the buckets that are exchanged together.
class Exchange {
public:
    Exchange(uintptr_t handle, std::vector<int64_t> counts, bool transactional, bool direct, bool reported,
             int64_t sent, std::optional<c10::Stream> stream, uintptr_t stream_number)
        : handle(reinterpret_cast<gc_allreduce_t *>(handle)), transactional(transactional), direct(direct),
          reported(reported), sent(sent), stream(stream), stream_number(reinterpret_cast<void *>(stream_number)),
          counts_(std::move(counts)) {}
    Exchange(const Exchange &) = delete;

    // Records the buckets that Python has made the handle for.
    void take(const std::vector<Bucket> &buckets) {
        const at::Tensor &first = buckets[0].buffer;
        dtype_ = first.scalar_type();
        elements_.clear(), parameters_.clear(), tensors_.clear(), list_.clear();
        for (const Bucket &bucket : buckets) {
            elements_.push_back(bucket.buffer.numel());
            auto &own = parameters_.emplace_back();
            for (const at::Tensor &parameter : bucket.parameters)
                own.push_back(parameter.unsafeGetTensorImpl());
        }
        for (int64_t &count : counts_)
            tensors_.push_back(described(nullptr, device_of(first.device()), dtype_of(dtype_), &count));
        for (DLTensor &tensor : tensors_)
            list_.push_back(&tensor);
    }

    // Returns whether the handle is for these buckets.
    bool is_of(const std::vector<Bucket> &buckets, bool is_last) const {
        if (buckets.size() != elements_.size() || (is_last && direct))
            return false;
        for (size_t k = 0; k < buckets.size(); k++) {
            const Bucket &bucket = buckets[k];
            if (bucket.buffer.numel() != elements_[k] || bucket.buffer.scalar_type() != dtype_ ||
                !bucket.buffer.is_contiguous() || bucket.parameters.size() != parameters_[k].size())
                return false;
            for (size_t i = 0; i < bucket.parameters.size(); i++)
                if (bucket.parameters[i].unsafeGetTensorImpl() != parameters_[k][i])
                    return false;
        }
        return true;
    }

    // Returns the tensors of the buckets, one after the other.
    const std::vector<DLTensor *> &at(const std::vector<Bucket> &buckets) {
        size_t item = c10::elementSize(dtype_), tensor = 0;
        for (size_t k = 0; k < buckets.size(); k++) {
            char *data = static_cast<char *>(buckets[k].buffer.mutable_data_ptr());
            for (size_t i = 0; i < parameters_[k].size(); i++, tensor++) {
                tensors_[tensor].data = data;
                data += counts_[tensor] * item;
            }
        }
        return list_;
    }

    gc_allreduce_t *const handle;
    const bool transactional;  // a step ends with a commit
    const bool direct;         // over PyTorch's NCCL communicator, which PyTorch may have ended
    const bool reported;       // to Python after each run: to its watch, or because the exchange runs in Python, where
                               // a signal handler may have raised
    const int64_t sent;        // bytes of a run, unless the exchange itself counts them
    const std::optional<c10::Stream> stream;
    void *const stream_number;
    bool in_step = false;

private:
    std::vector<int64_t> counts_, elements_;  // of tensors, of buckets
    std::vector<std::vector<c10::TensorImpl *>> parameters_;
    std::vector<DLTensor> tensors_;
    std::vector<DLTensor *> list_;
    at::ScalarType dtype_ = at::kFloat;
};

class State;

// The object that the hook refers to: DDP keeps a hook for good, and Python puts another State here.
class Slot {
public:
    Slot(const py::object &owner, const py::object &group)
        : owner_(py::weakref(owner).release().ptr()),
          group_(c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group.cast<c10d::ProcessGroup &>())) {}
    Slot(const Slot &) = delete;
    ~Slot() {
        if (python_runs()) {
            py::gil_scoped_acquire gil;
            Py_DECREF(owner_);
        }
    }

    void take(const std::shared_ptr<State> &state) {
        std::lock_guard lock(mutex_);
        state_ = state;
    }

    std::shared_ptr<State> state() const {
        std::lock_guard lock(mutex_);
        return state_.lock();
    }

    // Calls a method of the Python object that owns this. Throws what the method raises.
    template <typename... Arguments> void call(const char *method, Arguments &&...arguments) const {
        py::gil_scoped_acquire gil;
        py::object owner = py::reinterpret_borrow<py::object>(owner_)();
        TORCH_CHECK(!owner.is_none(), GONE);
        owner.attr(method)(std::forward<Arguments>(arguments)...);
    }

    // Computes the mean without compression.
    FuturePointer plain(at::Tensor &buffer) const {
        std::vector<at::Tensor> tensors{buffer.div_(group_->getSize())};
        return group_->allreduce(tensors)->getFuture();
    }

private:
    PyObject *owner_;  // a weak reference: the owner owns this
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
    mutable std::mutex mutex_;
    std::weak_ptr<State> state_;
};

// The state of a model's steps, and the exchanges by the index of their first bucket.
class State {
public:
    State(uintptr_t run, uintptr_t flags, uintptr_t commit, uintptr_t async_error, int64_t least_bytes,
          size_t all_tensors, std::optional<c10::Stream> stream, at::Tensor taken_back)
        : run_(reinterpret_cast<Run>(run)), flags_(reinterpret_cast<Flags>(flags)),
          commit_(reinterpret_cast<Commit>(commit)), async_error_(reinterpret_cast<AsyncError>(async_error)),
          least_bytes_(least_bytes), all_tensors_(all_tensors), stream_(stream), taken_back_(std::move(taken_back)) {
        if (stream_)
            event_ = std::make_unique<c10::Event>(stream_->device_type());
    }
    State(const State &) = delete;
    ~State() {
        if (!python_runs())
            static_cast<void>(event_.release());  // the GPU's driver may have ended
    }

    // --- for Python

    bool pending = false, complete = false, closed = false, measure = true;
    bool in_python = false;  // Python runs all exchanges
    bool scales = false;     // there is a GradScaler
    std::optional<at::Tensor> errors_scale;
    std::vector<uintptr_t> checked;  // communicators that report failures later
    std::atomic<int64_t> bytes_sent{0};

    std::shared_ptr<Exchange> put(size_t first, std::shared_ptr<Exchange> exchange) {
        std::unique_lock lock = locked();
        return exchanges_[first] = std::move(exchange);
    }

    void remove(size_t first) {
        std::unique_lock lock = locked();
        exchanges_.erase(first);
    }

    // --- for the hook

    FuturePointer reduce(c10d::GradBucket &bucket, const Slot &slot) {
        std::lock_guard lock(mutex_);
        const at::Tensor &buffer = bucket.getBufferRef();
        std::vector<at::Tensor> parameters = bucket.getParameters();
        // In the first pass of a static graph DDP gives all buckets the index 0, one after the other, and none is the last.
        bool is_next = bucket.getIndex() == 0 && buckets_ > 0 && !is_over_ && !parameters[0].is_same(first_);
        size_t number = is_next ? buckets_ : bucket.getIndex();
        if (number == 0) {  // the waiting buckets are of a pass that broke off
            waiting_.clear();
            waiting_bytes_ = 0, tensors_ = 0, first_ = parameters[0];
        }
        buckets_ = number + 1, tensors_ += parameters.size();
        is_over_ = bucket.isLast() || tensors_ == all_tensors_;
        if (!waiting_.empty() && waiting_[0].buffer.scalar_type() != buffer.scalar_type())
            exchange(slot, false);
        std::vector<c10::Device> devices;
        if (stream_) {
            devices.push_back(stream_->device());
            event_->record(c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device()));
            event_->block(*stream_);
        }
        auto done = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
        waiting_.push_back({number, buffer, std::move(parameters), done});
        waiting_bytes_ += static_cast<int64_t>(buffer.nbytes());
        if (is_over_ || waiting_bytes_ >= least_bytes_)
            exchange(slot, is_over_);
        return done;
    }

private:
    // Locks the state for a change by Python: from within a call of this thread, but not during another thread's call.
    std::unique_lock<std::recursive_mutex> locked() {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock)
            throw std::runtime_error("the hook is in use by a backward pass: change it afterwards");
        return lock;
    }

    // Exchanges the buckets that wait.
    void exchange(const Slot &slot, bool is_last) {
        std::vector<Bucket> buckets = std::exchange(waiting_, {});
        waiting_bytes_ = 0;
        size_t first = buckets[0].number;
        std::optional<c10::StreamGuard> guard;
        if (stream_)
            guard.emplace(*stream_);
        auto found = exchanges_.find(first);
        if (in_python || measure || found == exchanges_.end() || !found->second->is_of(buckets, is_last)) {
            in_python_once(slot, first, buckets, is_last);
        } else {
            if (first == 0)
                begin(slot);
            run(slot, *found->second, first, buckets);
        }
        if (is_last)
            complete = true, measure = false;
        for (Bucket &bucket : buckets)
            bucket.done->markCompleted(bucket.buffer);  // covers the work on the stream so far
    }

    // Lets Python exchange, which may make or replace the handle.
    void in_python_once(const Slot &slot, size_t first, const std::vector<Bucket> &buckets, bool is_last) {
        {
            py::gil_scoped_acquire gil;
            py::list buffers, parameters;
            for (const Bucket &bucket : buckets) {
                buffers.append(py::cast(bucket.buffer));
                parameters.append(py::cast(bucket.parameters));
            }
            slot.call("exchange", first, buffers, parameters, is_last);
        }
        auto found = exchanges_.find(first);
        if (found != exchanges_.end())
            found->second->take(buckets);
    }

    void run(const Slot &slot, Exchange &own, size_t first, const std::vector<Bucket> &buckets) {
        own.in_step = true;
        if (own.direct)
            slot.call("check_direct");
        const std::vector<DLTensor *> &tensors = own.at(buckets);
        check(slot, first, run_(own.handle, tensors.data(), tensors.size(), nullptr, nullptr, own.stream_number));
        bytes_sent += own.sent;
        if (own.reported)
            slot.call("enqueued", first);
    }

    // Ends the previous step, and begins one.
    void begin(const Slot &slot) {
        bool failed = false;
        for (uintptr_t comm : checked)
            failed = failed || async_error_(reinterpret_cast<const gc_comm_t *>(comm)) != 0;
        if (failed || scales || errors_scale || (pending && !complete)) {
            slot.call("begin");
            return;
        }
        if (pending)
            end(slot);
        pending = true, complete = false;
    }

    // Takes the step back if a handle has flagged a non-finite value. The device decides, and the host does not wait.
    void end(const Slot &slot) {
        std::vector<std::pair<size_t, Exchange *>> step;
        for (auto &[first, each] : exchanges_)
            if (std::exchange(each->in_step, false))
                step.emplace_back(first, each.get());
        pending = false;
        c10::InferenceMode no_inference(false);
        at::NoGradGuard no_grad;
        int64_t handles = static_cast<int64_t>(step.size()), one = 1;
        if (!met_.defined() || met_.numel() != handles) {
            met_ = at::zeros({handles}, taken_back_.options().dtype(at::kInt));
            bad_ = at::zeros_like(met_);
            undone_ = at::zeros({1}, met_.options().dtype(at::kBool));
        }
        DLDevice device = device_of(met_.device());
        DLTensor undone = described(undone_.data_ptr(), device, {kDLBool, 8, 1}, &one);
        for (int64_t k = 0; k < handles; k++) {
            auto [first, own] = step[k];
            DLTensor met = described(met_.data_ptr<int32_t>() + k, device, {kDLUInt, 32, 1}, &one);
            check(slot, first, flags_(own->handle, &met, own->stream_number));
        }
        bool is_undone = true;
        if (stream_) {
            join(step, true);
            at::bitwise_and_out(bad_, met_, BAD);
            at::any_out(undone_, bad_, 0, true);
            join(step, false);
        } else {
            const int32_t *met = met_.const_data_ptr<int32_t>();
            is_undone = std::any_of(met, met + handles, [](int32_t flags) { return (flags & BAD) != 0; });
            *undone_.data_ptr<bool>() = is_undone;
        }
        for (auto [first, own] : step)
            if (own->transactional)
                check(slot, first, commit_(own->handle, &undone, own->stream_number));
        if (is_undone)
            taken_back_.add_(undone_);
    }

    // Makes the stream wait for those of the exchanges, or these for the stream.
    void join(const std::vector<std::pair<size_t, Exchange *>> &step, bool to_stream) {
        for (auto [first, own] : step)
            if (*own->stream != *stream_) {
                event_->record(to_stream ? *own->stream : *stream_);
                event_->block(to_stream ? *stream_ : *own->stream);
            }
    }

    static void check(const Slot &slot, size_t first, int32_t status) {
        if (status != 0)
            slot.call("failed", first, status);
    }

    const Run run_;
    const Flags flags_;
    const Commit commit_;
    const AsyncError async_error_;
    const int64_t least_bytes_;
    const size_t all_tensors_;  // number of tensors in DDP's buckets
    const std::optional<c10::Stream> stream_;
    at::Tensor taken_back_, met_, bad_, undone_;
    std::unique_ptr<c10::Event> event_;
    std::recursive_mutex mutex_;
    std::map<size_t, std::shared_ptr<Exchange>> exchanges_;
    std::vector<Bucket> waiting_;
    int64_t waiting_bytes_ = 0;
    size_t buckets_ = 0, tensors_ = 0;  // of this pass so far
    at::Tensor first_;                  // parameter of this pass
    bool is_over_ = true;               // the pass
};

class Hook : public c10d::CommHookInterface {
public:
    explicit Hook(std::shared_ptr<Slot> slot) : slot_(std::move(slot)) {}

    FuturePointer runHook(c10d::GradBucket &bucket) override {
        std::optional<py::gil_scoped_release> release;
        if (PyGILState_Check())
            release.emplace();
        std::shared_ptr<State> state = slot_->state();
        TORCH_CHECK(state, GONE);
        if (state->closed)
            return slot_->plain(bucket.getBufferRef());
        try {
            return state->reduce(bucket, *slot_);
        } catch (py::error_already_set &raised) {
            py::gil_scoped_acquire gil;
            raised.restore();
            python_error carried;  // autograd carries this from its thread to the caller's
            carried.persist();
            throw carried;
        }
    }

    at::Tensor parseHookResult(const c10::IValue &result) override {
        return c10d::detail::parseCppCommHookResult(result);
    }

private:
    const std::shared_ptr<Slot> slot_;
};

}  // namespace

PYBIND11_MODULE(_gradcodec_hook, module) {
    py::class_<Exchange, std::shared_ptr<Exchange>>(module, "Exchange")
        .def(py::init<uintptr_t, std::vector<int64_t>, bool, bool, bool, int64_t, std::optional<c10::Stream>,
                      uintptr_t>())
        .def_readwrite("in_step", &Exchange::in_step);
    py::class_<State, std::shared_ptr<State>>(module, "State")
        .def(py::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, size_t, std::optional<c10::Stream>,
                      at::Tensor>())
        .def_readwrite("pending", &State::pending)
        .def_readwrite("complete", &State::complete)
        .def_readwrite("closed", &State::closed)
        .def_readwrite("measure", &State::measure)
        .def_readwrite("in_python", &State::in_python)
        .def_readwrite("scales", &State::scales)
        .def_readwrite("errors_scale", &State::errors_scale)
        .def_readwrite("checked", &State::checked)
        .def_property_readonly("bytes_sent", [](const State &state) { return state.bytes_sent.load(); })
        .def("put", &State::put)
        .def("remove", &State::remove);
    py::class_<Slot, std::shared_ptr<Slot>>(module, "Slot")
        .def(py::init<py::object, py::object>())
        .def("take", &Slot::take);
    // Raises why the objects of this PyTorch are not those that this file was compiled for.
    module.def("check", [](const py::object &reducer, const py::object &group) {
        static_cast<void>(reducer.cast<c10d::Reducer &>());
        static_cast<void>(group.cast<c10d::ProcessGroup &>());
    });
    module.def("register", [](const py::object &reducer, std::shared_ptr<Slot> slot) {
        reducer.cast<c10d::Reducer &>().register_comm_hook(std::make_unique<Hook>(std::move(slot)));
    });
}
