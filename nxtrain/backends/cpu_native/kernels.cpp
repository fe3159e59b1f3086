// Kernels of the CPU backend: one pass over memory where torch's operations take several.
//
// Built on first use by build.py, and called through ctypes: plain C functions on raw pointers, and no header of torch.
// Types of elements are float and bfloat16; all arithmetic is float. Results do not depend on the number of threads.
// Matrix products of attention are oneDNN's, through libtorch_cpu, which use AMX or avx512_bf16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {
void brgemm(long m, long n, long k, long lda, long ldb, long ldc, bool add, const c10::BFloat16* a,
            const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Bits of the nearest bfloat16, ties to even; NaN stays NaN.
inline uint32_t narrow_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0u : rounded;
}
inline void store(float& out, float x) { out = x; }
inline void store(bf16& out, float x) { out.bits = uint16_t(narrow_bits(x)); }

// e^x to 1e-7 of its value. NaN gives NaN; below -87 the result is 0.
inline float exp_(float x) {
    float y = x > 88.0f ? 88.0f : x;
    y = y < -87.0f ? -87.0f : y;
    float n = __builtin_nearbyintf(y * 1.44269504f);
    float r = y - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    p *= scale;
    p = x < -87.0f ? 0.0f : p;
    return x > 88.0f ? INFINITY : p;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

constexpr long ROWS = 32;    // rows that one partial sum of weight gradients covers
constexpr long PART = 4096;  // entries that one float sum of squares covers

template <class T>
void rms_norm_forward(const T* x, const T* weight, T* out, float* rstd, long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const T* in = x + row * size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < size; i++) sum += wide(in[i]) * wide(in[i]);
        float factor = 1.0f / std::sqrt(sum / float(size) + eps);
        rstd[row] = factor;
#pragma omp simd
        for (long i = 0; i < size; i++) store(out[row * size + i], wide(in[i]) * factor * wide(weight[i]));
    }
}

template <class T>
void rms_norm_backward(const T* grad, const T* x, const T* weight, const float* rstd, T* x_grad, float* weight_grad,
                       long rows, long size, int threads) {
    long parts = (rows + ROWS - 1) / ROWS;
    std::vector<float> partial(parts * size, 0.0f);
#pragma omp parallel for num_threads(threads)
    for (long part = 0; part < parts; part++) {
        float* sums = partial.data() + part * size;
        for (long row = part * ROWS; row < std::min(rows, (part + 1) * ROWS); row++) {
            const T *g = grad + row * size, *in = x + row * size;
            float factor = rstd[row], inner = 0;
#pragma omp simd reduction(+ : inner)
            for (long i = 0; i < size; i++) inner += wide(g[i]) * wide(weight[i]) * wide(in[i]);
            inner *= factor * factor / float(size);
#pragma omp simd
            for (long i = 0; i < size; i++) {
                float normed = wide(in[i]), outer = wide(g[i]);
                store(x_grad[row * size + i], (outer * wide(weight[i]) - normed * inner) * factor);
                sums[i] += outer * normed * factor;
            }
        }
    }
    std::fill(weight_grad, weight_grad + size, 0.0f);
    for (long part = 0; part < parts; part++)
#pragma omp simd
        for (long i = 0; i < size; i++) weight_grad[i] += partial[part * size + i];
}

template <class T>
void swiglu_forward(const T* gate_up, T* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
#pragma omp simd
        for (long i = 0; i < size; i++) {
            float g = wide(gate[i]);
            store(out[row * size + i], g * sigmoid(g) * wide(up[i]));
        }
    }
}

template <class T>
void swiglu_backward(const T* gate_up, const T* grad, T* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T *gate_grad = out + row * 2 * size, *up_grad = gate_grad + size;
#pragma omp simd
        for (long i = 0; i < size; i++) {
            float g = wide(gate[i]), s = sigmoid(g), d = wide(grad[row * size + i]);
            store(gate_grad[i], d * wide(up[i]) * s * (1.0f + g * (1.0f - s)));
            store(up_grad[i], d * g * s);
        }
    }
}

// x: (S, B, N, 2 half) with these strides of its first three dimensions, out: the same shape, contiguous.
template <class T>
void rotate(const T* x, const long* strides, const float* cos, const float* sin, float sign, T* out, long length,
            long batch, long heads, long half, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long s = 0; s < length; s++) {
        const float *c = cos + s * half, *d = sin + s * half;
        for (long b = 0; b < batch; b++)
            for (long n = 0; n < heads; n++) {
                const T* in = x + s * strides[0] + b * strides[1] + n * strides[2];
                T* to = out + ((s * batch + b) * heads + n) * 2 * half;
#pragma omp simd
                for (long i = 0; i < half; i++) {
                    float first = wide(in[i]), second = wide(in[half + i]), turn = sign * d[i];
                    store(to[i], first * c[i] - second * turn);
                    store(to[half + i], second * c[i] + first * turn);
                }
            }
    }
}

