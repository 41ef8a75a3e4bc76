// What the ops of a CPU rank are made of: 16 lanes of float32, and bfloat16 as it lies in memory.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__)
#define PDX_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PDX_CLONES
#endif
#define PDX_INLINE inline __attribute__((always_inline))
#define PDX_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Elements below which a second thread costs more than it gives.
constexpr int64_t kMinParallel = 1 << 15;
constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

struct Bf16 {
    uint16_t bits;
};

PDX_INLINE float load(const float* x) { return *x; }
PDX_INLINE float load(const Bf16* x) {
    const uint32_t wide = static_cast<uint32_t>(x->bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}
PDX_INLINE void store(float* y, float value) { *y = value; }
PDX_INLINE void store(Bf16* y, float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    y->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
template <typename T>
PDX_INLINE float rounded(float value) {
    T stored;
    store(&stored, value);
    return load(&stored);
}

PDX_INLINE Floats load_lanes(const float* x) {
    Floats lanes;
    std::memcpy(&lanes, x, sizeof lanes);
    return lanes;
}
PDX_INLINE Floats load_lanes(const Bf16* x) {
    typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
    Halves bits;
    std::memcpy(&bits, x, sizeof bits);
    const Words wide = __builtin_convertvector(bits, Words) << 16;
    Floats lanes;
    std::memcpy(&lanes, &wide, sizeof lanes);
    return lanes;
}
PDX_INLINE void store_lanes(float* y, Floats lanes) { std::memcpy(y, &lanes, sizeof lanes); }

// A fixed tree.
PDX_INLINE float sum(Floats x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
    return x[0] + x[1];
}

#ifdef _OPENMP
inline int64_t thread_index() { return omp_get_thread_num(); }
inline int64_t thread_count() { return omp_get_num_threads(); }
#else
inline int64_t thread_index() { return 0; }
inline int64_t thread_count() { return 1; }
#endif

}  // namespace
