/* Four processes train a network on handwritten digits together, and exchange one bit or four in place of a float.
 *
 *   gcc -std=c99 -O2 -Wall -Wextra -pedantic -Iinclude examples_c/digits.c -Ltarget/release -lgradcodec -lm -o digits
 *   LD_LIBRARY_PATH=target/release ./digits examples_c/data/digits.bin
 *
 * Every worker holds the whole network and a quarter of the training images. A step reduces the four gradients by a
 * two-shot all-reduce: worker k receives the k-th part of all workers, reduces it, and sends the result to all workers.
 * The four runs differ only in what is sent and in the size of a step:
 *
 *   fp32    parts of floats are sent; worker k averages; all workers step along the mean.
 *   signs   parts of sign bits are sent; worker k counts votes; all step along the sign that won. This is signSGD
 *           with majority vote (Bernstein et al., 2018).
 *   onebit  signs and one scale for each of the network's four arrays are sent, and the error of a gradient is added to
 *           the next one (error feedback): gc_allreduce_run() over this program's sockets, with fp32's steps.
 *   int4    the same with four bits and a scale for each 32 weights; the biases are sent as they are.
 *
 * The last line has the accuracy on held-out images, and the bytes that all workers wrote to each other. The exit
 * status is 0 only if the networks are good and the workers agree to the last bit of every weight. Also, the signs may
 * take at most 1/31 of the bytes, onebit 1/16, and int4 1/5: for a network this small, a third of onebit's bytes are
 * headers. */

#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gradcodec.h>

enum { WORKERS = 4, BATCH = 64, STEPS = 800, FIRST_REPORT = 25, PATIENCE_MS = 30000 };

/* The network: 64 pixels, 64 hidden ReLUs, 10 digits. Its weights and its gradient are one flat array each. */
enum { PIXELS = 64, HIDDEN = 64, DIGITS = 10 };
enum {
    W1 = 0,                     /* [PIXELS][HIDDEN] */
    B1 = W1 + PIXELS * HIDDEN,  /* [HIDDEN] */
    W2 = B1 + HIDDEN,           /* [HIDDEN][DIGITS] */
    B2 = W2 + HIDDEN * DIGITS,  /* [DIGITS] */
    WEIGHTS = B2 + DIGITS,
    ARRAYS = 4
};

/* Steps shrink linearly to 0: a sign has always the same length, so only a shrinking step lets the weights settle. */
typedef enum { FP32, SIGNS, ONEBIT, INT4 } Mode;
static const char *const mode_name[] = { "fp32", "signs", "onebit", "int4" };
static const float first_step[] = { 0.5f, 0.008f, 0.5f, 0.5f };

/* ---- failing ----------------------------------------------------------------------------------------------------- */

static int rank = -1; /* of this worker; -1 in the parent */

static void die(const char *format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (rank < 0)
        fprintf(stderr, "digits: %s\n", message);
    else
        fprintf(stderr, "digits: worker %d: %s\n", rank, message);
    exit(EXIT_FAILURE);
}

static void must(gc_status_t status, const char *call)
{
    if (status != GC_STATUS_OK)
        die("%s: %s: %s", call, gc_status_name(status), gc_last_error());
}

/* ---- random numbers, the same on every machine (splitmix64) ------------------------------------------------------ */

