#define PDX_API __attribute__((visibility("default")))
#include "c_api.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <shared_mutex>
#include <sstream>

#include "fabric.hpp"
#include "providers/shm.hpp"

// What stays of a fabric after its end, for calls of other threads that come late.
struct pdx_fabric {
    std::shared_mutex mutex;  // shared by calls, one by one for the end
    std::unique_ptr<pdx::Fabric> fabric;
};

namespace {

thread_local std::string last_error;

// Runs `body`; an Error becomes its negated code and a message.
template <typename F>
int64_t guarded(F body) {
    int code = EIO;
    try {
        return body();
    } catch (const pdx::Error& error) {
        last_error = error.what();
        code = error.code > 0 ? error.code : EIO;
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
        code = ENOMEM;
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return -code;
}

template <typename F>
int64_t done(F body) {
    return guarded([&]() -> int64_t {
        body();
        return 0;
    });
}

// As guarded(), with the fabric, which stays until `body` has run.
template <typename F>
int64_t with(pdx_fabric* owner, F body) {
    return guarded([&]() -> int64_t {
        const std::shared_lock lock(owner->mutex);
        if (!owner->fabric) throw pdx::Error(EBADF, "the fabric is closed");
        return body(*owner->fabric);
    });
}

template <typename F>
int64_t done_with(pdx_fabric* owner, F body) {
    return with(owner, [&](pdx::Fabric& fabric) -> int64_t {
        body(fabric);
        return 0;
    });
}

void copy_text(const std::string& text, char* out, size_t num_bytes) {
    if (num_bytes) std::snprintf(out, num_bytes, "%s", text.c_str());
}

std::vector<std::string> lines(const char* text) {
    std::vector<std::string> found;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) found.push_back(line);
    if (found.empty()) found.emplace_back();
    return found;
}

std::unique_ptr<pdx::Batch> make_batch(const pdx_fabric_batch& from, const uint32_t* src_pages,
                                       const uint32_t* dst_pages) {
    auto batch = std::make_unique<pdx::Batch>();
    batch->src_pages.assign(src_pages, src_pages + from.num_pages);
    batch->dst_pages.assign(dst_pages, dst_pages + from.num_pages);
    batch->page_bytes = from.page_bytes;
    batch->num_layers = from.num_layers;
    batch->src_offset = from.src_offset;
    batch->dst_offset = from.dst_offset;
    batch->src_layer_stride = from.src_layer_stride;
    batch->dst_layer_stride = from.dst_layer_stride;
    batch->src_page_stride = from.src_page_stride;
    batch->dst_page_stride = from.dst_page_stride;
    batch->word = from.word;
    batch->first_value = from.first_value;
    if (!from.word) {
        batch->due_layers = from.num_layers;
        if (!from.num_pages) batch->cursor.layer = from.num_layers;
    }
    return batch;
}

template <typename T>
T* copy_out(const std::vector<T>& values) {
    if (values.empty()) return nullptr;
    T* copy = static_cast<T*>(std::malloc(values.size() * sizeof(T)));
    PDX_INVARIANT(copy);
    std::memcpy(copy, values.data(), values.size() * sizeof(T));
    return copy;
}

void fill(const pdx::Event& event, pdx_fabric_event& out) {
    out = {};
    out.kind = static_cast<uint32_t>(event.kind);
    out.code = event.code;
    out.link = event.link;
    out.transfer = event.transfer;
    out.slot = event.slot;
    out.generation = event.generation;
    out.atoms = event.atoms;
    out.failed_atoms = event.failed_atoms;
    out.first_post_ns = event.first_post_ns;
    out.last_progress_ns = event.last_progress_ns;
    out.cancelled = event.cancelled;
    out.num_arrivals = static_cast<uint32_t>(event.arrival_ns.size());
    out.arrival_ns = copy_out(event.arrival_ns);
    out.arrival_atoms = copy_out(event.arrival_atoms);
    copy_text(event.reason, out.reason, sizeof out.reason);
}

template <typename Counters>
int64_t copy_counters(const Counters& from, uint64_t* out, size_t max) {
    constexpr size_t count = sizeof(Counters) / sizeof(pdx::Counter);
    const auto* counters = reinterpret_cast<const pdx::Counter*>(&from);
    for (size_t i = 0; i < std::min(max, count); i++) out[i] = counters[i].load();
    return static_cast<int64_t>(count);
}

}  // namespace

