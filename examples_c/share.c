/* Shares a tensor with another process, which maps the memory, uses it and releases it.
 *
 *   gcc -std=c99 -Wall -Wextra -pedantic -Iinclude examples_c/share.c -Ltarget/release -lgradcodec -o share
 *   LD_LIBRARY_PATH=target/release ./share */

#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gradcodec.h>

enum { COUNT = 1000000, SECONDS = 10 };

static void must(gc_status_t status)
{
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", gc_status_name(status), gc_last_error());
        exit(EXIT_FAILURE);
    }
}

/* Runs in the other process: adds up the received numbers, and sends the sum back. */
static int child(int socket)
{
    const DLDevice cpu = {kDLCPU, 0};
    DLManagedTensor *tensor;
    double sum = 0;
    must(gc_share_receive(socket, cpu, SECONDS * 1000, &tensor));
    const float *numbers = tensor->dl_tensor.data;
    for (int64_t i = 0; i < tensor->dl_tensor.shape[0]; i++)
        sum += numbers[i];
    gc_tensor_free(tensor); /* the sender's gc_share_wait() returns */
    return write(socket, &sum, sizeof sum) == sizeof sum ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(void)
{
    const DLDevice cpu = {kDLCPU, 0};
    const DLDataType float32 = {kDLFloat, 32, 1};
    const int64_t count = COUNT;
    DLManagedTensor *tensor;
    gc_share_t *lease;
    int ends[2], status;
    double sum = 0;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return perror("socketpair"), EXIT_FAILURE;
    const pid_t process = fork();
    if (process < 0)
        return perror("fork"), EXIT_FAILURE;
    close(ends[process != 0]);
    if (process == 0)
        return child(ends[1]);

    must(gc_tensor_empty(cpu, float32, 1, &count, &tensor));
    for (int64_t i = 0; i < count; i++)
        ((float *)tensor->dl_tensor.data)[i] = 0.5f;
    must(gc_share_send(tensor, ends[0], 0, SECONDS * 1000, &lease));
    gc_tensor_free(tensor); /* the library has a copy */
    must(gc_share_wait(lease, SECONDS * 1000));
    gc_share_free(lease);
    if (read(ends[0], &sum, sizeof sum) != sizeof sum || waitpid(process, &status, 0) != process) {
        fprintf(stderr, "the other process ended too early\n");
        return EXIT_FAILURE;
    }
    printf("%d floats were sent, mapped and released; their sum there was %.0f\n", COUNT, sum);
    return status == 0 && sum == COUNT / 2 ? EXIT_SUCCESS : EXIT_FAILURE;
}