static uint64_t random_bits(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static float random_float(uint64_t *state) /* in [-1, 1) */
{
    return (float)(random_bits(state) >> 40) / (float)(1 << 23) - 1.0f;
}

static void shuffle(int *items, int n, uint64_t *state)
{
    for (int i = n - 1; i > 0; i--) {
        const int j = (int)(random_bits(state) % (uint64_t)(i + 1)), item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

/* ---- the images (data/README.md has the format) ------------------------------------------------------------------ */

enum { IMAGES = 1797, HELD_OUT = 360, TRAINING = IMAGES - HELD_OUT };

typedef struct {
    float pixel[PIXELS]; /* 0 to 1 */
    int digit;
} Image;

static Image held_out[HELD_OUT], training[TRAINING];

static void load(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        die("%s: %s", path, strerror(errno));
    int n_held_out = 0, n_training = 0;
    for (int i = 0; i < IMAGES; i++) {
        unsigned char record[PIXELS + 1];
        if (fread(record, sizeof record, 1, file) != 1)
            die("%s: ends before image %d of %d", path, i + 1, IMAGES);
        Image *image = i % 5 == 0 ? &held_out[n_held_out++] : &training[n_training++];
        for (int p = 0; p < PIXELS; p++) {
            if (record[p] > 16)
                die("%s: image %d has a pixel of %d; 16 is black", path, i + 1, record[p]);
            image->pixel[p] = (float)record[p] / 16.0f;
        }
        image->digit = record[PIXELS];
        if (image->digit >= DIGITS)
            die("%s: image %d is labelled %d", path, i + 1, image->digit);
    }
    if (fgetc(file) != EOF)
        die("%s: longer than %d images", path, IMAGES);
    fclose(file);
}

/* ---- the network ------------------------------------------------------------------------------------------------- */

static void initialize(float *w)
{
    uint64_t state = 1;
    memset(w, 0, WEIGHTS * sizeof *w);
    /* Variance 1 / fan-in; a uniform number in [-1, 1) has 1/3. */
    for (int i = W1; i < B1; i++)
        w[i] = random_float(&state) * sqrtf(3.0f / PIXELS);
    for (int i = W2; i < B2; i++)
        w[i] = random_float(&state) * sqrtf(3.0f / HIDDEN);
}

/* Computes the activations and the probabilities of the ten digits; returns the loss, -log of the right digit's. */
static float forward(const float *w, const Image *image, float hidden[HIDDEN], float probability[DIGITS])
{
    memcpy(hidden, w + B1, HIDDEN * sizeof *hidden);
    for (int p = 0; p < PIXELS; p++)
        if (image->pixel[p] != 0.0f) /* half of the pixels are white */
            for (int h = 0; h < HIDDEN; h++)
                hidden[h] += image->pixel[p] * w[W1 + p * HIDDEN + h];
    for (int h = 0; h < HIDDEN; h++)
        if (hidden[h] < 0.0f)
            hidden[h] = 0.0f;

    memcpy(probability, w + B2, DIGITS * sizeof *probability);
    for (int h = 0; h < HIDDEN; h++)
        for (int d = 0; d < DIGITS; d++)
            probability[d] += hidden[h] * w[W2 + h * DIGITS + d];

    float largest = probability[0], sum = 0.0f;
    for (int d = 1; d < DIGITS; d++)
        largest = probability[d] > largest ? probability[d] : largest;
    const float right = probability[image->digit];
    for (int d = 0; d < DIGITS; d++) {
        probability[d] = expf(probability[d] - largest);
        sum += probability[d];
    }
    for (int d = 0; d < DIGITS; d++)
        probability[d] /= sum;
    return logf(sum) + largest - right;
}

/* Adds the gradient of one image's loss. */
static void backward(const float *w, const Image *image, float *gradient)
{
    float hidden[HIDDEN], at_hidden[HIDDEN], at_output[DIGITS];
    forward(w, image, hidden, at_output);
    at_output[image->digit] -= 1.0f; /* softmax and cross entropy: the derivative is probability - truth */

    for (int d = 0; d < DIGITS; d++)
        gradient[B2 + d] += at_output[d];
    for (int h = 0; h < HIDDEN; h++) {
        at_hidden[h] = 0.0f;
        if (hidden[h] > 0.0f)
            for (int d = 0; d < DIGITS; d++) {
                gradient[W2 + h * DIGITS + d] += hidden[h] * at_output[d];
                at_hidden[h] += w[W2 + h * DIGITS + d] * at_output[d];
            }
        gradient[B1 + h] += at_hidden[h];
    }
    for (int p = 0; p < PIXELS; p++)
        if (image->pixel[p] != 0.0f)
            for (int h = 0; h < HIDDEN; h++)
                gradient[W1 + p * HIDDEN + h] += image->pixel[p] * at_hidden[h];
}

static double mean_loss(const float *w, const Image *images, int n)
{
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        float hidden[HIDDEN], probability[DIGITS];
        sum += forward(w, &images[i], hidden, probability);
    }
    return sum / n;
}

static double accuracy(const float *w, const Image *images, int n)
{
    int right = 0;
    for (int i = 0; i < n; i++) {
        float hidden[HIDDEN], probability[DIGITS];
        forward(w, &images[i], hidden, probability);
        int guess = 0;
        for (int d = 1; d < DIGITS; d++)
            guess = probability[d] > probability[guess] ? d : guess;
        right += guess == images[i].digit;
    }
    return (double)right / n;
}

static uint64_t fingerprint(const float *w) /* FNV-1a over the bytes: any different bit of a weight changes it */
{
    const unsigned char *bytes = (const unsigned char *)w;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < WEIGHTS * sizeof *w; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* ---- bytes between processes ------------------------------------------------------------------------------------- */

static uint64_t bytes_written; /* by this process */

/* The only write() of this program, so that all bytes are counted. Returns the bytes written. */
static size_t put(int fd, const void *data, size_t size)
{
    const ssize_t n = write(fd, data, size);
    if (n < 0) {
        if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        die("write: %s", strerror(errno));
    }
    bytes_written += (uint64_t)n;
    return (size_t)n;
}

static size_t take(int fd, void *data, size_t size)
{
    const ssize_t n = read(fd, data, size);
    if (n == 0)
        die("the other end hung up");
    if (n < 0) {
        if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        die("read: %s", strerror(errno));
    }
    return (size_t)n;
}

typedef struct {
    void *data;
    size_t size;
} Piece;

/* Sends out[k] to worker k while it receives in[k] from worker k; line[k] is the socket to k, non-blocking. Every
 * socket that is ready is served, so workers with more data than the sockets hold cannot deadlock. */
static void exchange(const int line[WORKERS], const Piece out[WORKERS], const Piece in[WORKERS])
{
    size_t sent[WORKERS] = { 0 }, received[WORKERS] = { 0 };

    memcpy(in[rank].data, out[rank].data, out[rank].size); /* a worker writes nothing to itself */
    sent[rank] = received[rank] = out[rank].size;

    for (;;) {
        struct pollfd peer[WORKERS];
        int busy = 0;
        for (int k = 0; k < WORKERS; k++) {
            const int to_send = sent[k] < out[k].size, to_receive = received[k] < in[k].size;
            peer[k].events = (short)((to_send ? POLLOUT : 0) | (to_receive ? POLLIN : 0));
            peer[k].revents = 0;
            /* poll() ignores a negative descriptor: a peer may close its socket after its part of the exchange. */
            peer[k].fd = peer[k].events ? line[k] : -1;
            busy |= peer[k].events;
        }
        if (!busy)
            return;

        const int ready = poll(peer, WORKERS, PATIENCE_MS);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready < 0)
            die("poll: %s", strerror(errno));
        if (ready == 0)
            die("the others have been silent for %d seconds", PATIENCE_MS / 1000);

        /* A dead peer sets POLLHUP or POLLERR: read or write then, and they fail with the reason. */
        for (int k = 0; k < WORKERS; k++) {
            if (peer[k].revents & ~POLLOUT && received[k] < in[k].size)
                received[k] += take(line[k], (char *)in[k].data + received[k], in[k].size - received[k]);
            if (peer[k].revents & ~POLLIN && sent[k] < out[k].size)
                sent[k] += put(line[k], (const char *)out[k].data + sent[k], out[k].size - sent[k]);
        }
    }
}

/* ---- the reductions: on entry everyone's own gradient, on return the same array for all -------------------------- */

static void average(const int line[WORKERS], float *gradient)
{
    float ours[WORKERS][WEIGHTS / WORKERS + 1], mean[WEIGHTS / WORKERS + 1];
    Piece parts[WORKERS], received[WORKERS], result[WORKERS];
    for (int k = 0; k < WORKERS; k++) {
        const int first = WEIGHTS * k / WORKERS, last = WEIGHTS * (k + 1) / WORKERS;
        parts[k].data = gradient + first;
        parts[k].size = (size_t)(last - first) * sizeof *gradient;
    }
    for (int k = 0; k < WORKERS; k++) {
        received[k].data = ours[k];
        received[k].size = parts[rank].size;
        result[k].data = mean;
        result[k].size = parts[rank].size;
    }

    exchange(line, parts, received);
    for (size_t i = 0; i < parts[rank].size / sizeof *mean; i++) {
        mean[i] = 0.0f;
        for (int k = 0; k < WORKERS; k++)
            mean[i] += ours[k][i] / WORKERS;
    }
    exchange(line, result, parts);
}

/* Returns a DLPack view of memory that it does not own: two dimensions, or one if `rows` is 0. */
static DLTensor view(void *data, uint8_t code, uint8_t bits, int64_t shape[2], int64_t rows, int64_t columns)
{
    DLTensor tensor;
    memset(&tensor, 0, sizeof tensor); /* strides NULL: compact, in C order */
    tensor.data = data;
    tensor.device.device_type = kDLCPU;
    tensor.dtype.code = code;
    tensor.dtype.bits = bits;
    tensor.dtype.lanes = 1;
    tensor.ndim = rows ? 2 : 1;
    tensor.shape = shape;
    shape[0] = rows ? rows : columns;
    shape[1] = columns;
    return tensor;
}

static void vote(const int line[WORKERS], float *gradient)
{
    static uint64_t turn; /* counted alike by all workers */
    const int64_t chunk = gc_chunk_bytes(WEIGHTS, WORKERS); /* a worker's part, in bytes of 8 signs */
    if (chunk < 0)
        die("gc_chunk_bytes: %s", gc_last_error());

    uint8_t signs[WORKERS][chunk], ballots[WORKERS][chunk], verdict[chunk];
    int64_t shapes[4][2];
    const DLTensor gradient_in = view(gradient, kDLFloat, 32, shapes[0], 0, WEIGHTS);
    DLTensor gradient_out = gradient_in;
    DLTensor signs_view = view(signs, kDLUInt, 8, shapes[1], WORKERS, chunk);
    const DLTensor ballots_view = view(ballots, kDLUInt, 8, shapes[2], WORKERS, chunk);
    DLTensor verdict_view = view(verdict, kDLUInt, 8, shapes[3], 0, chunk);

    Piece to_judges[WORKERS], from_voters[WORKERS], to_voters[WORKERS];
    for (int k = 0; k < WORKERS; k++) {
        to_judges[k].data = signs[k];
        from_voters[k].data = ballots[k];
        to_voters[k].data = verdict;
        to_judges[k].size = from_voters[k].size = to_voters[k].size = (size_t)chunk;
    }

    must(gc_pack_signs_into(&gradient_in, GC_BIT_ORDER_BIG, &signs_view, NULL), "gc_pack_signs_into");
    exchange(line, to_judges, from_voters);

    /* A tie of two against two has no majority, and a bit cannot encode "no step". So in a tie one worker decides, at
     * each byte and in each step another one: a fixed choice would push all tied weights the same way. The padding bits
     * of the last chunk are voted on like the rest, and ignored when the verdict is unpacked. */
    must(gc_vote_signs_into(&ballots_view, ++turn, &verdict_view, NULL), "gc_vote_signs_into");
    exchange(line, to_voters, to_judges); /* into the memory that the signs were sent from */
    must(gc_unpack_signs_into(&signs_view, NULL, GC_BIT_ORDER_BIG, &gradient_out, NULL), "gc_unpack_signs_into");
}

/* Transport functions for the library, by exchange(). A failure there ends the process, so these always succeed. */
static int32_t all_to_all(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream)
{
    Piece out[WORKERS], in[WORKERS];
    (void)device, (void)stream; /* nothing of this program is on a GPU */
    for (int k = 0; k < WORKERS; k++) {
        out[k].data = (char *)send + (size_t)k * bytes;
        in[k].data = (char *)recv + (size_t)k * bytes;
        out[k].size = in[k].size = bytes;
    }
    exchange(ctx, out, in);
    return 0;
}

static int32_t all_gather(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream)
{
    Piece out[WORKERS], in[WORKERS];
    (void)device, (void)stream;
    for (int k = 0; k < WORKERS; k++) {
        out[k].data = (void *)send;
        in[k].data = (char *)recv + (size_t)k * bytes;
        out[k].size = in[k].size = bytes;
    }
    exchange(ctx, out, in);
    return 0;
}

static const int first_of[ARRAYS + 1] = { W1, B1, W2, B2, WEIGHTS };

/* Creates an all-reduce, which keeps the errors from step to step. */
static gc_allreduce_t *make_allreduce(int32_t codec, int line[WORKERS])
{
    static const uint8_t biases[ARRAYS] = { 0, 1, 0, 1 };
    int64_t sizes[ARRAYS];
    gc_transport_t sockets;
    gc_codec_options_t options;
    gc_comm_t *comm;
    gc_allreduce_t *allreduce;
    memset(&sockets, 0, sizeof sockets);
    sockets.struct_size = sizeof sockets;
    sockets.rank = rank;
    sockets.world_size = WORKERS;
    sockets.ctx = line;
    sockets.all_to_all = all_to_all;
    sockets.all_gather = all_gather;
    must(gc_comm_from_transport(&sockets, &comm), "gc_comm_from_transport");

    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = codec;
    options.raw = codec == GC_CODEC_ONEBIT ? NULL : biases;
    options.segments = sizes;
    options.n_segments = ARRAYS;
    for (int i = 0; i < ARRAYS; i++)
        sizes[i] = first_of[i + 1] - first_of[i];
    must(gc_allreduce_create(comm, &options, &allreduce), "gc_allreduce_create");
    gc_comm_free(comm); /* the handle keeps what it needs */
    return allreduce;
}

static void feed_back(gc_allreduce_t *allreduce, float *gradient)
{
    int64_t shapes[ARRAYS][2];
    DLTensor views[ARRAYS], *arrays[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) {
        views[i] = view(gradient + first_of[i], kDLFloat, 32, shapes[i], 0, first_of[i + 1] - first_of[i]);
        arrays[i] = &views[i];
    }
    must(gc_allreduce_run(allreduce, arrays, ARRAYS, NULL, NULL, NULL), "gc_allreduce_run");
}

/* ---- a worker ---------------------------------------------------------------------------------------------------- */

typedef struct {
    double accuracy;
    uint64_t fingerprint, bytes;
} Report;

/* Returns true before the first step, and after 25, 50, 100 and so on: most progress is early. */
static bool is_reported(int step)
{
    int report = FIRST_REPORT;
    while (report < step)
        report *= 2;
    return step == 0 || step == report;
}

static Report train(Mode mode, int line[WORKERS])
{
    static float w[WEIGHTS], gradient[WEIGHTS];
    gc_allreduce_t *allreduce = mode == ONEBIT ? make_allreduce(GC_CODEC_ONEBIT, line)
                              : mode == INT4   ? make_allreduce(GC_CODEC_INT4, line)
                                               : NULL;
    initialize(w);

    /* The images are dealt like cards, in the same way in all modes. */
    int deck[TRAINING], hand[TRAINING], n = 0, next = 0;
    uint64_t state = 2;
    for (int i = 0; i < TRAINING; i++)
        deck[i] = i;
    shuffle(deck, TRAINING, &state);
    for (int i = rank; i < TRAINING; i += WORKERS)
        hand[n++] = deck[i];

    for (int step = 0; step <= STEPS; step++) {
        if (rank == 0 && is_reported(step)) {
            printf("%-6s  step %3d  loss %.4f  held out %.4f\n", mode_name[mode], step,
                   mean_loss(w, training, TRAINING), accuracy(w, held_out, HELD_OUT));
            fflush(stdout);
        }
        if (step == STEPS)
            break;

        if (next + BATCH > n) {
            shuffle(hand, n, &state);
            next = 0;
        }
        memset(gradient, 0, sizeof gradient);
        for (int i = 0; i < BATCH; i++)
            backward(w, &training[hand[next++]], gradient);
        for (int i = 0; i < WEIGHTS; i++)
            gradient[i] /= BATCH;

        if (mode == FP32)
            average(line, gradient);
        else if (mode == SIGNS)
            vote(line, gradient);
        else
            feed_back(allreduce, gradient);

        const float size = first_step[mode] * (float)(STEPS - step) / STEPS;
        for (int i = 0; i < WEIGHTS; i++)
            w[i] -= size * gradient[i];
    }

    gc_allreduce_free(allreduce);

    Report report;
    report.accuracy = accuracy(w, held_out, HELD_OUT);
    report.fingerprint = fingerprint(w);
    report.bytes = bytes_written; /* without the report itself, which is not part of the training */
    return report;
}

/* ---- the parent -------------------------------------------------------------------------------------------------- */

static void close_lines(int line[WORKERS][WORKERS], int keep) /* all but those of worker `keep` */
{
    for (int a = 0; a < WORKERS; a++)
        for (int b = 0; b < WORKERS; b++)
            if (a != keep && a != b)
                close(line[a][b]);
}

/* Starts the workers. Returns the number of workers that run; fewer than WORKERS if fork() failed. */
static int start(Mode mode, int line[WORKERS][WORKERS], int report[WORKERS][2], pid_t workers[WORKERS])
{
    fflush(stdout); /* or every worker would print it again */
    for (int k = 0; k < WORKERS; k++) {
        workers[k] = fork();
        if (workers[k] < 0)
            return k;
        if (workers[k] == 0) {
            rank = k;
            close_lines(line, k); /* a socket closes with the last copy of its other end */
            const Report mine = train(mode, line[k]);
            for (size_t done = 0; done < sizeof mine;)
                done += put(report[k][1], (const char *)&mine + done, sizeof mine - done);
            exit(EXIT_SUCCESS);
        }
    }
    return WORKERS;
}

/* Waits for the first n workers. If one fails, kills the rest, which could only wait for it. */
static int finish(pid_t workers[WORKERS], int n)
{
    int failed = n < WORKERS;
    for (int left = n; left > 0;) {
        if (failed)
            for (int k = 0; k < n; k++)
                if (workers[k] > 0)
                    kill(workers[k], SIGKILL);
        int status;
        const pid_t gone = waitpid(-1, &status, 0);
        if (gone < 0 && errno != EINTR)
            die("waitpid: %s", strerror(errno));
        for (int k = 0; k < n; k++)
            if (gone > 0 && workers[k] == gone) {
                const int ours = failed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
                if (WIFSIGNALED(status) && !ours)
                    fprintf(stderr, "digits: worker %d was ended by signal %d\n", k, WTERMSIG(status));
                failed |= !WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS;
                workers[k] = 0;
                left--;
            }
    }
    return !failed;
}

/* Trains one network with four workers. The report's bytes are those of all four. */
static Report run(Mode mode)
{
    int line[WORKERS][WORKERS]; /* line[a][b]: a's end of the socket pair between a and b */
    int report[WORKERS][2];
    pid_t workers[WORKERS];

    for (int a = 0; a < WORKERS; a++) {
        line[a][a] = -1;
        for (int b = a + 1; b < WORKERS; b++) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
                die("socketpair: %s", strerror(errno));
            if (fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0 || fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0)
                die("fcntl: %s", strerror(errno));
            line[a][b] = ends[0];
            line[b][a] = ends[1];
        }
        if (pipe(report[a]) != 0)
            die("pipe: %s", strerror(errno));
    }

    const int started = start(mode, line, report, workers);
    if (started < WORKERS)
        fprintf(stderr, "digits: fork: %s\n", strerror(errno));
    close_lines(line, -1);
    for (int k = 0; k < WORKERS; k++)
        close(report[k][1]);
    if (!finish(workers, started))
        die("%s: not every worker finished", mode_name[mode]);

    Report total = { 0.0, 0, 0 };
    for (int k = 0; k < WORKERS; k++) {
        Report one;
        for (size_t done = 0; done < sizeof one;)
            done += take(report[k][0], (char *)&one + done, sizeof one - done);
        close(report[k][0]);
        if (k > 0 && one.fingerprint != total.fingerprint)
            die("%s: the weights of worker %d are not those of worker 0", mode_name[mode], k);
        total.fingerprint = one.fingerprint;
        total.accuracy = one.accuracy;
        total.bytes += one.bytes;
    }
    printf("%-6s  %d workers, the same weights (%016" PRIx64 "), %" PRIu64 " bytes written\n",
           mode_name[mode], WORKERS, total.fingerprint, total.bytes);
    return total;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        die("expected one argument, the file with the images: examples_c/data/digits.bin");
    signal(SIGPIPE, SIG_IGN); /* write() then gives an error for a dead peer */
    load(argv[1]);

    const Report fp32 = run(FP32), signs = run(SIGNS), onebit = run(ONEBIT), int4 = run(INT4);

    int good = 1;
    if (fp32.accuracy < 0.95) {
        fprintf(stderr, "digits: fp32 reads %.4f of the held-out images, 0.95 expected\n", fp32.accuracy);
        good = 0;
    }
    if (fabs(signs.accuracy - fp32.accuracy) > 0.02) {
        fprintf(stderr, "digits: signs and fp32 differ by more than 0.02 on the held-out images\n");
        good = 0;
    }
    if (fp32.bytes < 31 * signs.bytes) {
        fprintf(stderr, "digits: signs took more than 1/31 of the bytes of fp32\n");
        good = 0;
    }
    if (fabs(onebit.accuracy - fp32.accuracy) > 0.02) {
        fprintf(stderr, "digits: onebit and fp32 differ by more than 0.02 on the held-out images\n");
        good = 0;
    }
    if (fp32.bytes < 16 * onebit.bytes) {
        fprintf(stderr, "digits: onebit took more than 1/16 of the bytes of fp32\n");
        good = 0;
    }
    if (fabs(int4.accuracy - fp32.accuracy) > 0.02) {
        fprintf(stderr, "digits: int4 and fp32 differ by more than 0.02 on the held-out images\n");
        good = 0;
    }
    if (fp32.bytes < 5 * int4.bytes) {
        fprintf(stderr, "digits: int4 took more than 1/5 of the bytes of fp32\n");
        good = 0;
    }
    printf("RESULT fp32=%.4f signs=%.4f bytes_fp32=%" PRIu64 " bytes_signs=%" PRIu64 " onebit=%.4f"
           " bytes_onebit=%" PRIu64 " int4=%.4f bytes_int4=%" PRIu64 "\n", fp32.accuracy, signs.accuracy, fp32.bytes,
           signs.bytes, onebit.accuracy, onebit.bytes, int4.accuracy, int4.bytes);
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
