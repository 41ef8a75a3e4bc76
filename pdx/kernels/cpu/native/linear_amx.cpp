// A bfloat16 linear layer on AMX, for any number of rows. y^T = weight x^T: the weights as they lie
// are the first factor of TDPBF16PS (16 rows of 32), so that they are read once and copied nowhere;
// only x is put into pairs, [in / 2][tokens][2], which is small. An output is summed over `in` in one
// fixed order, whatever the number of rows or threads: a request's rows have the bits that they have
// alone. Sums are float32; denormals count as zero, in and out (Intel, "Instruction Set Extensions
// Programming Reference", TDPBF16PS). Linux wants to be asked for the tiles (its documentation,
// arch/x86/xstate.rst).
#include "vector.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "amx.hpp"

namespace {

constexpr int kDepthInL1 = 256;   // of 32 rows of weights, and of as many tokens: 16 KiB each
constexpr int kTokensInL2 = 256;  // whose inputs are 1.1 MiB where `in` is 2,304

struct Product {
    const Bf16* packed;           // [blocks of tokens][in / 32][16][width][2]
    const Bf16* weight;           // [out, in]
    const Bf16* bias;             // [out], or null
    Bf16* y;                      // [T, out]
    int64_t num_tokens, in, out;
    int64_t width;                // tokens of a block: 16, or all where they are fewer
};

// One block of tokens of x [T, in] into pairs; zeros past the tokens and past `in`.
PDX_AMX void pack(const Bf16* x, Bf16* packed, const Product& p, int64_t block) {
    const int64_t token = block * p.width;
    const int64_t count = p.num_tokens - token < p.width ? p.num_tokens - token : p.width;
    const __mmask16 stored = static_cast<__mmask16>((1u << p.width) - 1u);
    for (int64_t i = 0; i < p.in; i += kDepth) {
        const __mmask32 loaded = first(p.in - i);
        Words rows[kTile] = {};
#pragma GCC unroll 16
        for (int t = 0; t < kTile; ++t)
            rows[t] = reinterpret_cast<Words>(_mm512_maskz_loadu_epi16(
                t < count ? loaded : 0, x + (token + t) * p.in + i));
        transpose(rows);
#pragma GCC unroll 16
        for (int pair = 0; pair < kTile; ++pair, packed += p.width * 2)
            _mm512_mask_storeu_epi32(packed, stored, reinterpret_cast<__m512i>(rows[pair]));
    }
}

// 16 rows of weights; the last ones may be fewer.
struct Panel {
    const Bf16* weight;
    int64_t num_rows, in;
    alignas(64) Bf16 copy[kTile * kDepth];  // of a tile that is not whole

