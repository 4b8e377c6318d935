// Launches of kernels whose blocks wait for each other: each block runs on its own thread.
#ifndef GRADCODEC_TESTS_TOGETHER_H
#define GRADCODEC_TESTS_TOGETHER_H

#include "device.h"

#include <thread>

template <typename Call>
static void launch_together(unsigned blocks, unsigned threads, Call call) {
    std::vector<std::thread> all;
    for (unsigned block = 0; block < blocks; block++) {
        all.emplace_back([=] {
            begin_launch(blocks, threads, call);
            run_block(block, threads);
        });
    }
    for (std::thread &one : all) one.join();
}

#endif
