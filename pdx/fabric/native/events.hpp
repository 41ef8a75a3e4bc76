// What the fabric tells its owner, the counters, and the queue between the worker and the reading thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "common.hpp"

namespace pdx {

// The values are part of the C ABI.
enum class EventKind : uint32_t { kLinkUp = 1, kLinkDown, kFenced, kTransferDone, kArrived, kSurplus };

struct Event {
    EventKind kind;
    LinkId link = 0;
    TransferId transfer = 0;
    uint32_t slot = 0, generation = 0;
    int code = 0;
    std::string reason = {};
    uint64_t atoms = 0;         // posted, arrived or counted
    uint64_t failed_atoms = 0;
    bool cancelled = false;
    int64_t first_post_ns = 0, last_progress_ns = 0;  // 0: never
    std::vector<int64_t> arrival_ns = {};
    std::vector<uint32_t> arrival_atoms = {};
};

// Counters only rise. Order and names are part of the C ABI (NativeFabric reads them by position).
struct Statistics {
    std::atomic<uint64_t> writes_posted{0}, bytes_posted{0}, atoms_posted{0};
    std::atomic<uint64_t> writes_completed{0}, writes_failed{0}, late_completions{0}, eagain{0};
    std::atomic<uint64_t> imms_reaped{0}, atoms_reaped{0}, stale_imms{0}, surplus_slots{0}, unowned_imms{0};
    std::atomic<uint64_t> beats_sent{0}, links_up{0}, links_down{0}, links_fenced{0};
    std::atomic<uint64_t> queue_errors{0}, sleeps{0};
};

// Of one domain; in the order of the C ABI.
struct DomainStatistics {
    std::atomic<uint64_t> writes_posted{0}, bytes_posted{0}, imms_reaped{0};
};

// Filled by the worker (and by callers, for what is decided at once), drained by one reader. The descriptor is readable
// while the queue holds something.
class EventQueue {
  public:
    EventQueue();
    ~EventQueue();
    EventQueue(const EventQueue&) = delete;
    EventQueue& operator=(const EventQueue&) = delete;

    void push(Event event);
    // At most `max` events, oldest first.
    std::vector<Event> take(size_t max);
    int fd() const { return fd_; }

  private:
    std::mutex mutex_;
    std::deque<Event> events_;
    int fd_;
};

}  // namespace pdx
