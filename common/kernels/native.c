/* The CPU's kernels: what a decode step does between and in its matrix products, each as one pass over memory.

   native.py compiles this file for the CPU it runs on, once for each dtype: T is float, or bfloat16 with -DBFLOAT16.
   All sums are in float, and each row's are in an order that does not depend on the other rows, so a request gets the
   same numbers whatever else is in its batch. Threads are OpenMP's, from the same pool as PyTorch's.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8 /* on narrower CPUs the compiler makes two of each */
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#ifdef BFLOAT16
typedef uint16_t T;
INLINE float get(T x) {
    uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
INLINE T put(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
#else
typedef float T;
INLINE float get(T x) { return x; }
INLINE T put(float x) { return x; }
#endif

/* --- Matrix products: weights in float16, widened in registers ------------------------------------------------ */

enum { PANEL = 2 * LANES, ROWS = 6, CHUNK = 96 }; /* ROWS x PANEL sums fill the registers; CHUNK rows of x the L2 cache */

long panel_width(void) { return PANEL; }

INLINE vec widen(const uint16_t *half) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#else
    vec result;
    for (int i = 0; i < LANES; i++) {
        _Float16 value;
        memcpy(&value, half + i, 2);
        result[i] = value;
    }
    return result;
#endif
}

INLINE void block(int rows, const float *x, const uint16_t *w, const float *bias, float *out, long in, long stride, int width) {
    vec sums[ROWS][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (vec){0};
    for (long k = 0; k < in; k++, w += PANEL) {
        vec w0 = widen(w), w1 = widen(w + LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            float value = x[r * in + k];
            sums[r][0] += value * w0;
            sums[r][1] += value * w1;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++)
            out[r * stride + i] = ((const float *)sums[r])[i] + (bias ? bias[i] : 0);
}

/* x [rows, in], w [ceil(size / PANEL), in, PANEL] float16, bias [size] or null -> out [rows, size] */
void linear(const float *x, const uint16_t *w, const float *bias, float *out, long rows, long in, long size) {
    if (!rows) return;
    long panels = (size + PANEL - 1) / PANEL, chunks = (rows + CHUNK - 1) / CHUNK;
    long length = (rows + chunks - 1) / chunks; /* of a chunk: all alike, so that no thread has less to do */
    long share = (chunks * panels + 31) / 32; /* small, for a core may be busy with something else */
#pragma omp parallel for collapse(2) schedule(dynamic, share)
    for (long chunk = 0; chunk < chunks; chunk++)
        for (long panel = 0; panel < panels; panel++) {
            long first = panel * PANEL, end = (chunk + 1) * length < rows ? (chunk + 1) * length : rows;
            int width = size - first < PANEL ? size - first : PANEL;
            const uint16_t *weights = w + first * in;
            const float *offset = bias ? bias + first : 0;
            for (long row = chunk * length, count; row < end; row += count) {
                const float *from = x + row * in;
                float *to = out + row * size + first;
                long blocks = (end - row + ROWS - 1) / ROWS;
                count = (end - row + blocks - 1) / blocks;
                switch (count) {
                    case 1: block(1, from, weights, offset, to, in, size, width); break;
                    case 2: block(2, from, weights, offset, to, in, size, width); break;
                    case 3: block(3, from, weights, offset, to, in, size, width); break;
                    case 4: block(4, from, weights, offset, to, in, size, width); break;
                    case 5: block(5, from, weights, offset, to, in, size, width); break;
                    default: block(6, from, weights, offset, to, in, size, width);
                }
            }
        }
}

/* --- Small operations ------------------------------------------------------------------------------------------- */

enum { FEW = 16384 }; /* numbers: with less than that, waking another thread costs more than it does */

/* residual = x + delta, out = its norm; without a delta the norm of x. All [rows, size]; weight [size] */
void add_rms_norm(const T *x, const T *delta, const T *weight, T *residual, T *out, long rows, long size, float eps) {
#pragma omp parallel for if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const T *from = x + row * size;
        float sum = 0;
        if (delta) {
            T *total = residual + row * size;
            for (long i = 0; i < size; i++) total[i] = put(get(from[i]) + get(delta[row * size + i]));
            from = total;
        }
        for (long i = 0; i < size; i++) sum += get(from[i]) * get(from[i]);
        float scale = 1 / sqrtf(sum / size + eps);
        for (long i = 0; i < size; i++) out[row * size + i] = put(get(from[i]) * scale * get(weight[i]));
    }
}

/* gate_up [rows, 2 * size] -> out [rows, size] */
void silu_and_mul(const T *gate_up, T *out, long rows, long size) {
#pragma omp parallel for if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        for (long i = 0; i < size; i++) {
            float g = get(gate[i]);
            out[row * size + i] = put(g / (1 + expf(-g)) * get(up[i]));
        }
    }
}

/* In place: norms of the query and the key heads where they have weights, then the rotary embedding.
   heads [rows, num_heads + 2 * num_kv_heads, size]; cos and sin [rows, size] */
