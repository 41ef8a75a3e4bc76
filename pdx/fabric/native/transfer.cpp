#include "transfer.hpp"

#include <algorithm>
#include <atomic>

#include "slots.hpp"

namespace pdx {

bool Batch::look() {
    const uint64_t value = std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
    if (value < first_value) return false;
    const auto due = static_cast<uint32_t>(std::min<uint64_t>(value - first_value + 1, num_layers));
    if (due <= due_layers) return false;
    due_layers = due;
    if (src_pages.empty()) cursor.layer = due;
    return true;
}

void Batch::step(Cursor& from) const {
    if (++from.page == src_pages.size()) from.page = 0, from.layer++;
}

Piece Batch::piece_at(const Cursor& from) const {
    return {src_offset + from.layer * src_layer_stride + src_pages[from.page] * src_page_stride,
            dst_offset + from.layer * dst_layer_stride + dst_pages[from.page] * dst_page_stride, page_bytes, 1};
}

void Batch::next_write(const WriteShape& shape, Cursor& from, std::vector<Piece>& pieces) const {
    pieces.clear();
    uint64_t total_bytes = 0;
    uint32_t total_atoms = 0;
    const uint64_t gather_limit = shape.gather_limit(page_bytes);
    for (; from.layer < due_layers && total_atoms < kMaxImmAtoms; step(from)) {
        const Piece atom = piece_at(from);
        Piece* last = pieces.empty() ? nullptr : &pieces.back();
        const uint64_t with_atom = total_bytes + atom.num_bytes;
        if (last && atom.src_offset == last->src_offset + last->num_bytes &&
            atom.dst_offset == last->dst_offset + last->num_bytes && with_atom <= shape.max_merged_bytes) {
            last->num_bytes += atom.num_bytes;
            last->atoms++;
        } else if (!last || (pieces.size() < shape.max_pieces && with_atom <= gather_limit)) {
            pieces.push_back(atom);
        } else {
            break;
        }
        total_bytes = with_atom;
        total_atoms++;
    }
}

Batch* Transfer::first_ready() const {
    for (const auto& batch : batches) {
        if (batch->ready()) return batch.get();
    }
    return nullptr;
}

bool Transfer::armed() const {
    return std::any_of(batches.begin(), batches.end(), [](const auto& batch) { return batch->armed(); });
}

void Transfer::drop_finished() {
    std::erase_if(batches, [](const auto& batch) { return batch->finished(); });
}

}  // namespace pdx
