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

// Rises only. One thread at a time adds, without the cost of a locked instruction; any thread reads.
class Counter {
  public:
    void add(uint64_t more = 1) { value_.store(load() + more, std::memory_order_relaxed); }
    uint64_t load() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<uint64_t> value_{0};
};

// The worker's. Order and names are part of the C ABI (NativeFabric reads them by position).
struct Statistics {
    Counter writes_posted, bytes_posted, atoms_posted;
    Counter writes_completed, writes_failed, late_completions, eagain;
    Counter imms_reaped, atoms_reaped, stale_imms, surplus_slots, unowned_imms;
    Counter beats_sent, links_up, links_down, links_fenced;
    Counter queue_errors, sleeps;
};

// Of one domain; in the order of the C ABI.
struct DomainStatistics {
    Counter writes_posted, bytes_posted, imms_reaped;
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
