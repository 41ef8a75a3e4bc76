// The worker's thread, its commands and its sleep.
#include "worker.hpp"

#include <pthread.h>
#include <rdma/fi_errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

namespace pdx {
namespace {

// Small writes are gathered up to this, neighbours merged up to that: over TCP four 4 KiB pages in one write move 2.6x
// what one does, four of 256 KiB 1.3x.
constexpr uint64_t kGatherBytes = 1 << 20;
constexpr uint64_t kMergeBytes = 4 << 20;
constexpr size_t kMaxPieces = 8;
constexpr int kLooksPerTurn = 8;
// The longest spin where other threads want the core: there, to be woken is quicker than to have used the core up.
constexpr int64_t kCrowdedSpinNs = 5'000;
// Twice as long is the longest spin where activity is regular.
constexpr int64_t kLongestGapNs = 1'000'000;
// Sleeps while something is expected that wakes nobody (a word whose writer has no eventfd, a queue without a
// descriptor): each twice the one before.
constexpr int64_t kFirstNapNs = 20'000, kLastNapNs = 200'000;
// With work that libfabric or the peer's credit refuses for now; and on an idle queue without a descriptor.
constexpr int64_t kBlockedNapNs = 1'000'000;
constexpr int64_t kIdlePollNs = 20'000'000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <typename T>
void remove_one(std::vector<T>& items, const T& item) {
    const auto found = std::find(items.begin(), items.end(), item);
    if (found != items.end()) items.erase(found);
}

WriteShape make_shape(const DomainGroup& domains) {
    const uint64_t limit = domains.max_write_bytes();
    // A run of neighbours is cut into as many writes as there are domains to share it.
    return {std::min(domains.iov_limit(), kMaxPieces), std::min<uint64_t>(kMergeBytes / domains.size(), limit),
            std::min<uint64_t>(kGatherBytes, limit), domains.rules().dip_from_bytes, domains.rules().dip_to_bytes};
}

}  // namespace

Worker::Worker(const DomainGroup& domains, OpPool& ops, SlotTable& slots, EventQueue& events, Statistics& statistics,
               const WorkerOptions& options)
    : domains_(domains), ops_(ops), slots_(slots), events_(events), statistics_(statistics), options_(options),
      shape_(make_shape(domains)), sleeper_(domains.cq_fds()), strays_(domains.size()) {
    // Signals belong to the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "pdx-fabric");
    if (options_.cpu < 0) return;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(options_.cpu, &cpus);
    const int rc = pthread_setaffinity_np(thread_.native_handle(), sizeof cpus, &cpus);
    if (rc == 0) return;
    stop_ = true;
    sleeper_.kick();
    thread_.join();
    throw Error(rc, "the fabric's worker cannot be pinned to core " + std::to_string(options_.cpu) + ": " +
                        std::strerror(rc));
}

Worker::~Worker() {
    stop_ = true;
    sleeper_.kick();
    thread_.join();
    for (auto& [id, link] : links_) {
        ops_.orphan(*link);
        link->close();
    }
    // Links that were handed over too late for the thread close with their commands.
}

void Worker::submit(Command command) {
    queue(std::move(command));
    sleeper_.kick();
}

void Worker::queue(Command command) {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    has_commands_.store(true, std::memory_order_seq_cst);
}

void Worker::run() {
    // Naps are tens of microseconds; the default slack would double them.
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!stop_.load(std::memory_order_relaxed)) {
        const int64_t now = now_ns();
        bool active = run_commands();
        active |= look_at_words();
        active |= post_all();
        active |= read_queues();
        active |= tend_links(now);
        if (active) {
            note_gap(now - last_active_ns_);
            last_active_ns_ = now;
            nap_ns_ = kFirstNapNs;
        } else {
            idle(now);
        }
    }
}

bool Worker::run_commands() {
    if (!has_commands_.load(std::memory_order_relaxed)) return false;
    {
        std::lock_guard lock(mutex_);
        taken_.swap(commands_);
        has_commands_.store(false, std::memory_order_relaxed);
    }
    for (Command& command : taken_) run_command(command);
    taken_.clear();
    return true;
}

void Worker::run_command(Command& command) {
    const auto link = links_.find(command.link);
    const auto transfer = transfers_.find(command.transfer);
    switch (command.kind) {
        case Command::Kind::kAddLink:
            tags_[command.new_link->probe_tag] = command.new_link.get();
            links_[command.link] = std::move(command.new_link);
            return;
        case Command::Kind::kConnect:
            if (link != links_.end()) connect(*link->second, std::move(command.peer));
            return;
        case Command::Kind::kFence:
            if (link != links_.end()) fence(command.link);
            return;
        case Command::Kind::kOpenTransfer: {
            if (link == links_.end()) return;
            auto opened = std::make_unique<Transfer>();
            opened->id = command.transfer;
            opened->link = command.link;
            opened->slot = command.slot;
            opened->generation = command.generation;
            Transfer& t = *(transfers_[command.transfer] = std::move(opened));
            if (link->second->state == LinkState::kDown) fail(t, FI_ENOTCONN);
            return;
        }
        case Command::Kind::kAddBatch:
            if (transfer != transfers_.end()) add_batch(*transfer->second, std::move(command.batch));
            return;
        case Command::Kind::kSeal:
            if (transfer == transfers_.end()) return;
            transfer->second->sealed = true;
            settle(*transfer->second);
            return;
        case Command::Kind::kCancel:
            if (transfer == transfers_.end()) return;
            transfer->second->cancelled = true;
            drop_batches(*transfer->second);
            settle(*transfer->second);
            return;
    }
}

