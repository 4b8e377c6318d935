/* Error feedback in C++: trains a network twice, with gradients of 32 bits and with gradients of one bit.
 *
 *   g++ -std=c++17 -O2 -Iinclude examples_cpp/feedback.cpp -Ltarget/release -lgradcodec -o feedback
 *   LD_LIBRARY_PATH=target/release ./feedback
 *
 * From another folder: ./feedback DIGITS.BIN.
 *
 * examples_c/feedback.c is the longer version: it also trains with signs and without error feedback, and draws the
 * losses. Here codecs, payloads and their memory have owners, and errors are exceptions. */

#include <gradcodec/gradcodec.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int64_t WORKERS = 4, BATCH = 32, STEPS = 1200, IMAGES = 1797;

/* The network: 64 pixels, 64 hidden ReLUs, 10 digits. Its four tensors, the codec's segments, follow one another. */
constexpr int64_t PIXELS = 64, HIDDEN = 64, DIGITS = 10;
constexpr int64_t B1 = PIXELS * HIDDEN, W2 = B1 + HIDDEN, B2 = W2 + HIDDEN * DIGITS, WEIGHTS = B2 + DIGITS;
constexpr int64_t SIZES[] = {B1, HIDDEN, HIDDEN * DIGITS, DIGITS};

struct Image {
    float pixel[PIXELS];
    int64_t digit;
};
struct Images {
    std::vector<Image> training, held_out;
};

static Images load(const std::string &path)
{
    std::ifstream file(path, std::ios::binary);
    Images images;
    for (int64_t i = 0; i < IMAGES; i++) {
        char record[PIXELS + 1];
        if (!file.read(record, sizeof record) || record[PIXELS] < 0 || record[PIXELS] >= DIGITS)
            throw std::runtime_error(path + ": not the file of images");
        Image image{};
        std::transform(record, record + PIXELS, image.pixel, [](char grey) { return static_cast<float>(grey) / 16; });
        image.digit = record[PIXELS];
        (i % 5 == 0 ? images.held_out : images.training).push_back(image);
    }
    return images;
}

struct Learned {
    float loss;
    bool right;
};

/* Computes the loss of an image; adds its gradient unless that is nullptr. */
static Learned learn(const float *w, const Image &image, float *gradient)
{
    float hidden[HIDDEN], out[DIGITS], sum = 0;
    std::copy(w + B1, w + W2, hidden);
    std::copy(w + B2, w + WEIGHTS, out);
    for (int64_t p = 0; p < PIXELS; p++)
        for (int64_t h = 0; h < HIDDEN; h++)
            hidden[h] += image.pixel[p] * w[p * HIDDEN + h];
    for (int64_t h = 0; h < HIDDEN; h++)
        for (int64_t d = 0; d < DIGITS && hidden[h] > 0; d++)
            out[d] += hidden[h] * w[W2 + h * DIGITS + d];
    const float *guess = std::max_element(out, out + DIGITS), largest = *guess, right = out[image.digit];
    for (float &score : out)
        sum += score = std::exp(score - largest);
    for (int64_t d = 0; d < DIGITS && gradient != nullptr; d++) {
        out[d] = out[d] / sum - static_cast<float>(d == image.digit);
        gradient[B2 + d] += out[d];
    }
    for (int64_t h = 0; h < HIDDEN && gradient != nullptr; h++) {
        float back = 0;
        for (int64_t d = 0; d < DIGITS && hidden[h] > 0; d++) {
            gradient[W2 + h * DIGITS + d] += hidden[h] * out[d];
            back += w[W2 + h * DIGITS + d] * out[d];
        }
        gradient[B1 + h] += back;
        for (int64_t p = 0; p < PIXELS && back != 0; p++)
            gradient[p * HIDDEN + h] += image.pixel[p] * back;
    }
    return {std::log(sum) + largest - right, guess - out == image.digit};
}

/* ---- the exchange between the workers ---------------------------------------------------------------------------- */

using Gradient = std::vector<float>;

static void average(const std::vector<Gradient> &gradients, Gradient &result)
{
    std::fill(result.begin(), result.end(), 0.0f);
    for (const Gradient &gradient : gradients)
        for (std::size_t i = 0; i < result.size(); i++)
            result[i] += gradient[i] / WORKERS;
}

/* Four workers, simulated by one process. Worker k uses codec k to encode gradient k and to reduce the chunks k. */
class Group {
public:
    Group()
    {
        gc_codec_options_t options{};
        options.codec = GC_CODEC_ONEBIT;
        options.segments = SIZES;
        options.n_segments = std::size(SIZES);
        options.n_chunks = WORKERS;
        for (uint64_t k = 0; k < WORKERS; k++) {
            options.server = k + 1;
            codecs_.push_back(gradcodec::codec_create(options));
        }
        const int64_t bytes = gradcodec::codec_payload_bytes(codecs_[0]);
        chunk_bytes_ = bytes / WORKERS;
        for (int64_t k = 0; k < WORKERS; k++) /* the library's memory is aligned as payloads must be */
            payloads_.push_back(gradcodec::tensor_empty(gradcodec::cpu, gradcodec::dtype<uint8_t>(), {bytes}));
        received_ = gradcodec::tensor_empty(gradcodec::cpu, gradcodec::dtype<uint8_t>(), {WORKERS, chunk_bytes_});
        reduced_ = gradcodec::tensor_empty(gradcodec::cpu, gradcodec::dtype<uint8_t>(), {bytes});
    }

