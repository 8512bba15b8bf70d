// Work shared out to threads, and large memory made ready for them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

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

// Whether memory is large: then it is fresh from the system, and large pages are asked for, with which filling it
// takes a third of the time.
static bool expect(double* memory, long numbers) {
    constexpr uintptr_t PAGE = 1 << 21, LARGE = 1 << 25;  // below this, allocators keep memory and give it again
    const uintptr_t start = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE, end = (uintptr_t)(memory + numbers) / PAGE * PAGE;
    if (numbers * sizeof(double) <= LARGE) return false;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise((void*)start, end - start, MADV_HUGEPAGE);
#endif
    return (uintptr_t)memory % 64 == 0;
}
