// One transfer on the writing side: its batches, which of their layers may go, and how they are cut into writes.
// Pure bookkeeping, owned by the worker; nothing here calls libfabric.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common.hpp"

namespace pdx {

struct Link;

// One contiguous piece of a write. Offsets are from the starts of the batch's two parts.
struct Piece {
    uint64_t src_offset, dst_offset, num_bytes;
    uint32_t atoms;
};

// Limits of one write.
struct WriteShape {
    size_t max_pieces;
    // Neighbouring atoms are merged up to this; one atom may be larger, because atoms are never split.
    uint64_t max_merged_bytes;
    // Pieces are gathered while the write stays this small; larger pieces gain nothing from it.
    uint64_t max_gathered_bytes;
    // Writes of a middle size may be slower than smaller and than larger ones: atoms that could only make such a write
    // stay below it. Equal where the provider knows no such dip.
    uint64_t dip_from_bytes, dip_to_bytes;

    uint64_t gather_limit(uint64_t atom_bytes) const {
        const uint64_t most = std::min(atom_bytes * max_pieces, max_gathered_bytes);
        return most > dip_from_bytes && most < dip_to_bytes ? dip_from_bytes : most;
    }
};

// n pages x num_layers atoms. Layer l's atoms are n runs of page_bytes. All of them lie in one part of each region.
struct Batch {
    std::vector<uint32_t> src_pages, dst_pages;
    uint32_t src_part = 0, dst_part = 0;
    uint64_t page_bytes = 0;
    uint32_t num_layers = 0;
    // From the part's start. Its pages may be counted from elsewhere: then this is below 0, modulo 2^64.
    uint64_t src_offset = 0, dst_offset = 0;
    uint64_t src_layer_stride = 0, dst_layer_stride = 0, src_page_stride = 0, dst_page_stride = 0;
    // Null: all layers may go. Else layer l may go once *word >= first_value + l.
    const uint64_t* word = nullptr;
    uint64_t first_value = 0;

    // Position of the next atom that is not posted, and the layers before which everything may go.
    struct Cursor {
        uint32_t layer = 0, page = 0;
    } cursor;
    uint32_t due_layers = 0;

    bool ready() const { return cursor.layer < due_layers; }
    bool finished() const { return cursor.layer == num_layers; }
    bool armed() const { return due_layers < num_layers; }
    // Reads the word (acquire). True if more layers became due.
    bool look();
    // The next write from `cursor`: whole atoms, at most 256 of them. Moves `cursor` past it.
    void next_write(const WriteShape& shape, Cursor& from, std::vector<Piece>& pieces) const;

  private:
    void step(Cursor& from) const;
    Piece piece_at(const Cursor& from) const;
};

struct Transfer {
    TransferId id;
    LinkId link;
    uint32_t slot, generation;
    std::vector<std::unique_ptr<Batch>> batches;  // those that are not wholly posted
    uint64_t posted_atoms = 0, failed_atoms = 0;
    uint32_t in_flight = 0;
    bool sealed = false, cancelled = false;
    int code = 0;         // not 0: failed
    bool queued = false;  // in its link's ready list
    int64_t first_post_ns = 0, last_progress_ns = 0;

    bool ended() const { return cancelled || code != 0; }
    bool done() const { return in_flight == 0 && (ended() || (sealed && batches.empty())); }
    Batch* first_ready() const;
    bool armed() const;
    void drop_finished();
};

}  // namespace pdx