template <class T>
void row_square_sums(const T* x, float* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const T* in = x + row * size;
        double total = 0;  // of sums over parts, since one float sum of millions of small squares loses digits
        for (long first = 0; first < size; first += PART) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long i = first; i < std::min(size, first + PART); i++) sum += wide(in[i]) * wide(in[i]);
            total += sum;
        }
        out[row] = float(total);
    }
}

// Largest entry of each row, and the sum of e^(entry - largest), over the first `used` columns.
template <class T>
void softmax_sums(const T* logits, float* peaks, float* sums, long rows, long columns, long used, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const T* in = logits + row * columns;
        float peak = -INFINITY, sum = 0;
#pragma omp simd reduction(max : peak)
        for (long i = 0; i < used; i++) peak = std::max(peak, wide(in[i]));
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < used; i++) sum += exp_(wide(in[i]) - peak);
        peaks[row] = peak;
        sums[row] = sum;
    }
}

// Overwrites logits with (e^(logit - log_sum) - [column is the target]) * counted; columns from `used` on get 0.
// A target of -1 is in no column.
template <class T>
void softmax_grad(T* logits, const float* log_sums, const long* targets, const float* counted, long rows, long columns,
                  long used, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        T* in = logits + row * columns;
        float log_sum = log_sums[row], factor = counted[row];
        float at_target = targets[row] < 0 ? 0.0f : exp_(wide(in[targets[row]]) - log_sum);
#pragma omp simd
        for (long i = 0; i < used; i++) store(in[i], exp_(wide(in[i]) - log_sum) * factor);
        for (long i = used; i < columns; i++) store(in[i], 0.0f);
        if (targets[row] >= 0) store(in[targets[row]], (at_target - 1.0f) * factor);
    }
}

// ---- Attention -------------------------------------------------------------------------------------------------

constexpr long BLOCK = 64;  // rows and columns of a block of scores

struct Matrix {  // rows of one head, each contiguous
    const bf16* data;
    long stride;
    const bf16* row(long i) const { return data + i * stride; }
};