void Worker::add_batch(Transfer& transfer, std::unique_ptr<Batch> batch) {
    if (transfer.ended()) return;
    if (batch->finished()) return;
    const bool arms = batch->armed() && !transfer.armed();
    transfer.batches.push_back(std::move(batch));
    if (arms) armed_.push_back(&transfer);
    if (transfer.first_ready()) enqueue(transfer);
}

void Worker::drop_batches(Transfer& transfer) {
    transfer.batches.clear();
    remove_one(armed_, &transfer);
    if (!transfer.queued) return;
    transfer.queued = false;
    Link& link = *links_.at(transfer.link);
    std::erase(link.ready, &transfer);
    if (link.ready.empty()) remove_one(posting_, &link);
}

void Worker::enqueue(Transfer& transfer) {
    if (transfer.queued) return;
    Link& link = *links_.at(transfer.link);
    transfer.queued = true;
    if (link.ready.empty()) posting_.push_back(&link);
    link.ready.push_back(&transfer);
}

void Worker::fail(Transfer& transfer, int code) {
    if (!transfer.code) transfer.code = code;
    drop_batches(transfer);
    settle(transfer);
}

// Tells of the transfer's end and forgets it, once nothing of it is left. The reference may be dead afterwards.
void Worker::settle(Transfer& transfer) {
    if (!transfer.done()) return;
    events_.push({.kind = EventKind::kTransferDone, .link = transfer.link, .transfer = transfer.id,
                  .slot = transfer.slot, .generation = transfer.generation, .code = transfer.code,
                  .atoms = transfer.posted_atoms, .failed_atoms = transfer.failed_atoms,
                  .cancelled = transfer.cancelled, .first_post_ns = transfer.first_post_ns,
                  .last_progress_ns = transfer.last_progress_ns});
    drop_batches(transfer);
    transfers_.erase(transfer.id);
}

void Worker::fence(LinkId id) {
    const std::shared_ptr<Link> link = links_.at(id);
    const bool pulled_from = domains_.rules().target_pulls && link->writes_in_flight > 0;
    for (const Op* op = link->first_op; op; op = op->next) {
        if (op->kind != OpKind::kWrite) continue;
        op->transfer->failed_atoms += op->atoms;
        op->transfer->code = FI_ECANCELED;
    }
    ops_.orphan(*link);
    writes_in_flight_ -= link->writes_in_flight;
    if (link->state == LinkState::kConnecting) num_connecting_--;
    link->close();
    std::vector<Transfer*> ended;
    for (auto& [transfer_id, transfer] : transfers_) {
        if (transfer->link == id) ended.push_back(transfer.get());
    }
    for (Transfer* transfer : ended) {
        transfer->in_flight = 0;
        if (!transfer->ended()) transfer->code = FI_ECANCELED;
        fail(*transfer, transfer->code);
    }
    PDX_INVARIANT(link->ready.empty());
    tags_.erase(link->probe_tag);
    links_.erase(id);
    if (!pulled_from) return announce_fenced(*link);
    held_.push_back(link);
    tend_held();
}

// True while progress may come that no descriptor tells of.
bool Worker::waiting() const {
    return !armed_.empty() || !posting_.empty() || num_connecting_ || writes_in_flight_ || slots_.num_armed();
}

// Where something comes every so often, it is waited for without sleeping, also if that is longer than the usual spin:
// pages of 1 MiB are 0.2 ms apart over TCP, and a nap for each costs a tenth of the rate.
void Worker::note_gap(int64_t gap_ns) {
    usual_gap_ns_ -= usual_gap_ns_ / 16;
    if (gap_ns <= kLongestGapNs) usual_gap_ns_ = std::max(usual_gap_ns_, gap_ns);
}

// A look at the words is a load, one at the queue is a system call: many of the first for each of the second.
void Worker::spin() {
    for (int i = 0; i < kLooksPerTurn; i++) {
        relax();
        if (look_at_words()) return;
    }
}

void Worker::idle(int64_t now) {
    const bool busy = waiting();
    const int64_t quiet_ns = now - last_active_ns_;
    const bool patient = quiet_ns < std::max(options_.spin_ns, 2 * usual_gap_ns_);
    if (busy && patient && (quiet_ns < kCrowdedSpinNs || !crowding_.crowded(now))) return spin();
    int64_t timeout = next_deadline() - now;
    if (!posting_.empty() || num_connecting_) timeout = std::min(timeout, kBlockedNapNs);
    const bool polled = domains_.polled();
    if ((polled && busy) || (!armed_.empty() && !sleeper_.has_wakeups())) {
        timeout = std::min(timeout, nap_ns_);
        nap_ns_ = std::min(2 * nap_ns_, kLastNapNs);
    }
    if ((polled && !links_.empty()) || !held_.empty()) timeout = std::min(timeout, kIdlePollNs);
    if (timeout <= 0) return;
    sleeper_.announce();
    if (has_commands_.load(std::memory_order_seq_cst) || stop_.load(std::memory_order_seq_cst) ||
        !domains_.may_wait()) {
        return sleeper_.call_off();
    }
    statistics_.sleeps.add();
    sleeper_.sleep(timeout, !armed_.empty());
}

}  // namespace pdx
