// Ops of a CPU rank that torch would do in many passes over memory, or many calls. float32 and
// bfloat16; sums in float32. Called with the GIL released, from the rank's main thread; threads are
// OpenMP's, which are torch's own where both load one libgomp. The order of every sum is fixed by
// the shapes alone, so that neither the number of threads nor the company changes a bit; products
// are not contracted, so that neither does the machine.
#include <cmath>
#include <limits>

#include "vector.hpp"

namespace {

constexpr int kMaxGroup = 16;
constexpr int kMaxHeadDim = 256;

template <typename T>
PDX_INLINE void rms_norm_rows(const T* x, const T* weight, T* y, int64_t begin, int64_t end,
                              int64_t size, float eps) {
    for (int64_t row = begin; row < end; ++row) {
        const T* in = x + row * size;
        T* out = y + row * size;
        float lanes[kLanes] = {};
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            for (int j = 0; j < kLanes; ++j) {
                const float value = load(in + i + j);
                lanes[j] += value * value;
            }
        float squares = sum(load_lanes(lanes));
        for (; i < size; ++i) squares += load(in + i) * load(in + i);
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
        for (i = 0; i < size; ++i)
            store(out + i, rounded<T>(load(in + i) * scale) * load(weight + i));
    }
}

template <typename T>
PDX_INLINE void rope_tokens(const T* x, const float* cos, const float* sin, T* y, int64_t begin,
                            int64_t end, int64_t num_heads, int64_t half) {
    for (int64_t token = begin; token < end; ++token) {
        const float* c = cos + token * half;
        const float* s = sin + token * half;
        for (int64_t head = token * num_heads; head < (token + 1) * num_heads; ++head) {
            const T* first = x + head * 2 * half;
            const T* second = first + half;
            T* out = y + head * 2 * half;
            for (int64_t i = 0; i < half; ++i) {
                const float a = load(first + i), b = load(second + i);
                store(out + i, a * c[i] - b * s[i]);
                store(out + half + i, b * c[i] + a * s[i]);
            }
        }
    }
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2]; within 2 units of the last place, 0 below
// -87; NaN stays NaN.
PDX_INLINE Floats exp_negative(Floats x) {
    const Floats lowest = Floats{} - 87.0f;
    const Floats clamped = x < lowest ? lowest : x;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no digits after the point
    const Floats n = (clamped * 1.44269504f + kRound) - kRound;
    const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = Floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, sizeof power);
    return x < lowest ? Floats{} : p * power;
}

// What one request's query heads of one KV head need.
template <typename T>
struct HeadTask {
    const T* q;             // [group, head_dim]
    const T* kv;            // of this head in page 0
    T* out;                 // [group, head_dim]
    const int32_t* pages;   // the request's page table
    int64_t page_stride;    // elements from a page to the next
    int64_t seq_len;        // tokens that these queries see
    int64_t page_size;
    int group;
    int head_dim;           // a multiple of kLanes
    float scale;
};

// Tokens whose softmax weights are computed together.
constexpr int kTile = kLanes;

// Softmax tile by tile, with a running maximum (Milakov and Gimelshein 2018). K and V are read once
// for all query heads of the group. NaN in a score or a value reaches the result.
template <typename T>
struct Softmax {
    int dim, group;
    float q[kMaxGroup * kMaxHeadDim];
    float sums[kMaxGroup * kMaxHeadDim];  // of weighted values
    float highest[kMaxGroup], total[kMaxGroup];

    PDX_INLINE void begin(const HeadTask<T>& task) {
        dim = task.head_dim;
        group = task.group;
        for (int i = 0; i < group * dim; ++i) {
            q[i] = load(task.q + i) * task.scale;
            sums[i] = 0.0f;
        }
        for (int g = 0; g < group; ++g) {
            highest[g] = -std::numeric_limits<float>::infinity();
            total[g] = 0.0f;
        }
    }

    PDX_INLINE void add(const T* keys, const T* values, int count) {
        float rows[kTile * kMaxHeadDim];
        float weights[kMaxGroup][kTile];
        for (int i = 0; i < count * dim; ++i) rows[i] = load(keys + i);
        for (int g = 0; g < group; ++g) {
            for (int token = 0; token < count; ++token) {
                Floats lanes{};
                for (int i = 0; i < dim; i += kLanes)
                    lanes += load_lanes(q + g * dim + i) * load_lanes(rows + token * dim + i);
                weights[g][token] = sum(lanes);
            }
            for (int token = count; token < kTile; ++token)
                weights[g][token] = -std::numeric_limits<float>::infinity();
            weigh(g, weights[g]);
        }
        for (int i = 0; i < count * dim; ++i) rows[i] = load(values + i);
        for (int g = 0; g < group; ++g)
            for (int i = 0; i < dim; i += kLanes) {
                Floats lanes = load_lanes(sums + g * dim + i);
                for (int token = 0; token < count; ++token)
                    lanes += weights[g][token] * load_lanes(rows + token * dim + i);
                store_lanes(sums + g * dim + i, lanes);
            }
    }