inline void product(long m, long n, long k, const bf16* a, long lda, const bf16* b, float* c, long ldc, bool add) {
    at::native::cpublas::brgemm(m, n, k, lda, n, ldc, add, reinterpret_cast<const c10::BFloat16*>(a),
                                reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

// Right-hand operand of a product from the transpose of `rows` rows, in pairs: [width / 2][BLOCK][2].
void pack_transposed(const Matrix& x, long rows, long width, bf16* out) {
    auto* to = reinterpret_cast<uint32_t*>(out);
    for (long r = 0; r < rows; r++) {
        const bf16* in = x.row(r);
        for (long pair = 0; pair < width / 2; pair++) std::memcpy(&to[pair * BLOCK + r], in + 2 * pair, 4);
    }
    for (long r = rows; r < BLOCK; r++)
        for (long pair = 0; pair < width / 2; pair++) to[pair * BLOCK + r] = 0;
}

// Right-hand operand of a product from `rows` rows as they are, in pairs: [BLOCK / 2][width][2].
void pack(const Matrix& x, long rows, long width, bf16* out) {
    auto* to = reinterpret_cast<uint32_t*>(out);
    for (long pair = 0; pair < BLOCK / 2; pair++) {
        long r = 2 * pair;
        const uint16_t* first = r < rows ? &x.row(r)->bits : nullptr;
        const uint16_t* second = r + 1 < rows ? &x.row(r + 1)->bits : nullptr;
        uint32_t* line = to + pair * width;
        if (second)
#pragma omp simd
            for (long i = 0; i < width; i++) line[i] = uint32_t(first[i]) | uint32_t(second[i]) << 16;
        else
            for (long i = 0; i < width; i++) line[i] = first ? first[i] : 0;
    }
}

struct Shape {
    long length, batch, heads, kv_heads, width;
    long blocks() const { return (length + BLOCK - 1) / BLOCK; }
    long rows(long block) const { return std::min(BLOCK, length - block * BLOCK); }
    long operand() const { return BLOCK * width; }  // entries of one packed block
};

struct View {  // (S, B, N, H), the last dimension contiguous
    const bf16* data;
    long s, b, n;
    Matrix head(long batch, long head) const { return {data + batch * b + head * n, s}; }
    Matrix rows(long batch, long head, long first) const { return {data + first * s + batch * b + head * n, s}; }
};

void forward_head(const Shape& shape, const View& q, const bf16* keys, const bf16* values, bf16* out, float* log_sums,
                  long b, long n, float scale, float* scores, bf16* weights, float* sums) {
    long width = shape.width, row_size = shape.batch * shape.heads * width, line = shape.blocks() * BLOCK;
    for (long i = 0; i < shape.blocks(); i++) {
        long rows = shape.rows(i), first = i * BLOCK;
        Matrix block = q.rows(b, n, first);
        for (long j = 0; j <= i; j++)
            product(rows, BLOCK, width, block.data, block.stride, keys + j * shape.operand(), scores + j * BLOCK, line, false);
        for (long r = 0; r < rows; r++) {
            float *score = scores + r * line, peak = -INFINITY, sum = 0;
            long seen = first + r + 1, end = (i + 1) * BLOCK;
#pragma omp simd reduction(max : peak)
            for (long t = 0; t < seen; t++) peak = std::max(peak, score[t]);
            bf16* weight = weights + r * line;
#pragma omp simd reduction(+ : sum)
            for (long t = 0; t < seen; t++) {
                float p = exp_((score[t] - peak) * scale);
                sum += p;
                store(weight[t], p);
            }
            std::memset(weight + seen, 0, (end - seen) * sizeof(bf16));
            sums[r] = sum;
            log_sums[first + r] = peak * scale + std::log(sum);
        }
        for (long j = 0; j <= i; j++)
            product(rows, width, BLOCK, weights + j * BLOCK, line, values + j * shape.operand(), scores, width, j > 0);
        for (long r = 0; r < rows; r++) {
            float factor = 1.0f / sums[r];
            bf16* to = out + (first + r) * row_size + (b * shape.heads + n) * width;
#pragma omp simd
            for (long h = 0; h < width; h++) store(to[h], scores[r * width + h] * factor);
        }
    }
}

struct Scratch {  // of one thread of the backward pass
    std::vector<bf16> q_t, q, g_t, g, k_t, weights, score_grads, pairs;
    std::vector<float> scores, grads, q_grad, k_grad, v_grad, inner;
    explicit Scratch(const Shape& s)
        : q_t(s.blocks() * s.operand()), q(q_t.size()), g_t(q_t.size()), g(q_t.size()), k_t(q_t.size()),
          weights(BLOCK * BLOCK), score_grads(BLOCK * BLOCK), pairs(BLOCK * BLOCK), scores(BLOCK * BLOCK),
          grads(BLOCK * BLOCK), q_grad(q_t.size()), k_grad(q_t.size()), v_grad(q_t.size()), inner(s.blocks() * BLOCK) {}
};

// Weights and gradients of a transposed block of scores, (keys j, queries i), from its scores and weight gradients.
void score_gradients(Scratch& w, long i, long j, long rows, const float* log_sums, float scale) {
    const float* inner = w.inner.data() + i * BLOCK;
    for (long pair = 0; pair < BLOCK / 2; pair++) {
        for (long t = 2 * pair; t < 2 * pair + 2; t++) {
            float *score = w.scores.data() + t * BLOCK, *grad = w.grads.data() + t * BLOCK;
            long from = i == j ? std::min(t, rows) : 0;  // query r sees key t if r >= t
            for (long r = 0; r < from; r++) score[r] = grad[r] = 0;
#pragma omp simd
            for (long r = from; r < rows; r++) {
                float p = exp_(score[r] * scale - log_sums[r]);
                score[r] = p;
                grad[r] = p * (grad[r] - inner[r]) * scale;
            }
            for (long r = rows; r < BLOCK; r++) score[r] = grad[r] = 0;
#pragma omp simd
            for (long r = 0; r < BLOCK; r++) {
                store(w.weights[t * BLOCK + r], score[r]);
                store(w.score_grads[t * BLOCK + r], grad[r]);
            }
        }
        auto* to = reinterpret_cast<uint32_t*>(w.pairs.data()) + pair * BLOCK;
        const uint16_t* first = &w.score_grads[2 * pair * BLOCK].bits;
        const uint16_t* second = first + BLOCK;
#pragma omp simd
        for (long r = 0; r < BLOCK; r++) to[r] = uint32_t(first[r]) | uint32_t(second[r]) << 16;
    }
}

void backward_group(const Shape& shape, const View& q, const View& k, const View& v, const View& out, const View& grad,
                    const float* log_sums, bf16* q_out, bf16* k_out, bf16* v_out, long b, long group, float scale,
                    Scratch& w) {
    long width = shape.width, blocks = shape.blocks(), size = shape.operand(), repeats = shape.heads / shape.kv_heads;
    std::fill(w.k_grad.begin(), w.k_grad.end(), 0.0f);
    std::fill(w.v_grad.begin(), w.v_grad.end(), 0.0f);
    for (long j = 0; j < blocks; j++) {  // keys transposed: [width][BLOCK]
        bf16* to = w.k_t.data() + j * size;
        for (long r = 0; r < BLOCK; r++)
            for (long h = 0; h < width; h++)
                to[h * BLOCK + r] = r < shape.rows(j) ? k.rows(b, group, j * BLOCK + r).data[h] : bf16{0};
    }
    for (long n = group * repeats; n < (group + 1) * repeats; n++) {
        std::fill(w.q_grad.begin(), w.q_grad.end(), 0.0f);
        for (long i = 0; i < blocks; i++) {
            long rows = shape.rows(i);
            Matrix queries = q.rows(b, n, i * BLOCK), grads = grad.rows(b, n, i * BLOCK), outs = out.rows(b, n, i * BLOCK);
            pack_transposed(queries, rows, width, w.q_t.data() + i * size);
            pack(queries, rows, width, w.q.data() + i * size);
            pack_transposed(grads, rows, width, w.g_t.data() + i * size);
            pack(grads, rows, width, w.g.data() + i * size);
            for (long r = 0; r < rows; r++) {
                float sum = 0;
                const bf16 *g = grads.row(r), *o = outs.row(r);
#pragma omp simd reduction(+ : sum)
                for (long h = 0; h < width; h++) sum += wide(g[h]) * wide(o[h]);
                w.inner[i * BLOCK + r] = sum;
            }
        }
        const float* sums = log_sums + (b * shape.heads + n) * shape.length;
        for (long j = 0; j < blocks; j++) {
            Matrix keys = k.rows(b, group, j * BLOCK), values = v.rows(b, group, j * BLOCK);
            long seen = shape.rows(j);
            for (long i = j; i < blocks; i++) {
                product(seen, BLOCK, width, keys.data, keys.stride, w.q_t.data() + i * size, w.scores.data(), BLOCK, false);
                product(seen, BLOCK, width, values.data, values.stride, w.g_t.data() + i * size, w.grads.data(), BLOCK, false);
                score_gradients(w, i, j, shape.rows(i), sums + i * BLOCK, scale);
                product(seen, width, BLOCK, w.weights.data(), BLOCK, w.g.data() + i * size, w.v_grad.data() + j * size, width, true);
                product(seen, width, BLOCK, w.score_grads.data(), BLOCK, w.q.data() + i * size, w.k_grad.data() + j * size, width, true);
                product(width, BLOCK, BLOCK, w.k_t.data() + j * size, BLOCK, w.pairs.data(), w.q_grad.data() + i * size, BLOCK, true);
            }
        }
        for (long s = 0; s < shape.length; s++) {
            bf16* to = q_out + ((s * shape.batch + b) * shape.heads + n) * width;
            const float* from = w.q_grad.data() + s / BLOCK * size + s % BLOCK;
            for (long h = 0; h < width; h++) store(to[h], from[h * BLOCK]);
        }
    }
    for (long s = 0; s < shape.length; s++) {
        long at = ((s * shape.batch + b) * shape.kv_heads + group) * width;
#pragma omp simd
        for (long h = 0; h < width; h++) {
            store(k_out[at + h], w.k_grad[s * width + h]);
            store(v_out[at + h], w.v_grad[s * width + h]);
        }
    }
}

View view(const void* data, const long* strides) {
    return {static_cast<const bf16*>(data), strides[0], strides[1], strides[2]};
}

}  // namespace

// Every function exists for float (suffix _f32) and for bfloat16 (suffix _bf16), but for attention.
#define BOTH(name, params, ...)                                           \
    extern "C" void name##_f32 params { using T = float; __VA_ARGS__; }   \
    extern "C" void name##_bf16 params { using T = bf16; __VA_ARGS__; }

BOTH(nx_rms_norm, (const void* x, const void* weight, void* out, float* rstd, long rows, long size, float eps, int threads),
     rms_norm_forward(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(out), rstd, rows, size, eps, threads))

BOTH(nx_rms_norm_backward, (const void* grad, const void* x, const void* weight, const float* rstd, void* x_grad,
                            float* weight_grad, long rows, long size, int threads),
     rms_norm_backward(static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(weight), rstd,
                       static_cast<T*>(x_grad), weight_grad, rows, size, threads))

BOTH(nx_swiglu, (const void* gate_up, void* out, long rows, long size, int threads),
     swiglu_forward(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, size, threads))

BOTH(nx_swiglu_backward, (const void* gate_up, const void* grad, void* out, long rows, long size, int threads),
     swiglu_backward(static_cast<const T*>(gate_up), static_cast<const T*>(grad), static_cast<T*>(out), rows, size, threads))

BOTH(nx_rotate, (const void* x, const long* strides, const float* cos, const float* sin, float sign, void* out,
                 long length, long batch, long heads, long half, int threads),
     rotate(static_cast<const T*>(x), strides, cos, sin, sign, static_cast<T*>(out), length, batch, heads, half, threads))

BOTH(nx_row_square_sums, (const void* x, float* out, long rows, long size, int threads),
     row_square_sums(static_cast<const T*>(x), out, rows, size, threads))

BOTH(nx_softmax_sums, (const void* logits, float* peaks, float* sums, long rows, long columns, long used, int threads),
     softmax_sums(static_cast<const T*>(logits), peaks, sums, rows, columns, used, threads))

BOTH(nx_softmax_grad, (void* logits, const float* log_sums, const long* targets, const float* counted, long rows,
                       long columns, long used, int threads),
     softmax_grad(static_cast<T*>(logits), log_sums, targets, counted, rows, columns, used, threads))

// Causal attention. Shapes as in Kernels.attention; strides of the first three dimensions, out and log_sums contiguous.
extern "C" void nx_attention(const void* q, const long* q_strides, const void* k, const long* k_strides, const void* v,
                             const long* v_strides, void* out, float* log_sums, long length, long batch, long heads,
                             long kv_heads, long width, float scale, int threads) {
    Shape shape{length, batch, heads, kv_heads, width};
    View queries = view(q, q_strides), keys = view(k, k_strides), values = view(v, v_strides);
    long blocks = shape.blocks(), repeats = heads / kv_heads;
#pragma omp parallel num_threads(threads)
    {
        std::vector<bf16> packed_keys(blocks * shape.operand()), packed_values(packed_keys.size());
        std::vector<bf16> weights(BLOCK * blocks * BLOCK);
        std::vector<float> scores(BLOCK * std::max(blocks * BLOCK, width)), sums(BLOCK);
#pragma omp for
        for (long group = 0; group < batch * kv_heads; group++) {
            long b = group / kv_heads, kv = group % kv_heads;
            for (long j = 0; j < blocks; j++) {
                pack_transposed(keys.rows(b, kv, j * BLOCK), shape.rows(j), width, packed_keys.data() + j * shape.operand());
                pack(values.rows(b, kv, j * BLOCK), shape.rows(j), width, packed_values.data() + j * shape.operand());
            }
            for (long n = kv * repeats; n < (kv + 1) * repeats; n++)
                forward_head(shape, queries, packed_keys.data(), packed_values.data(), static_cast<bf16*>(out),
                             log_sums + (b * heads + n) * length, b, n, scale, scores.data(), weights.data(), sums.data());
        }
        at::native::cpublas::brgemm_release(true);
    }
}

extern "C" void nx_attention_backward(const void* grad, const long* grad_strides, const void* q, const long* q_strides,
                                      const void* k, const long* k_strides, const void* v, const long* v_strides,
                                      const void* out, const float* log_sums, void* q_grad, void* k_grad, void* v_grad,
                                      long length, long batch, long heads, long kv_heads, long width, float scale,
                                      int threads) {
    Shape shape{length, batch, heads, kv_heads, width};
    long out_strides[] = {batch * heads * width, heads * width, width};
    View g = view(grad, grad_strides), o = view(out, out_strides);
    View queries = view(q, q_strides), keys = view(k, k_strides), values = view(v, v_strides);
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch(shape);
#pragma omp for
        for (long group = 0; group < batch * kv_heads; group++)
            backward_group(shape, queries, keys, values, o, g, log_sums, static_cast<bf16*>(q_grad),
                           static_cast<bf16*>(k_grad), static_cast<bf16*>(v_grad), group / kv_heads, group % kv_heads,
                           scale, scratch);
        at::native::cpublas::brgemm_release(true);
    }
}