uint32_t pdx_fabric_abi() { return PDX_FABRIC_ABI; }

const char* pdx_fabric_error() { return last_error.c_str(); }

int64_t pdx_fabric_load(const char* paths, char* chosen, size_t chosen_bytes) {
    return guarded([&]() -> int64_t {
        const pdx::Libfabric& lib = pdx::load_libfabric(lines(paths));
        copy_text(lib.path, chosen, chosen_bytes);
        return lib.version;
    });
}

int64_t pdx_fabric_provider(int32_t provider, char* name, size_t name_bytes) {
    return done([&] { copy_text(pdx::probe_provider(static_cast<pdx::Provider>(provider)), name, name_bytes); });
}

int64_t pdx_fabric_open(const pdx_fabric_options* options, pdx_fabric** out) {
    return done([&] {
        const auto provider = static_cast<pdx::Provider>(options->provider);
        if (provider == pdx::Provider::kShm) pdx::sweep_shm();
        auto opened = std::make_unique<pdx_fabric>();
        opened->fabric.reset(new pdx::Fabric({.provider = provider,
                                           .hosts = lines(options->hosts),
                                           .cq_entries = options->cq_entries,
                                           .device_memory = options->device_memory != 0,
                                           .worker = {.cpu = options->cpu,
                                                      .spin_ns = options->spin_ns,
                                                      .beat_interval_ns = options->beat_interval_ns,
                                                      .beat_timeout_ns = options->beat_timeout_ns,
                                                      .connect_timeout_ns = options->connect_timeout_ns}}));
        *out = opened.release();
    });
}

void pdx_fabric_close(pdx_fabric* fabric) {
    const std::unique_lock lock(fabric->mutex);
    fabric->fabric.reset();
}

void pdx_fabric_delete(pdx_fabric* fabric) {
    pdx_fabric_close(fabric);
    delete fabric;
}

int64_t pdx_fabric_fd(pdx_fabric* fabric) {
    return with(fabric, [](pdx::Fabric& open) { return open.fd(); });
}

int64_t pdx_fabric_register(pdx_fabric* fabric, const pdx_fabric_part* parts, size_t num_parts) {
    return with(fabric, [&](pdx::Fabric& open) {
        std::vector<pdx::Memory> memory;
        for (const pdx_fabric_part* part = parts; part < parts + num_parts; part++) {
            memory.push_back({static_cast<char*>(part->address), part->num_bytes, part->dmabuf_fd, part->dmabuf_offset,
                              part->cuda_device});
        }
        return open.register_region(std::move(memory));
    });
}

int64_t pdx_fabric_unregister(pdx_fabric* fabric, int64_t region) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.unregister_region(region); });
}

int64_t pdx_fabric_open_link(pdx_fabric* fabric, int64_t region, uint32_t window) {
    return with(fabric, [&](pdx::Fabric& open) { return open.open_link(region, window)->id; });
}

int64_t pdx_fabric_own_address(pdx_fabric* fabric, int64_t link, pdx_fabric_address* out) {
    return done_with(fabric, [&](pdx::Fabric& open) {
        const auto own = open.link(link);
        *out = {};
        out->pid_namespace = pdx::pid_namespace();
        out->window = own->window;
        out->probe_tag = own->probe_tag;
        out->pid = getpid();
        static_assert(PDX_FABRIC_MAX_PARTS == pdx::kMaxParts);
        const std::vector<pdx::Memory>& parts = own->region->parts;
        for (const pdx::Memory& part : parts) out->part_bytes[out->num_parts++] = part.num_bytes;
        for (const pdx::OwnEnd& from : own->own) {
            pdx_fabric_end& end = out->ends[out->num_ends++];
            for (size_t i = 0; i < parts.size(); i++) {
                end.part_bases[i] = from.domain.remote_base(parts[i].address);
                end.part_keys[i] = fi_mr_key(from.part_mrs[i]);
            }
            end.page_base = from.domain.remote_base(own->page.get());
            end.page_key = fi_mr_key(from.page_mr);
            end.name_len = static_cast<uint32_t>(from.name.size());
            std::memcpy(end.name, from.name.data(), from.name.size());
        }
    });
}