    // Scores into weights, by a maximum that may have risen.
    PDX_INLINE void weigh(int g, float* scores) {
        float top = highest[g];
        for (int token = 0; token < kTile; ++token) top = scores[token] > top ? scores[token] : top;
        if (top > highest[g]) {
            const float shrink = exp_negative(Floats{} + (highest[g] - top))[0];
            highest[g] = top;
            total[g] *= shrink;
            for (int i = 0; i < dim; ++i) sums[g * dim + i] *= shrink;
        }
        const Floats weights = exp_negative(load_lanes(scores) - top);
        store_lanes(scores, weights);
        total[g] += sum(weights);
    }

    PDX_INLINE void end(T* out) const {
        for (int g = 0; g < group; ++g)
            for (int i = 0; i < dim; ++i) store(out + g * dim + i, sums[g * dim + i] / total[g]);
    }
};

template <typename T>
PDX_INLINE void attend(const HeadTask<T>& task) {
    Softmax<T> softmax;
    softmax.begin(task);
    const int64_t half = task.page_size * task.head_dim;
    for (int64_t done = 0; done < task.seq_len; done += task.page_size) {
        const T* keys = task.kv + int64_t{task.pages[done / task.page_size]} * task.page_stride;
        const int64_t left = task.seq_len - done;
        const int64_t count = left < task.page_size ? left : task.page_size;
        for (int64_t token = 0; token < count; token += kTile) {
            const int64_t in_tile = count - token < kTile ? count - token : kTile;
            const T* tile = keys + token * task.head_dim;
            softmax.add(tile, tile + half, static_cast<int>(in_tile));
        }
    }
    softmax.end(task.out);
}

PDX_CLONES void norm_f32(const float* x, const float* w, float* y, int64_t b, int64_t e, int64_t n,
                         float eps) {
    rms_norm_rows(x, w, y, b, e, n, eps);
}
PDX_CLONES void norm_bf16(const Bf16* x, const Bf16* w, Bf16* y, int64_t b, int64_t e, int64_t n,
                          float eps) {
    rms_norm_rows(x, w, y, b, e, n, eps);
}
PDX_CLONES void rope_f32(const float* x, const float* c, const float* s, float* y, int64_t b,
                         int64_t e, int64_t heads, int64_t half) {
    rope_tokens(x, c, s, y, b, e, heads, half);
}
PDX_CLONES void rope_bf16(const Bf16* x, const float* c, const float* s, Bf16* y, int64_t b,
                          int64_t e, int64_t heads, int64_t half) {
    rope_tokens(x, c, s, y, b, e, heads, half);
}
PDX_CLONES void attend_f32(const HeadTask<float>& task) { attend(task); }
PDX_CLONES void attend_bf16(const HeadTask<Bf16>& task) { attend(task); }

template <typename T>
void decode_attention(const T* q, const T* kv, T* out, const int32_t* query_starts,
                      const int32_t* query_lens, const int32_t* seq_lens,
                      const int32_t* table_starts, const int32_t* pages, int64_t num_requests,
                      int64_t num_kv_heads, int64_t group, int64_t page_size, int64_t head_dim,
                      float scale, void (*attend_one)(const HeadTask<T>&)) {
    const int64_t head_stride = 2 * page_size * head_dim;
    const int64_t num_tasks = num_requests * num_kv_heads;
#pragma omp parallel for schedule(dynamic) if (num_tasks > 1)
    for (int64_t idx = 0; idx < num_tasks; ++idx) {
        const int64_t request = idx / num_kv_heads, head = idx % num_kv_heads;
        HeadTask<T> task;
        task.kv = kv + head * head_stride;
        task.pages = pages + table_starts[request];
        task.page_stride = num_kv_heads * head_stride;
        task.page_size = page_size;
        task.group = static_cast<int>(group);
        task.head_dim = static_cast<int>(head_dim);
        task.scale = scale;
        for (int64_t row = 0; row < query_lens[request]; ++row) {
            const int64_t first = ((query_starts[request] + row) * num_kv_heads + head) * group * head_dim;
            task.q = q + first;
            task.out = out + first;
            task.seq_len = seq_lens[request] - query_lens[request] + row + 1;
            attend_one(task);
        }
    }
}

