// The thread that owns a group of domains: it reads their completion queues, looks at progress words, posts what is due, beats, and
// ends links. It never waits for one link, takes no lock but the command list's and the slots', and runs no Python.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "crowding.hpp"
#include "events.hpp"
#include "link.hpp"
#include "sleeper.hpp"
#include "slots.hpp"
#include "transfer.hpp"

namespace pdx {

struct WorkerOptions {
    int cpu;  // -1: not pinned
    int64_t spin_ns, beat_interval_ns, beat_timeout_ns, connect_timeout_ns;
};

struct Command {
    enum class Kind { kAddLink, kConnect, kFence, kOpenTransfer, kAddBatch, kSeal, kCancel };
    Kind kind;
    LinkId link = 0;
    TransferId transfer = 0;
    uint32_t slot = 0, generation = 0;
    std::shared_ptr<Link> new_link = {};
    PeerAddress peer = {};
    std::unique_ptr<Batch> batch = {};
};

class Worker {
  public:
    Worker(const DomainGroup& domains, OpPool& ops, SlotTable& slots, EventQueue& events, Statistics& statistics,
           const WorkerOptions& options);
    ~Worker();  // stops the thread and closes all links
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // Any thread. submit() wakes the worker; what is only queued is run with its next turn, before what comes later.
    void submit(Command command);
    void queue(Command command);
    Sleeper& sleeper() { return sleeper_; }

  private:
    const DomainGroup& domains_;
    OpPool& ops_;
    SlotTable& slots_;
    EventQueue& events_;
    Statistics& statistics_;
    const WorkerOptions options_;
    const WriteShape shape_;
    Sleeper sleeper_;

    std::mutex mutex_;  // commands_
    std::vector<Command> commands_;
    std::atomic<bool> has_commands_{false}, stop_{false};

    // From here on: the worker's thread only.
    std::vector<Command> taken_;
    std::map<LinkId, std::shared_ptr<Link>> links_;
    std::unordered_map<uint32_t, Link*> tags_;  // probe tags
    std::unordered_map<TransferId, std::unique_ptr<Transfer>> transfers_;
    std::vector<Transfer*> armed_;
    std::vector<Link*> posting_;  // links whose ready list is not empty
    // Fenced links whose stopped shm peer could still pull from our memory.
    std::vector<std::shared_ptr<Link>> held_;
    std::vector<Piece> pieces_;
    std::vector<Imm> imms_;
    std::vector<LinkId> owners_;
    std::vector<uint64_t> strays_;  // by domain: immediates of nobody, whose credit no link has got
    uint32_t num_connecting_ = 0;
    uint32_t writes_in_flight_ = 0;
    int64_t last_active_ns_ = 0, last_tend_ns_ = 0, next_beat_ns_ = 0;
    int64_t usual_gap_ns_ = 0;  // the longest of late between two activities
    int64_t nap_ns_ = 0;
    Crowding crowding_;
    std::thread thread_;

    void run();
    bool run_commands();
    void run_command(Command& command);
    void add_batch(Transfer& transfer, std::unique_ptr<Batch> batch);
    void drop_batches(Transfer& transfer);
    void enqueue(Transfer& transfer);
    void fail(Transfer& transfer, int code);
    void settle(Transfer& transfer);
    void fence(LinkId id);
    bool waiting() const;
    void note_gap(int64_t gap_ns);
    void spin();
    void idle(int64_t now);

    // posting.cpp
    bool look_at_words();
    bool post_all();
    bool post_link(Link& link);
    Lane* next_lane(Link& link, uint32_t refused);
    ssize_t post_write(Link& link, Lane& lane, Transfer& transfer, Batch& batch);
    ssize_t post_small(Link& link, Lane& lane, OpKind kind, const void* data, size_t num_bytes, uint64_t page_offset);

    // completion.cpp
    bool read_queues();
    bool read_queue(size_t domain);
    void on_imm(uint32_t data);
    void credit_imms(size_t domain);
    void credit_strays(size_t domain);
    void on_error(size_t domain);
    void on_complete(Op* op, int code, const std::string& reason);

    // liveness.cpp
    void connect(Link& link, PeerAddress peer);
    bool tend_links(int64_t now);
    bool tend_connecting(Link& link, int64_t now);
    bool tend_up(Link& link, int64_t now, bool beat_due);
    void send_beat(Link& link, Lane& lane);
    void link_down(Link& link, int code, const std::string& reason);
    void announce_fenced(Link& link);
    void tend_held();
    int64_t next_deadline() const;
};

}  // namespace pdx
