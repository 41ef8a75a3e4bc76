// Attention of one request's chunk over its pages on AMX, bfloat16. Scores are [key][query]: the keys
// as they lie in a page are the first factor, so that a score's maximum and sum run down the rows,
// 16 queries (tokens of one head) side by side. The sums of values are [dim][query]; values are
// transposed once for all query heads of a group. Softmax chunk by chunk with a running maximum
// (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). A query's keys come in one fixed
// order from the context's start, so that its bits depend neither on where its chunk begins, nor on
// the other rows, nor on the number of threads. NaN in a score or a value reaches the result.
#include "vector.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <limits>

#include "amx.hpp"

namespace {

constexpr int kMaxDim = 256;
constexpr int kKeys = 256;  // whose scores are held at once

struct Chunk {
    const Bf16* q;         // [T, num_heads, dim]
    const Bf16* kv;        // [P, num_kv_heads, 2, page_size, dim]
    Bf16* out;             // as q
    const int32_t* pages;  // the request's page table
    int64_t num_tokens, context_len, num_kv_heads, group, page_size, dim;
    float scale;
};

// Where a token's K of a head lies; its V is page_size * dim elements on.
PDX_INLINE const Bf16* key_at(const Chunk& c, int64_t head, int64_t token) {
    const int64_t page = c.pages[token / c.page_size];
    return c.kv + (((page * c.num_kv_heads + head) * 2) * c.page_size + token % c.page_size) * c.dim;
}

// Values of 32 tokens, [dim / 16][16][32]; zeros past the context.
PDX_AMX void transpose_values(const Chunk& c, int64_t head, int64_t first, Bf16* values) {
    for (int64_t d = 0; d < c.dim; d += kTile, values += kTile * kDepth) {
        Words rows[kTile];
        for (int pair = 0; pair < kTile; ++pair) {
            Bf16 halves[2][kTile] = {};
            for (int i = 0; i < 2; ++i) {
                const int64_t token = first + 2 * pair + i;
                if (token >= c.context_len) continue;
                const Bf16* value = key_at(c, head, token) + c.page_size * c.dim + d;
                std::memcpy(halves[i], value, sizeof halves[i]);
            }
            rows[pair] = paired(_mm512_loadu_si512(halves));
        }
        transpose(rows);
        std::memcpy(values, rows, sizeof rows);
    }
}

// 16 tokens of one query head.
struct alignas(64) Queries {
    Bf16 q[kMaxDim * kTile];           // [dim / 32][16][16][2]
    float scores[kKeys][kTile];
    Words weights[kKeys / 2];          // [keys / 32][16][16][2]
    float sums[kMaxDim][kTile];        // of weighted values
    Floats highest, total;
};

PDX_AMX void begin(Queries& own, const Chunk& c, int64_t query_head, int64_t first) {
    const int64_t num_heads = c.num_kv_heads * c.group;
    for (int64_t d = 0; d < c.dim; d += kDepth) {
        Words rows[kTile] = {};
        for (int t = 0; t < kTile && first + t < c.num_tokens; ++t)
            std::memcpy(rows + t, c.q + ((first + t) * num_heads + query_head) * c.dim + d, 64);
        transpose(rows);
        std::memcpy(own.q + d * kTile, rows, sizeof rows);
    }
    std::memset(own.sums, 0, sizeof(float) * kTile * c.dim);
    own.highest = Floats{} - std::numeric_limits<float>::infinity();
    own.total = Floats{};
}

// Scores of the tokens of some tiles, 16 each.
template <int tiles>
PDX_AMX inline void score_tiles(Queries& own, const Chunk& c, const Bf16* const* keys,
                                float (*scores)[kTile]) {
    const int64_t stride = c.dim * 2;
    zero_sums();
    for (int64_t d = 0; d < c.dim; d += kDepth) {
        _tile_loadd(6, own.q + d * kTile, 64);
        _tile_loadd(4, keys[0] + d, stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (tiles == 4) {
            _tile_loadd(5, keys[1] + d, stride);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, keys[2] + d, stride);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys[3] + d, stride);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    _tile_stored(0, scores[0], 64);
    if constexpr (tiles == 4) {
        _tile_stored(1, scores[kTile], 64);
        _tile_stored(2, scores[2 * kTile], 64);
        _tile_stored(3, scores[3 * kTile], 64);
    }
}

// Scores of tokens first to last, from a multiple of 32, whole tiles of 16.
PDX_AMX void score(Queries& own, const Chunk& c, int64_t head, int64_t first, int64_t last) {
    const Bf16* keys[kKeys / kTile];
    const int64_t num_tiles = num_parts(last - first, kTile);
    for (int64_t i = 0; i < num_tiles; ++i) keys[i] = key_at(c, head, first + i * kTile);
    finish_stores();
    int64_t i = 0;
    for (; i + 4 <= num_tiles; i += 4) score_tiles<4>(own, c, keys + i, own.scores + i * kTile);
    for (; i < num_tiles; ++i) score_tiles<1>(own, c, keys + i, own.scores + i * kTile);
}

// e^x for x <= 0, 0 below -87: 2^n times a polynomial on [-ln2/2, ln2/2], within 2 units of
// the last place. NaN stays NaN.
PDX_AMX PDX_INLINE Floats exponential(Floats scores) {
    const __m512 lowest = _mm512_set1_ps(-87.0f), given = reinterpret_cast<__m512>(scores);
    const __mmask16 counts = _mm512_cmp_ps_mask(given, lowest, _CMP_NLT_UQ);
    const __m512 x = _mm512_max_ps(lowest, given);
    const __m512 n = _mm512_roundscale_ps(x * _mm512_set1_ps(1.44269504f), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return reinterpret_cast<Floats>(_mm512_maskz_scalef_ps(counts, p, n));
}

// Scores of tokens first to last into weights, in pairs, up to a multiple of 32; a query sees the
// tokens below its limit. Returns what the sums shrink by.
PDX_AMX Floats weigh(Queries& own, const Chunk& c, int64_t first, int64_t last, Ints limits) {
    const Floats nothing = Floats{} - std::numeric_limits<float>::infinity();
    const int num_rows = static_cast<int>(num_parts(last - first, kDepth) * kDepth);
    const int64_t seen_by_all = limits[0] - first;
    for (int64_t i = seen_by_all < 0 ? 0 : seen_by_all; i < num_rows; ++i) {
        const Ints token = Ints{} + static_cast<int32_t>(first + i);
        store_lanes(own.scores[i], token < limits ? load_lanes(own.scores[i]) : nothing);
    }
    __m512 evens = reinterpret_cast<__m512>(nothing), odds = evens;
    for (int i = 0; i < num_rows; i += 2) {  // NaN is passed over
        evens = _mm512_max_ps(_mm512_load_ps(own.scores[i]), evens);
        odds = _mm512_max_ps(_mm512_load_ps(own.scores[i + 1]), odds);
    }
    const Floats in_rows = reinterpret_cast<Floats>(_mm512_max_ps(evens, odds));
    const Floats highest = in_rows * c.scale > own.highest ? in_rows * c.scale : own.highest;
    const Floats shrink = exponential(own.highest - highest);
    Floats total = own.total * shrink;
    for (int i = 0; i < num_rows; i += 2) {
        const Floats even = exponential(load_lanes(own.scores[i]) * c.scale - highest);
        const Floats odd = exponential(load_lanes(own.scores[i + 1]) * c.scale - highest);
        total += even + odd;
        own.weights[i / 2] = rounded_pairs(even, odd);
    }
    own.highest = highest;
    own.total = total;
    return shrink;
}

// Adds the values of num_steps times 32 tokens to sums of 32 or 64 dims.
template <int tiles>
PDX_AMX inline void add_values(Queries& own, int64_t dim, const Bf16* values, int64_t num_steps,
                               float (*sums)[kTile]) {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[kTile], 64);
    if constexpr (tiles == 4) _tile_loadd(2, sums[2 * kTile], 64);
    if constexpr (tiles == 4) _tile_loadd(3, sums[3 * kTile], 64);
    for (int64_t step = 0; step < num_steps; ++step, values += dim * kDepth) {
        _tile_loadd(6, own.weights + step * kTile, 64);
        _tile_loadd(4, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, values + kTile * kDepth, 64);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (tiles == 4) {
            _tile_loadd(4, values + 2 * kTile * kDepth, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, values + 3 * kTile * kDepth, 64);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[kTile], 64);
    if constexpr (tiles == 4) _tile_stored(2, sums[2 * kTile], 64);
    if constexpr (tiles == 4) _tile_stored(3, sums[3 * kTile], 64);
}

PDX_AMX void end(Queries& own, const Chunk& c, int64_t query_head, int64_t first) {
    const int64_t num_heads = c.num_kv_heads * c.group;
    const float zeros[2 * kTile] = {};
    for (int64_t d = 0; d < c.dim; d += kDepth) {
        Words rows[kTile];
        for (int i = 0; i < kDepth; ++i)
            store_lanes(own.sums[d + i], load_lanes(own.sums[d + i]) / own.total);
        to_rows(own.sums[d], own.sums[d + kTile], zeros, rows);
        for (int t = 0; t < kTile && first + t < c.num_tokens; ++t)
            std::memcpy(c.out + ((first + t) * num_heads + query_head) * c.dim + d, rows + t, 64);
    }
}

PDX_AMX void attend(Queries& own, const Chunk& c, const Bf16* values, int64_t query_head,
                    int64_t first) {
    const int64_t head = query_head / c.group, seen = c.context_len - c.num_tokens + first + 1;
    Ints limits;
    for (int t = 0; t < kTile; ++t)
        limits[t] = static_cast<int32_t>(seen + t < c.context_len ? seen + t : c.context_len);
    begin(own, c, query_head, first);
    for (int64_t token = 0; token < limits[kTile - 1]; token += kKeys) {
        const int64_t left = limits[kTile - 1] - token, last = token + (left < kKeys ? left : kKeys);
        score(own, c, head, token, last);
        const Floats shrink = weigh(own, c, token, last, limits);
        if (token > 0)
            for (int64_t d = 0; d < c.dim; ++d)
                store_lanes(own.sums[d], load_lanes(own.sums[d]) * shrink);
        finish_stores();
        const int64_t num_steps = num_parts(last - token, kDepth);
        const Bf16* chunk = values + token * c.dim;
        int64_t d = 0;
        for (; d + 64 <= c.dim; d += 64)
            add_values<4>(own, c.dim, chunk + d * kDepth, num_steps, own.sums + d);
        if (d < c.dim) add_values<2>(own, c.dim, chunk + d * kDepth, num_steps, own.sums + d);
    }
    end(own, c, query_head, first);
}

}  // namespace

// q, out [num_tokens, num_kv_heads * group, dim], the last tokens of a context of context_len; kv
// [P, num_kv_heads, 2, page_size, dim] has all of it, in `pages`. All bfloat16. scratch has room for
// dim times context_len, filled up to a multiple of 32. Only after pdx_has_amx() was 1. Returns 0
// where the shape is not one of ours, and has done nothing then.
PDX_EXPORT int pdx_chunk_attention(const Bf16* q, const Bf16* kv, Bf16* out, const int32_t* pages,
                                   Bf16* scratch, int64_t num_tokens, int64_t context_len,
                                   int64_t num_kv_heads, int64_t group, int64_t page_size,
                                   int64_t dim, float scale) {
    if (dim > kMaxDim || dim % kDepth != 0 || page_size % kTile != 0 || !(scale > 0)) return 0;
    const Chunk c{q,           kv,           out,   pages,     num_tokens,
                  context_len, num_kv_heads, group, page_size, dim, scale};
    const int64_t num_blocks = num_parts(num_tokens, kTile);
#pragma omp parallel
    {
        Queries own;
        shape_tiles(kTile);
        for (int64_t head = 0; head < num_kv_heads; ++head) {
#pragma omp for
            for (int64_t token = 0; token < context_len; token += kDepth)
                transpose_values(c, head, token, scratch + token * dim);
#pragma omp for schedule(dynamic)
            for (int64_t idx = 0; idx < num_blocks * group; ++idx) {
                const int64_t block = num_blocks - 1 - idx / group;  // the longest first
                attend(own, c, scratch, head * group + idx % group, block * kTile);
            }
        }
        release_tiles();
    }
    return 1;
}

#else

PDX_EXPORT int pdx_chunk_attention(const void*, const void*, void*, const int32_t*, void*, int64_t,
                                   int64_t, int64_t, int64_t, int64_t, int64_t, float) {
    return 0;
}

#endif
