// How the worker sleeps and who may wake it: callers with a command, the completion queues' descriptors (where there are
// any), and, while a batch is armed, the ranks' eventfds.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace pdx {

class Sleeper {
  public:
    explicit Sleeper(const std::vector<int>& cq_fds);
    ~Sleeper();
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

    // Any thread. The descriptor is duplicated: the caller may close its own.
    void add_wakeup(int fd);
    void remove_wakeup(int fd);
    bool has_wakeups() const { return num_wakeups_.load(std::memory_order_relaxed) > 0; }
    // Any thread: ends a sleep, or forbids the one that was announced.
    void kick();

    // Worker: announce(), look for commands once more, then sleep() or call_off(). A command queued before announce()
    // is seen by that look; one queued after it kicks.
    void announce() { asleep_.store(true, std::memory_order_seq_cst); }
    void call_off() { asleep_.store(false, std::memory_order_relaxed); }
    void sleep(int64_t timeout_ns, bool on_wakeups);

  private:
    int command_fd_;
    // The ranks' eventfds, edge triggered: several fabrics may watch one of them, so nobody may drain it.
    int wakeups_fd_;
    std::mutex mutex_;
    std::multimap<int, int> duplicates_;
    std::atomic<uint32_t> num_wakeups_{0};
    std::atomic<bool> asleep_{false};
    std::vector<pollfd> waited_;  // worker: commands, wake-ups, queues
};

}  // namespace pdx