int64_t pdx_fabric_connect(pdx_fabric* fabric, int64_t link, const pdx_fabric_address* peer) {
    return done_with(fabric, [&](pdx::Fabric& open) {
        pdx::PeerAddress address{};
        address.part_bytes.assign(peer->part_bytes, peer->part_bytes + peer->num_parts);
        address.window = peer->window;
        address.probe_tag = peer->probe_tag;
        address.pid = peer->pid;
        for (const pdx_fabric_end* from = peer->ends; from < peer->ends + peer->num_ends; from++) {
            pdx::PeerEnd& end = address.ends.emplace_back();
            for (size_t i = 0; i < peer->num_parts; i++) end.parts.push_back({from->part_bases[i], from->part_keys[i]});
            end.page_base = from->page_base;
            end.page_key = from->page_key;
            end.name.resize(sizeof from->name);  // zero terminated, whatever the peer sent
            std::memcpy(end.name.data(), from->name, std::min<size_t>(from->name_len, end.name.size() - 1));
        }
        open.connect(link, std::move(address));
    });
}

int64_t pdx_fabric_fence(pdx_fabric* fabric, int64_t link) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.fence(link); });
}

int64_t pdx_fabric_open_transfer(pdx_fabric* fabric, int64_t link, uint32_t slot, uint32_t generation) {
    return with(fabric, [&](pdx::Fabric& open) { return open.open_transfer(link, slot, generation); });
}

int64_t pdx_fabric_add_batch(pdx_fabric* fabric, int64_t transfer, const pdx_fabric_batch* batch,
                             const uint32_t* src_pages, const uint32_t* dst_pages) {
    return done_with(fabric, [&](pdx::Fabric& open) {
        open.add_batch(transfer, make_batch(*batch, src_pages, dst_pages));
    });
}

int64_t pdx_fabric_seal(pdx_fabric* fabric, int64_t transfer) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.seal(transfer); });
}

int64_t pdx_fabric_cancel(pdx_fabric* fabric, int64_t transfer) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.cancel(transfer); });
}

int64_t pdx_fabric_expect(pdx_fabric* fabric, int64_t link, uint32_t slot, uint32_t generation, uint64_t atoms) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.expect(link, slot, generation, atoms); });
}

int64_t pdx_fabric_retarget(pdx_fabric* fabric, uint32_t slot, uint32_t generation, uint64_t atoms) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.retarget(slot, generation, atoms); });
}

int64_t pdx_fabric_count(pdx_fabric* fabric, uint32_t slot, uint32_t generation) {
    return with(fabric, [&](pdx::Fabric& open) { return static_cast<int64_t>(open.count(slot, generation)); });
}

int64_t pdx_fabric_release(pdx_fabric* fabric, uint32_t slot, uint32_t generation) {
    return with(fabric, [&](pdx::Fabric& open) { return static_cast<int64_t>(open.release(slot, generation)); });
}

int64_t pdx_fabric_add_wakeup(pdx_fabric* fabric, int32_t fd) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.sleeper().add_wakeup(fd); });
}

int64_t pdx_fabric_remove_wakeup(pdx_fabric* fabric, int32_t fd) {
    return done_with(fabric, [&](pdx::Fabric& open) { open.sleeper().remove_wakeup(fd); });
}

int64_t pdx_fabric_events(pdx_fabric* fabric, pdx_fabric_event* out, size_t max) {
    return with(fabric, [&](pdx::Fabric& open) {
        const std::vector<pdx::Event> events = open.take_events(max);
        for (size_t i = 0; i < events.size(); i++) fill(events[i], out[i]);
        return static_cast<int64_t>(events.size());
    });
}

void pdx_fabric_free(void* memory) { std::free(memory); }

int64_t pdx_fabric_statistics(pdx_fabric* fabric, uint64_t* out, size_t max) {
    return with(fabric, [&](pdx::Fabric& open) { return copy_counters(open.statistics(), out, max); });
}

int64_t pdx_fabric_domain_statistics(pdx_fabric* fabric, uint32_t domain, uint64_t* out, size_t max) {
    return with(fabric,
                [&](pdx::Fabric& open) { return copy_counters(open.domains()[domain].statistics(), out, max); });
}
