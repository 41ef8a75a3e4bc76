// The receiving side's counters: which (slot, generation) pairs are armed, how much is expected and how much came.
//
// Armed and released on callers' threads, credited by the worker; one mutex, held for a batch of completions at most.
// So a pair is visible to the worker when expect() returns.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "events.hpp"

namespace pdx {

constexpr uint32_t kNumSlots = 1 << 12;
constexpr uint32_t kNumGenerations = 1 << 12;
constexpr uint32_t kMaxImmAtoms = 1 << 8;
constexpr uint32_t kProbeTagMask = (1 << 20) - 1;

struct Imm {
    uint32_t slot, generation, atoms;

    uint32_t encode() const { return slot << 20 | generation << 8 | (atoms - 1); }
    static Imm decode(uint32_t data) { return {data >> 20, data >> 8 & 0xfff, (data & 0xff) + 1}; }
};

class SlotTable {
  public:
    SlotTable(EventQueue& events, Statistics& statistics);

    void expect(LinkId link, uint32_t slot, uint32_t generation, uint64_t atoms);
    void retarget(uint32_t slot, uint32_t generation, uint64_t atoms);
    uint64_t count(uint32_t slot, uint32_t generation);
    uint64_t release(uint32_t slot, uint32_t generation);
    // The link ends: its slots count no more. They still answer release().
    void disarm_link(LinkId link);
    uint32_t num_armed() const { return num_armed_.load(std::memory_order_relaxed); }

    // Worker. Counts one batch of immediates; `owners` gets the link that each pair belongs or belonged to (0: unknown).
    void credit(const std::vector<Imm>& imms, int64_t now, std::vector<LinkId>& owners);

  private:
    enum class State : uint8_t { kFree, kArmed, kDisarmed };
    struct Slot {
        State state = State::kFree;
        bool arrived = false, surplus = false;
        uint32_t generation = 0;
        LinkId link = 0;
        uint64_t expected = 0, count = 0;
        std::vector<int64_t> arrival_ns;
        std::vector<uint32_t> arrival_atoms;
    };

    Slot& armed(uint32_t slot, uint32_t generation);
    LinkId credit_one(const Imm& imm, int64_t now);
    void note_arrival(Slot& slot, int64_t now);
    void settle(Slot& slot, uint32_t index);

    EventQueue& events_;
    Statistics& statistics_;
    std::mutex mutex_;
    std::vector<Slot> slots_;
    std::atomic<uint32_t> num_armed_{0};
};

}  // namespace pdx