    void exchange(const std::vector<Gradient> &gradients, Gradient &result)
    {
        using gradcodec::view;
        for (std::size_t k = 0; k < WORKERS; k++) {
            const float *g = gradients[k].data();
            gradcodec::codec_encode(codecs_[k],
                                    {view(g, {SIZES[0]}), view(g + B1, {SIZES[1]}), view(g + W2, {SIZES[2]}),
                                     view(g + B2, {SIZES[3]})},
                                    nullptr, nullptr, payloads_[k]); /* no factors */
        }
        /* First exchange: worker k gets chunk k of all workers. Second: all workers get the reduced chunks. */
        for (std::size_t k = 0; k < WORKERS; k++) {
            const int64_t at = static_cast<int64_t>(k) * chunk_bytes_;
            auto *room = received_.data<uint8_t>();
            for (const gradcodec::Tensor &payload : payloads_)
                room = std::copy_n(payload.data<uint8_t>() + at, chunk_bytes_, room);
            gradcodec::codec_reduce(codecs_[k], k, received_, view(reduced_.data<uint8_t>() + at, {chunk_bytes_}));
        }
        /* All workers would decode the same bytes, so one decoding is enough. */
        float *r = result.data();
        gradcodec::codec_decode(codecs_[0], reduced_, 1, nullptr, GC_DECODE_SET,
                                {view(r, {SIZES[0]}), view(r + B1, {SIZES[1]}), view(r + W2, {SIZES[2]}),
                                 view(r + B2, {SIZES[3]})});
    }

    int64_t chunk_bytes() const { return chunk_bytes_; }

private:
    std::vector<gradcodec::Codec> codecs_;
    std::vector<gradcodec::Tensor> payloads_;
    gradcodec::Tensor received_, reduced_;
    int64_t chunk_bytes_;
};

/* ---- training ---------------------------------------------------------------------------------------------------- */

struct Run {
    float loss, accuracy; /* on the training images, and on held-out images */
};

template <class Exchange> static Run train(const Images &images, Exchange exchange)
{
    std::mt19937 random(1); /* the same numbers everywhere, unlike <random>'s distributions */
    std::vector<float> w(WEIGHTS), result(WEIGHTS);
    for (int64_t i = 0; i < WEIGHTS; i++) { /* variance 1 / 64, as both layers have 64 inputs; no bias */
        const float uniform = static_cast<float>(random() % 2001) / 1000 - 1;
        w[static_cast<std::size_t>(i)] = i < B1 || (i >= W2 && i < B2) ? 0.2165f * uniform : 0;
    }
    for (int64_t step = 0; step < STEPS; step++) {
        std::vector<Gradient> gradients(WORKERS, Gradient(WEIGHTS));
        for (Gradient &gradient : gradients) {
            for (int64_t i = 0; i < BATCH; i++)
                learn(w.data(), images.training[random() % images.training.size()], gradient.data());
            for (float &element : gradient)
                element /= BATCH;
        }
        exchange(gradients, result);
        for (std::size_t i = 0; i < w.size(); i++)
            w[i] -= 0.3f * result[i];
    }
    float loss = 0, right = 0;
    for (const Image &image : images.training)
        loss += learn(w.data(), image, nullptr).loss;
    for (const Image &image : images.held_out)
        right += learn(w.data(), image, nullptr).right ? 1.0f : 0.0f;
    return {loss / static_cast<float>(images.training.size()), right / static_cast<float>(images.held_out.size())};
}

int main(int argc, char **argv)
try {
    const Images images = load(argc > 1 ? argv[1] : "examples_c/data/digits.bin");
    Group group;
    const Run plain = train(images, average);
    const Run fed_back = train(images, [&](const auto &gradients, auto &result) { group.exchange(gradients, result); });

    /* Bytes that a worker sends per step: in both cases, two exchanges with one part for each other worker. */
    const int64_t plain_bytes = 2 * (WORKERS - 1) * WEIGHTS * 4 / WORKERS;
    const int64_t fed_back_bytes = 2 * (WORKERS - 1) * group.chunk_bytes();
    std::cout << "float32:  loss " << plain.loss << ", " << plain.accuracy << " read right, " << plain_bytes
              << " bytes a step\nfeedback: loss " << fed_back.loss << ", " << fed_back.accuracy << " read right, "
              << fed_back_bytes << " bytes a step\n";
    const bool good = fed_back.loss < 1.2f * plain.loss && std::abs(fed_back.accuracy - plain.accuracy) < 0.02f &&
                      plain_bytes > 20 * fed_back_bytes;
    std::cout << (good ? "gradients of one bit train as well\n" : "WRONG: gradients of one bit do not train as well\n");
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception &error) {
    std::cerr << "feedback: " << error.what() << "\n";
    return EXIT_FAILURE;
}