// Rows of about equal shares.
template <typename Work>
void in_shares(int64_t num_rows, int64_t num_elements, const Work& work) {
    const int64_t num_shares = num_elements < kMinParallel ? 1 : (num_rows < 64 ? num_rows : 64);
#pragma omp parallel for schedule(static) if (num_shares > 1)
    for (int64_t share = 0; share < num_shares; ++share)
        work(num_rows * share / num_shares, num_rows * (share + 1) / num_shares);
}

}  // namespace

// x, y [num_rows, size]; is_bf16 of all tensors alike, here and below.
PDX_EXPORT void pdx_rms_norm(const void* x, const void* weight, void* y, int64_t num_rows,
                             int64_t size, float eps, int is_bf16) {
    in_shares(num_rows, num_rows * size, [&](int64_t begin, int64_t end) {
        if (is_bf16)
            norm_bf16(static_cast<const Bf16*>(x), static_cast<const Bf16*>(weight),
                static_cast<Bf16*>(y), begin, end, size, eps);
        else
            norm_f32(static_cast<const float*>(x), static_cast<const float*>(weight),
               static_cast<float*>(y), begin, end, size, eps);
    });
}

// x, y [num_tokens, num_heads, 2 * half]; cos, sin [num_tokens, half].
PDX_EXPORT void pdx_rope(const void* x, const float* cos, const float* sin, void* y,
                         int64_t num_tokens, int64_t num_heads, int64_t half, int is_bf16) {
    in_shares(num_tokens, num_tokens * num_heads * 2 * half, [&](int64_t begin, int64_t end) {
        if (is_bf16)
            rope_bf16(static_cast<const Bf16*>(x), cos, sin, static_cast<Bf16*>(y), begin, end,
                num_heads, half);
        else
            rope_f32(static_cast<const float*>(x), cos, sin, static_cast<float*>(y), begin, end,
               num_heads, half);
    });
}

// k, v [num_tokens, num_heads, row_bytes] into kv [P, num_heads, 2, page_size, row_bytes].
PDX_EXPORT void pdx_kv_append(const char* k, const char* v, char* kv, const int32_t* pages,
                              const int32_t* offsets, int64_t num_tokens, int64_t num_heads,
                              int64_t page_size, int64_t row_bytes) {
    const int64_t half_bytes = page_size * row_bytes;
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t head = 0; head < num_heads; ++head) {
            const int64_t from = (token * num_heads + head) * row_bytes;
            char* to = kv + (int64_t{pages[token]} * num_heads + head) * 2 * half_bytes + offsets[token] * row_bytes;
            std::memcpy(to, k + from, row_bytes);
            std::memcpy(to + half_bytes, v + from, row_bytes);
        }
}

// q, out [T, num_kv_heads * group, head_dim]; kv [P, num_kv_heads, 2, page_size, head_dim]. Request i
// has query_lens[i] rows of q from query_starts[i] on, which are the last of its seq_lens[i] tokens in
// pages[table_starts[i]...]. Returns 0 where the shape is not one of ours, and has done nothing then.
PDX_EXPORT int pdx_decode_attention(const void* q, const void* kv, void* out,
                                    const int32_t* query_starts, const int32_t* query_lens,
                                    const int32_t* seq_lens, const int32_t* table_starts,
                                    const int32_t* pages, int64_t num_requests,
                                    int64_t num_kv_heads, int64_t group, int64_t page_size,
                                    int64_t head_dim, float scale, int is_bf16) {
    if (group > kMaxGroup || head_dim > kMaxHeadDim || head_dim % kLanes != 0) return 0;
    if (is_bf16)
        decode_attention(static_cast<const Bf16*>(q), static_cast<const Bf16*>(kv),
                     static_cast<Bf16*>(out), query_starts, query_lens, seq_lens,
                     table_starts, pages, num_requests, num_kv_heads, group,
                     page_size, head_dim, scale, attend_bf16);
    else
        decode_attention(static_cast<const float*>(q), static_cast<const float*>(kv),
                     static_cast<float*>(out), query_starts, query_lens, seq_lens,
                     table_starts, pages, num_requests, num_kv_heads, group,
                     page_size, head_dim, scale, attend_f32);
    return 1;
}
