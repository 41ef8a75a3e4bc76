// Whether other threads want the core of the thread that asks. One thread's own.
#pragma once

#include <cstdint>

namespace pdx {

// The kernel counts how long a thread has been ready and had to wait for a core (/proc/thread-self/schedstat). A worker
// that spins where others compute makes them wait, and is itself made to wait when it has something to do.
class Crowding {
  public:
    Crowding() = default;
    ~Crowding();
    Crowding(const Crowding&) = delete;
    Crowding& operator=(const Crowding&) = delete;

    // The thread waited for more than a fifth of the time between two looks, less than kMemoryNs ago; or nobody can
    // tell. Looks once in kLookNs at most (a look takes about a microsecond): over a shorter time, the program's own
    // main thread that takes an event would count as a crowd. That thread takes up to a tenth where batches are short;
    // one that computes takes a third of a core at least from two workers on two.
    bool crowded(int64_t now_ns);

  private:
    static constexpr int64_t kLookNs = 10'000'000, kMemoryNs = 100'000'000, kShare = 5;
    int fd_ = -1;
    int64_t looked_ns_ = 0, crowded_until_ns_ = 0;
    uint64_t waited_ns_ = 0;
};

}  // namespace pdx
