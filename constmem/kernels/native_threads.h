// Work shared out to threads, and how many of them it is worth.

#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// Work on pieces 0 to count in several threads. Which thread has which is fixed, so that sums come out the
// same every time.
template <class Work>
static void in_threads(long count, long threads, Work work) {
    const auto run = [&](long worker) {
        for (long i = count * worker / threads; i < count * (worker + 1) / threads; i++) work(i, worker);
    };
    std::vector<std::thread> started;
    for (long i = 1; i < threads; i++) started.emplace_back(run, i);
    run(0);
    for (auto& thread : started) thread.join();
}

// As many threads as are worth their start: one for so many numbers to write.
static inline long threads_for(long numbers, long threads) {
    return std::max<long>(1, std::min<long>(threads, numbers / (1 << 18)));
}

// Whether so much is written that no cache could keep it, and to memory that can be written past them.
static bool too_large_to_keep(const double* memory, long numbers) {
    return numbers * sizeof(double) > 1 << 25 && (uintptr_t)memory % 64 == 0;
}