    struct Tile {
        const Bf16* start;
        int64_t stride;  // bytes
    };
    PDX_INLINE Tile tile(int64_t i) {
        if (num_rows == kTile && i + kDepth <= in) [[likely]] return {weight + i, in * 2};
        const int64_t size = (in - i < kDepth ? in - i : kDepth) * 2;
        std::memset(copy, 0, sizeof copy);
        for (int64_t r = 0; r < num_rows; ++r)
            std::memcpy(copy + r * kDepth, weight + r * in + i, size);
        finish_stores();
        return {copy, kDepth * 2};
    }
};

// Of 32 outputs and one or two blocks of tokens: [panel][block] of two each.
typedef float Sums[4][kTile * kTile];

template <int blocks>
PDX_AMX inline void load_sums(const Sums& sums) {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(2, sums[2], 64);
    if constexpr (blocks == 2) _tile_loadd(1, sums[1], 64);
    if constexpr (blocks == 2) _tile_loadd(3, sums[3], 64);
}

template <int blocks>
PDX_AMX inline void store_sums(Sums& sums) {
    _tile_stored(0, sums[0], 64);
    _tile_stored(2, sums[2], 64);
    if constexpr (blocks == 2) _tile_stored(1, sums[1], 64);
    if constexpr (blocks == 2) _tile_stored(3, sums[3], 64);
}

template <int blocks>
PDX_AMX inline void add(const Panel::Tile& upper, const Panel::Tile& lower, const Bf16* x,
                        int64_t block_size, int64_t width) {
    _tile_loadd(6, x, width * 4);
    _tile_loadd(4, upper.start, upper.stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (blocks == 2) _tile_loadd(7, x + block_size, width * 4);
    if constexpr (blocks == 2) _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower.start, lower.stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (blocks == 2) _tile_dpbf16ps(3, 5, 7);
}

// 32 outputs of a block of tokens into y: plus the bias, rounded to nearest, ties to even.
PDX_AMX void finish(const Product& p, const float* upper, const float* lower, int64_t row,
                    int64_t token) {
    alignas(64) float bias[2 * kTile] = {};
    const int64_t num_rows = p.out - row < 2 * kTile ? p.out - row : 2 * kTile;
    const int64_t count = p.num_tokens - token < p.width ? p.num_tokens - token : p.width;
    if (p.bias)
        for (int64_t r = 0; r < num_rows; ++r) bias[r] = load(p.bias + row + r);
    Words rows[kTile];
    to_rows(upper, lower, bias, rows);
    const __mmask32 stored = first(num_rows);
#pragma GCC unroll 16
    for (int t = 0; t < kTile; ++t)
        _mm512_mask_storeu_epi16(p.y + (token + t) * p.out + row, t < count ? stored : 0,
                                 reinterpret_cast<__m512i>(rows[t]));
}

// Rows of weights to fetch meanwhile.
struct Ahead {
    const Bf16 *begin, *end;
};

// 32 outputs, two blocks of tokens or one, inputs begin to end.
template <int blocks>
PDX_AMX void multiply(const Product& p, Panel* panel, Sums& sums, int64_t row, int64_t block,
                      int64_t begin, int64_t end, Ahead ahead) {
    const int64_t block_size = num_parts(p.in, kDepth) * kDepth * p.width;
    const Bf16* x = p.packed + block * block_size + begin * p.width;
    if (begin == 0)
        zero_sums();
    else
        load_sums<blocks>(sums);
    const bool is_full = panel[1].num_rows == kTile;
    const int64_t whole = is_full ? begin + (end - begin) / kDepth * kDepth : begin;
    Panel::Tile upper{panel[0].weight + begin, p.in * 2}, lower{panel[1].weight + begin, p.in * 2};
    int64_t i = begin;
    for (; i < whole; i += kDepth, x += kDepth * p.width) {
        for (const Bf16* next = ahead.begin + i; next < ahead.end; next += p.in)
            __builtin_prefetch(next, 0, 2);
        add<blocks>(upper, lower, x, block_size, p.width);
        upper.start += kDepth;
        lower.start += kDepth;
    }
    for (; i < end; i += kDepth, x += kDepth * p.width)
        add<blocks>(panel[0].tile(i), panel[1].tile(i), x, block_size, p.width);
    store_sums<blocks>(sums);
    if (end < p.in) return;
    for (int j = 0; j < blocks; ++j)
        finish(p, sums[j], sums[2 + j], row, (block + j) * p.width);
}

// 32 rows of weights times some blocks of tokens: a part of the inputs for all of them, then the
// next, so that the part's weights stay in L1.
PDX_AMX void multiply_blocks(const Product& p, int64_t row, int64_t end, int64_t from, int64_t to) {
    alignas(64) Sums sums[kTokensInL2 / kTile / 2];
    Panel panel[2];
    for (int i = 0; i < 2; ++i) {
        const int64_t left = end - row - i * kTile;
        panel[i].weight = p.weight + (row + i * kTile) * p.in;
        panel[i].num_rows = left < 0 ? 0 : left < kTile ? left : kTile;
        panel[i].in = p.in;
    }
    const Bf16* next = p.weight + (row + 2 * kTile) * p.in;
    const int64_t num_next = row + 4 * kTile <= end ? 2 * kTile : 0;
    const int64_t num_pairs = num_parts(to - from, 2);
    const int64_t depth = num_pairs == 1 ? p.in : kDepthInL1;
    for (int64_t i = 0; i < p.in; i += depth) {
        const int64_t last = i + depth < p.in ? i + depth : p.in;
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            const int64_t block = from + 2 * pair;
            const Ahead ahead{next + num_next * pair / num_pairs * p.in,
                              next + num_next * (pair + 1) / num_pairs * p.in};
            if (block + 1 < to)
                multiply<2>(p, panel, sums[pair], row, block, i, last, ahead);
            else
                multiply<1>(p, panel, sums[pair], row, block, i, last, ahead);
        }
    }
}

// Rows begin to end of the weights, times all tokens.
PDX_AMX void multiply_rows(const Product& p, int64_t begin, int64_t end) {
    constexpr int64_t kBlocks = kTokensInL2 / kTile;
    const int64_t num_blocks = num_parts(p.num_tokens, p.width);
    finish_stores();
    shape_tiles(p.width);
    for (int64_t from = 0; from < num_blocks; from += kBlocks)
        for (int64_t row = begin; row < end; row += 2 * kTile)
            multiply_blocks(p, row, end, from,
                            from + kBlocks < num_blocks ? from + kBlocks : num_blocks);
    release_tiles();
}

bool ask_for_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16Bit) || !(d & kTileBit)) return false;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16"))
        return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

// Whether this process may use AMX; asks the kernel for it.
PDX_EXPORT int pdx_has_amx() {
    static const bool has = ask_for_tiles();
    return has;
}

// x [num_tokens, in], weight [out, in], bias [out] or null, y [num_tokens, out], all bfloat16, `in`
// and num_tokens at least 1. scratch has room for x with `in` filled up to a multiple of 32, and its
// tokens, where they are more than 16, to one of 16. Only after pdx_has_amx() was 1.
PDX_EXPORT void pdx_linear_amx(const Bf16* x, const Bf16* weight, const Bf16* bias, Bf16* y,
                               Bf16* scratch, int64_t num_tokens, int64_t in, int64_t out) {
    const int64_t width = num_tokens < kTile ? num_tokens : kTile;
    const Product p{scratch, weight, bias, y, num_tokens, in, out, width};
    const int64_t num_blocks = num_parts(num_tokens, width), num_shares = num_parts(out, 2 * kTile);
    const int64_t block_size = num_parts(in, kDepth) * kDepth * width;
    const bool alone = num_blocks == 1;
    if (alone) pack(x, scratch, p, 0);
#pragma omp parallel if (out * in >= kMinParallel)
    {
        if (!alone) {
#pragma omp for
            for (int64_t block = 0; block < num_blocks; ++block)
                pack(x, scratch + block * block_size, p, block);
        }
        const int64_t thread = thread_index(), num_threads = thread_count();
        const int64_t begin = num_shares * thread / num_threads * 2 * kTile;
        const int64_t end = num_shares * (thread + 1) / num_threads * 2 * kTile;
        multiply_rows(p, begin, end < out ? end : out);
    }
}

#else

PDX_EXPORT int pdx_has_amx() { return 0; }
PDX_EXPORT void pdx_linear_amx(const Bf16*, const Bf16*, const Bf16*, Bf16*, Bf16*, int64_t,
                               int64_t, int64_t) {}

#endif
