// A bfloat16 linear layer for few rows: each weight is read once, in its stored order, at the speed
// of memory. Products of bfloat16 are exact in float32, so a fused multiply-add has the bits of a
// product and a sum: the result depends on the shapes alone, not on the machine, the number of
// threads, or the other rows.
#include "vector.hpp"

namespace {

// Rows of weights that are multiplied together.
constexpr int kRows = 4;

struct Product {
    const float* x;       // [T, in]
    const Bf16* weight;   // [out, in]
    const Bf16* bias;     // [out], or null
    Bf16* y;              // [T, out]
    int64_t num_tokens, in, out;  // num_tokens 1 to 4
};

template <int rows, int tokens>
PDX_INLINE void multiply(const Product& p, int64_t row) {
    const Bf16* weight = p.weight + row * p.in;
    Floats sums[rows][tokens] = {};
    int64_t i = 0;
    for (; i + kLanes <= p.in; i += kLanes) {
        Floats w[rows];
        for (int r = 0; r < rows; ++r) {
            w[r] = load_lanes(weight + r * p.in + i);
            __builtin_prefetch(weight + (r + rows) * p.in + i);
        }
        for (int t = 0; t < tokens; ++t) {
            const Floats lanes = load_lanes(p.x + t * p.in + i);
            for (int r = 0; r < rows; ++r) sums[r][t] += w[r] * lanes;
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int t = 0; t < tokens; ++t) {
            float total = sum(sums[r][t]);
            for (int64_t j = i; j < p.in; ++j)
                total += load(weight + r * p.in + j) * p.x[t * p.in + j];
            if (p.bias) total += load(p.bias + row + r);
            store(p.y + t * p.out + row + r, total);
        }
}

template <int rows>
PDX_INLINE void multiply_tokens(const Product& p, int64_t row) {
    switch (p.num_tokens) {
        case 1: return multiply<rows, 1>(p, row);
        case 2: return multiply<rows, 2>(p, row);
        case 3: return multiply<rows, 3>(p, row);
        case 4: return multiply<rows, 4>(p, row);
    }
}

PDX_CLONES void multiply_rows(const Product& p, int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) multiply_tokens<kRows>(p, row);
    for (; row < end; ++row) multiply_tokens<1>(p, row);
}

PDX_CLONES void widen(const Bf16* x, float* y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) y[i] = load(x + i);
}

}  // namespace

// x [num_tokens, in], weight [out, in], bias [out] or null, y [num_tokens, out], all bfloat16;
// num_tokens 1 to 4; scratch has num_tokens * in floats.
PDX_EXPORT void pdx_linear(const Bf16* x, const Bf16* weight, const Bf16* bias, Bf16* y,
                           float* scratch, int64_t num_tokens, int64_t in, int64_t out) {
    widen(x, scratch, num_tokens * in);
    const Product product{scratch, weight, bias, y, num_tokens, in, out};
    const int64_t num_blocks = (out + kRows - 1) / kRows;
#pragma omp parallel if (out * in >= kMinParallel)
    {
        const int64_t thread = thread_index(), num_threads = thread_count();
        const int64_t begin = num_blocks * thread / num_threads * kRows;
        const int64_t end = num_blocks * (thread + 1) / num_threads * kRows;
        multiply_rows(product, begin, end < out ? end : out);
    }
}
