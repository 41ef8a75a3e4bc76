#include "slots.hpp"

#include <cerrno>

namespace pdx {
namespace {

// Timestamps kept for one slot; a longer log is thinned to every second entry, so the resolution halves.
constexpr size_t kMaxArrivals = 256;

std::string name(uint32_t slot, uint32_t generation) {
    return "slot " + std::to_string(slot) + " generation " + std::to_string(generation);
}

}  // namespace

SlotTable::SlotTable(EventQueue& events, Statistics& statistics)
    : events_(events), statistics_(statistics), slots_(kNumSlots) {}

void SlotTable::expect(LinkId link, uint32_t index, uint32_t generation, uint64_t atoms) {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_[index];
    if (slot.state == State::kArmed) throw Error(EBUSY, name(index, slot.generation) + " is armed already");
    slot.state = State::kArmed;
    slot.arrived = slot.surplus = false;
    slot.generation = generation;
    slot.link = link;
    slot.expected = atoms;
    slot.count = 0;
    slot.arrival_ns.clear();
    slot.arrival_atoms.clear();
    num_armed_.fetch_add(1, std::memory_order_relaxed);
    settle(slot, index);
}

SlotTable::Slot& SlotTable::armed(uint32_t index, uint32_t generation) {
    Slot& slot = slots_[index];
    if (slot.state == State::kFree || slot.generation != generation) {
        throw Error(ENOENT, name(index, generation) + " is not armed");
    }
    return slot;
}

void SlotTable::retarget(uint32_t index, uint32_t generation, uint64_t atoms) {
    std::lock_guard lock(mutex_);
    Slot& slot = armed(index, generation);
    slot.expected = atoms;
    if (slot.state == State::kArmed) settle(slot, index);
}

uint64_t SlotTable::count(uint32_t index, uint32_t generation) {
    std::lock_guard lock(mutex_);
    return armed(index, generation).count;
}

uint64_t SlotTable::release(uint32_t index, uint32_t generation) {
    std::lock_guard lock(mutex_);
    Slot& slot = armed(index, generation);
    if (slot.state == State::kArmed) num_armed_.fetch_sub(1, std::memory_order_relaxed);
    slot.state = State::kFree;
    return slot.count;
}

void SlotTable::disarm_link(LinkId link) {
    std::lock_guard lock(mutex_);
    for (Slot& slot : slots_) {
        if (slot.state != State::kArmed || slot.link != link) continue;
        slot.state = State::kDisarmed;
        num_armed_.fetch_sub(1, std::memory_order_relaxed);
    }
}

void SlotTable::credit(const std::vector<Imm>& imms, int64_t now, std::vector<LinkId>& owners) {
    std::lock_guard lock(mutex_);
    owners.clear();
    for (const Imm& imm : imms) owners.push_back(credit_one(imm, now));
}

LinkId SlotTable::credit_one(const Imm& imm, int64_t now) {
    Slot& slot = slots_[imm.slot];
    if (slot.generation != imm.generation || slot.state != State::kArmed) {
        statistics_.stale_imms.add();
        return slot.generation == imm.generation ? slot.link : 0;
    }
    statistics_.atoms_reaped.add(imm.atoms);
    slot.count += imm.atoms;
    note_arrival(slot, now);
    settle(slot, imm.slot);
    return slot.link;
}

void SlotTable::note_arrival(Slot& slot, int64_t now) {
    const auto count = static_cast<uint32_t>(slot.count);
    if (!slot.arrival_ns.empty() && slot.arrival_ns.back() == now) {
        slot.arrival_atoms.back() = count;
        return;
    }
    if (slot.arrival_ns.size() == kMaxArrivals) {
        // The later of each pair stays: a thinned log may say "later", never "earlier" than it was.
        for (size_t i = 0; i < kMaxArrivals / 2; i++) {
            slot.arrival_ns[i] = slot.arrival_ns[2 * i + 1];
            slot.arrival_atoms[i] = slot.arrival_atoms[2 * i + 1];
        }
        slot.arrival_ns.resize(kMaxArrivals / 2);
        slot.arrival_atoms.resize(kMaxArrivals / 2);
    }
    slot.arrival_ns.push_back(now);
    slot.arrival_atoms.push_back(count);
}

// Tells, once each, that the count is complete or that it is beyond what is expected.
void SlotTable::settle(Slot& slot, uint32_t index) {
    if (slot.count > slot.expected && !slot.surplus) {
        slot.surplus = true;
        statistics_.surplus_slots.add();
        events_.push({.kind = EventKind::kSurplus, .link = slot.link, .slot = index, .generation = slot.generation,
                      .atoms = slot.count});
    }
    if (slot.count != slot.expected || slot.arrived) return;
    slot.arrived = true;
    events_.push({.kind = EventKind::kArrived, .link = slot.link, .slot = index, .generation = slot.generation,
                  .atoms = slot.count, .arrival_ns = slot.arrival_ns, .arrival_atoms = slot.arrival_atoms});
}

}  // namespace pdx
