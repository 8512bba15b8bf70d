// Work shared out to threads, how many of them it is worth, and errors that stay on this side.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>
#include <vector>

// Work on pieces 0 to count in several threads. Which worker has which is fixed, so that sums come out the
// same every time. Workers for whom no thread can be had (a limit of processes, or of memory) run in this one.
template <class Work>
static void in_threads(long count, long threads, Work work) {
    std::atomic<bool> failed{false};
    const auto run = [&](long worker) noexcept {
        try {
            for (long i = count * worker / threads; i < count * (worker + 1) / threads; i++) work(i, worker);
        } catch (...) {
            failed = true;
        }
    };
    std::vector<std::thread> started;
    long worker = 1;
    try {
        started.reserve(threads - 1);
        for (; worker < threads; worker++) started.emplace_back(run, worker);
    } catch (...) {
    }
    run(0);
    for (; worker < threads; worker++) run(worker);
    for (auto& thread : started) thread.join();
    if (failed) throw std::bad_alloc();  // nothing else is ever thrown
}

// As many threads as are worth their start: one for so many numbers to write, or products of two to add up.
static inline long threads_for(long work, long threads, long least = 1 << 18) {
    return std::max<long>(1, std::min<long>(threads, work / least));
}

// Whether so much is written that no cache could keep it, and to memory that can be written past them.
static bool too_large_to_keep(const double* memory, long numbers) {
    return numbers * sizeof(double) > 1 << 25 && (uintptr_t)memory % 64 == 0;
}

// What a caller in another language is given: 0, or 1 where memory was short. No exception ever gets there.
template <class Work>
static int64_t guarded(Work work) noexcept {
    try {
        work();
        return 0;
    } catch (...) {
        return 1;
    }
}
