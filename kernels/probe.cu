// What the library asks a card about its driver.

// Keeps a stream at work for so many nanoseconds of the card's clock: whether cuMemFree waits for running work is tried
// with it. Launch: 1 block of 1 thread.
extern "C" __global__ void gc_hold(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
