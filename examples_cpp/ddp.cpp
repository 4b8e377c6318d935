/* Data-parallel training with LibTorch: the ranks of a torch.distributed process group average gradients at one bit per
 * element, with error feedback, or at four bytes by the group's own all-reduce.
 *
 * torch's packages lack gloo's headers, so a C++ program cannot create a gloo group. Instead, ddp.py creates it and
 * calls train() with the group's name. ddp.py or CMakeLists.txt builds this file. */

#include <gradcodec/c10d.hpp>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/* Training ends while the loss is still falling. BATCH is the size over all ranks. */
constexpr int64_t BATCH = 256, STEPS = 200;
constexpr double RATE = 0.3;

/* Returns handwritten digits: 64 pixels per image, and the labels. */
std::tuple<Tensor, Tensor> digits(const std::string &path, const at::Device &device)
{
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    TORCH_CHECK(!bytes.empty() && bytes.size() % 65 == 0, path, ": images of 65 bytes expected, got ", bytes.size());
    const Tensor records = at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size()) / 65, 65}, at::kByte);
    return {(records.slice(1, 0, 64) / 16).to(device), records.select(1, 64).to(device, at::kLong)};
}

/* Computes the mean over the ranks by the group's all-reduce. */
class Plain {
public:
    Plain(const Group &group, const std::vector<Tensor> &) : group_(group) {}
    void operator()(const std::vector<Tensor> &gradients)
    {
        std::vector<Tensor> flat;
        for (const Tensor &gradient : gradients)
            flat.push_back(gradient.flatten());
        std::vector<Tensor> all{at::cat(flat)};
        group_->allreduce(all)->wait();
        sent_ += 2 * (group_->getSize() - 1) * 4 * all[0].numel() / group_->getSize(); /* for a ring all-reduce */
        all[0].div_(group_->getSize());
        int64_t first = 0;
        for (const Tensor &gradient : gradients) {
            gradient.copy_(all[0].narrow(0, first, gradient.numel()).view_as(gradient));
            first += gradient.numel();
        }
    }
    int64_t sent() const { return sent_; }

private:
    Group group_;
    int64_t sent_ = 0;
};

/* Computes the mean at one bit per element. One handle serves all gradients, each with its own scale. */
class OneBit {
public:
    OneBit(const Group &group, const std::vector<Tensor> &gradients)
        : comm_(gradcodec::comm_from_process_group(group))
    {
        gc_codec_options_t options{};
        options.codec = GC_CODEC_ONEBIT;
        allreduce_ = gradcodec::allreduce_create(comm_, gradients, options);
        /* A two-shot all-reduce sends two chunks to each of the other ranks. */
        options.n_chunks = static_cast<std::size_t>(group->getSize());
        const gradcodec::Codec codec = gradcodec::codec_create(gradients, options);
        bytes_ = 2 * (group->getSize() - 1) * gradcodec::codec_payload_bytes(codec) / group->getSize();
    }
    void operator()(const std::vector<Tensor> &gradients)
    {
        gradcodec::allreduce_run(allreduce_, gradients);
        sent_ += bytes_;
    }
    int64_t sent() const { return sent_; }

private:
    gradcodec::GroupCommunicator comm_;
    gradcodec::GroupAllReduce allreduce_;
    int64_t bytes_, sent_ = 0;
};

/* Trains, and returns the loss on all images after nine tenths of the steps and at the end, and the bytes sent by this
 * rank. */
template <class Exchange>
std::tuple<double, double, int64_t> train(const Group &group, const Tensor &images, const Tensor &labels)
{
    const at::AutoGradMode with_gradients(true); /* overrides the caller's mode */
    torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::ReLU(), torch::nn::Linear(64, 10));
    model->to(images.device());
    torch::optim::SGD optimizer(model->parameters(), RATE);
    std::vector<Tensor> gradients; /* each has its own memory, which stays the same */
    for (Tensor &parameter : model->parameters()) {
        parameter.mutable_grad() = at::zeros_like(parameter);
        gradients.push_back(parameter.grad());
    }
    Exchange exchange(group, gradients);
    const auto loss = [&] {
        const at::NoGradGuard without_gradients;
        return torch::nn::functional::cross_entropy(model->forward(images), labels).item<double>();
    };
    double before = 0;
    for (int64_t step = 1; step <= STEPS; step++) {
        /* All ranks draw the same numbers, and each takes its part of them. */
        const Tensor drawn = at::randint(images.size(0), {BATCH}, at::kLong);
        const Tensor batch = drawn.slice(0, group->getRank(), BATCH, group->getSize()).to(images.device());
        optimizer.zero_grad(/*set_to_none=*/false);
        torch::nn::functional::cross_entropy(model->forward(images.index_select(0, batch)),
                                             labels.index_select(0, batch))
            .backward();
        exchange(gradients);
        optimizer.step();
        if (step == STEPS * 9 / 10)
            before = loss();
    }
    return {before, loss(), exchange.sent()};
}

std::tuple<double, double, int64_t> train(const std::string &group_name, const std::string &path, int64_t seed,
                                          bool one_bit, const at::Device &device)
{
    const Group group = c10d::resolve_process_group(group_name);
    const auto [images, labels] = digits(path, device);
    torch::manual_seed(static_cast<uint64_t>(seed)); /* all ranks begin with the same weights */
    return one_bit ? train<OneBit>(group, images, labels) : train<Plain>(group, images, labels);
}

} // namespace

TORCH_LIBRARY(gradcodec_ddp, m)
{
    m.def("train", [](const std::string &group, const std::string &digits, int64_t seed, bool one_bit,
                      at::Device device) { return train(group, digits, seed, one_bit, device); });
}