void qk_norm_rope(T *heads, const T *q_weight, const T *k_weight, const T *cos, const T *sin, long rows, long num_heads,
                  long num_kv_heads, long size, float eps) {
    long all = num_heads + 2 * num_kv_heads, half = size / 2;
#pragma omp parallel for if (rows * all * size > FEW)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < num_heads + num_kv_heads; head++) {
            T *x = heads + (row * all + head) * size;
            const T *weight = head < num_heads ? q_weight : k_weight, *c = cos + row * size, *s = sin + row * size;
            if (weight) add_rms_norm(x, 0, weight, 0, x, 1, size, eps);
            for (long i = 0; i < half; i++) {
                float first = get(x[i]), second = get(x[i + half]);
                x[i] = put(first * get(c[i]) + second * get(s[i]));
                x[i + half] = put(second * get(c[i + half]) + first * get(s[i + half]));
            }
        }
}

/* --- Attention of one new token per request over its pages ------------------------------------------------------ */

enum { PARTS = 512 / LANES }; /* of the largest head */
enum { TILE = 32 }; /* tokens between two looks at the largest score so far (Milakov & Gimelshein, 2018) */

INLINE vec load(const T *x, long count) { /* the first `count` of LANES numbers, then zeros */
    if (count < LANES) {
        float few[LANES] = {0};
        for (long i = 0; i < count; i++) few[i] = get(x[i]);
        return *(vec *)few;
    }
#ifdef BFLOAT16
    return (vec)(__builtin_convertvector(*(const half_vec *)x, bits_vec) << 16);
#else
    return *(const vec *)x;
#endif
}

INLINE float total_of(vec x) {
    float lanes[LANES], sum = 0;
    memcpy(lanes, &x, sizeof x);
    UNROLL for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

INLINE void attend(const T *q, const T *k_cache, const T *v_cache, const int32_t *table, T *out, long len, long group,
                   long size, long page_size, long step, float scale) {
    const long parts = (size + LANES - 1) / LANES;
    for (long g = 0; g < group; g++, q += size, out += size) {
        vec query[PARTS], sums[PARTS];
        float top = -1e30f, total = 0;
        for (long c = 0; c < parts; c++) query[c] = load(q + c * LANES, size - c * LANES) * scale, sums[c] = (vec){0};
        for (long start = 0; start < len; start += TILE) {
            long count = len - start < TILE ? len - start : TILE, slots[TILE], page = start / page_size, at = start % page_size;
            float scores[TILE], most = top, weight = 0;
            for (long t = 0; t < count; t++) {
                slots[t] = (table[page] * page_size + at) * step;
                if (++at == page_size) at = 0, page++;
            }
            for (long t = 0; t < TILE; t++) scores[t] = -1e30f;
            for (long t = 0; t < count; t++) {
                vec sum = {0};
                UNROLL for (long c = 0; c < parts; c++) sum += query[c] * load(k_cache + slots[t] + c * LANES, size - c * LANES);
                scores[t] = total_of(sum);
            }
            for (long t = 0; t < TILE; t++) most = scores[t] > most ? scores[t] : most;
            for (long t = 0; t < TILE; t++) scores[t] = expf(scores[t] - most), weight += scores[t];
            float shrink = expf(top - most);
            for (long c = 0; c < parts; c++) sums[c] *= shrink;
            for (long t = 0; t < count; t++)
                UNROLL for (long c = 0; c < parts; c++) sums[c] += scores[t] * load(v_cache + slots[t] + c * LANES, size - c * LANES);
            top = most, total = total * shrink + weight;
        }
        float inverse = total > 0 ? 1 / total : 0, result[PARTS * LANES];
        for (long c = 0; c < parts; c++) memcpy(result + c * LANES, &sums[c], sizeof(vec));
        for (long i = 0; i < size; i++) out[i] = put(result[i] * inverse);
    }
}

/* q [batch, num_heads, size] with q_stride numbers from one request to the next; caches [pages, page_size, num_kv_heads, size];
   lens [batch] tokens in the cache; table [batch, table_stride]. New keys and values k, v [batch, num_kv_heads, size], if
   there are any, are stored first and count too. -> out [batch, num_heads, size] */
void decode_attention(const T *q, T *k_cache, T *v_cache, const T *k, const T *v, const int32_t *lens, const int32_t *table,
                      T *out, long batch, long num_heads, long num_kv_heads, long size, long page_size, long q_stride,
                      long k_stride, long v_stride, long table_stride, float scale) {
    long group = num_heads / num_kv_heads, step = num_kv_heads * size;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (long b = 0; b < batch; b++)
        for (long h = 0; h < num_kv_heads; h++) {
            const int32_t *pages = table + b * table_stride;
            long len = lens[b];
            if (k) {
                long slot = (pages[len / page_size] * page_size + len % page_size) * step + h * size;
                memcpy(k_cache + slot, k + b * k_stride + h * size, size * sizeof(T));
                memcpy(v_cache + slot, v + b * v_stride + h * size, size * sizeof(T));
                len++;
            }
            const T *query = q + b * q_stride + h * group * size, *keys = k_cache + h * size, *values = v_cache + h * size;
            T *to = out + (b * num_heads + h * group) * size;
            if (size == 64) /* known sizes make loops without ends to look after */
                attend(query, keys, values, pages, to, len, group, 64, page_size, step, scale);
            else if (size == 128)
                attend(query, keys, values, pages, to, len, group, 128, page_size, step, scale);
            else
                attend(query, keys, values, pages, to, len, group, size, page_size, step, scale);
        }
}
