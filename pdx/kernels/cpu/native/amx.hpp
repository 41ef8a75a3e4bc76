// What the ops on AMX are made of. A tile has 16 rows of 64 bytes; TDPBF16PS adds the product of
// one [16][32] bfloat16 and one of pairs, [16][16][2], to one [16][16] float32. Denormals count as
// zero, in and out (Intel, "Instruction Set Extensions Programming Reference", TDPBF16PS).
#pragma once

#include <immintrin.h>

#include "vector.hpp"

#define PDX_AMX __attribute__((target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")))

namespace {

constexpr int kTile = 16;   // rows of a tile, and columns of sums
constexpr int kDepth = 32;  // summed over by one instruction

PDX_INLINE int64_t num_parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Compilers do not know what a tile's load reads: call this between a store and it.
PDX_INLINE void finish_stores() { __asm__ volatile("" : : : "memory"); }

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};

// Sums in 0 to 3, weights in 4 and 5, inputs in 6 and 7.
PDX_AMX void shape_tiles(int64_t width) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.num_rows[tile] = kTile;
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? kDepth * 2 : width * 4;
    }
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

PDX_AMX inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

PDX_AMX void release_tiles() { _tile_release(); }

// Of 16 x 16 words, in four rounds: squares of 1, 2, 4 and 8 change places with their neighbours.
PDX_AMX PDX_INLINE void transpose(Words rows[kTile]) {
    Words t[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10,
                                       26, 12, 28, 14, 30);
        t[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25,
                                           11, 27, 13, 29, 15, 31);
    }
#pragma GCC unroll 16
    for (int n = 0; n < 8; ++n) {
        const int i = n / 2 * 4 + n % 2;
        rows[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25,
                                          12, 13, 28, 29);
        rows[i + 2] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11,
                                              26, 27, 14, 15, 30, 31);
    }
#pragma GCC unroll 16
    for (int n = 0; n < 8; ++n) {
        const int i = n / 4 * 8 + n % 4;
        t[i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10,
                                       11, 24, 25, 26, 27);
        t[i + 4] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13,
                                           14, 15, 28, 29, 30, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
        rows[i] = __builtin_shufflevector(t[i], t[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                          20, 21, 22, 23);
        rows[i + 8] = __builtin_shufflevector(t[i], t[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
                                              26, 27, 28, 29, 30, 31);
    }
}

// The first `count` of 32 bfloat16.
PDX_INLINE __mmask32 first(int64_t count) {
    return count < kDepth ? (1u << count) - 1u : ~__mmask32{};
}

typedef uint16_t HalfWords __attribute__((vector_size(64)));

// Two halves of 16 become 16 pairs.
constexpr HalfWords kPaired = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

PDX_AMX PDX_INLINE Words paired(__m512i halves) {
    return reinterpret_cast<Words>(
        _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(kPaired), halves));
}

// 16 pairs of float32, rounded to bfloat16: to nearest, ties to even.
PDX_AMX PDX_INLINE Words rounded_pairs(Floats even, Floats odd) {
    return paired(reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd), reinterpret_cast<__m512>(even))));
}

// Two tiles of sums, one above the other, plus a number for each row, to 16 rows of 32 bfloat16: the
// sums' columns.
PDX_AMX PDX_INLINE void to_rows(const float* upper, const float* lower, const float* more,
                                Words rows[kTile]) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
        const float* sums = (i < 8 ? upper : lower) + i % 8 * 2 * kTile;
        rows[i] = rounded_pairs(load_lanes(sums) + more[2 * i],
                                load_lanes(sums + kTile) + more[2 * i + 1]);
    }
    transpose(rows);
}

}  // namespace
